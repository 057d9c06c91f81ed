"""What NCCL and RCCL of several years log as they make the first communicator, by network.

They are put together from the formats of lines in public logs and sources; none was recorded as a whole.
"""

SOCKET_2_18 = """\
nid001:8527:8527 [0] NCCL INFO Bootstrap : Using hsn0:10.249.0.14<0>
nid001:8527:8527 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open \
shared object file: No such file or directory
nid001:8527:8527 [0] NCCL INFO NET/Plugin : No plugin found, using internal implementation
nid001:8527:8527 [0] NCCL INFO cudaDriverVersion 12020
NCCL version 2.18.1+cuda12.1
nid001:8527:8601 [0] NCCL INFO NET/IB : No device found.
nid001:8527:8601 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.249.0.14<0> [1]hsn1:10.249.0.15<0>
nid001:8527:8601 [0] NCCL INFO Using network Socket
nid001:8527:8601 [0] NCCL INFO Channel 00/0 : 3[3] -> 0[0] [receive] via NET/Socket/0
"""
SOCKET_2_27 = """\
node-0:152:386 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
node-0:152:386 [0] NCCL INFO NET/IB : No device found.
node-0:152:386 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.0.4.51<0>
node-0:152:386 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0>
node-0:152:386 [0] NCCL INFO Initialized NET plugin Socket
node-0:152:386 [0] NCCL INFO Assigned NET plugin Socket to comm
node-0:152:386 [0] NCCL INFO Using network Socket
"""
IB_2_27 = """\
node-0:152:386 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
node-0:152:386 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.1.0.4<0>
node-0:152:386 [0] NCCL INFO Initialized NET plugin IB
node-0:152:386 [0] NCCL INFO Assigned NET plugin IB to comm
node-0:152:386 [0] NCCL INFO Using network IB
node-0:152:390 [0] NCCL INFO Channel 00/0 : 3[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
"""
AWS_LIBFABRIC_2_18 = """\
nid001:51404:51404 [0] NCCL INFO Plugin name set by env to libnccl-net-ofi.so
nid001:51404:51404 [0] NCCL INFO NET/Plugin: Failed to find ncclNetPlugin_v8 symbol.
nid001:51404:51404 [0] NCCL INFO NET/Plugin: Loaded net plugin AWS Libfabric (v5)
nid001:51404:52019 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.6.0
nid001:51404:52019 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)
nid001:51404:52019 [0] NCCL INFO Using network AWS Libfabric
"""
LIBFABRIC_2_27 = """\
node-0:188:188 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
node-0:188:585 [0] NCCL INFO NET/Plugin: Loaded net plugin Libfabric (v10)
node-0:188:585 [0] NCCL INFO Successfully loaded external plugin libnccl-net.so
node-0:188:585 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.16.2
node-0:188:585 [0] NCCL INFO NET/OFI Using Libfabric version 2.1
node-0:188:585 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 1 nics)
node-0:188:585 [0] NCCL INFO Initialized NET plugin Libfabric
node-0:188:585 [0] NCCL INFO Assigned NET plugin Libfabric to comm
node-0:188:585 [0] NCCL INFO Using network Libfabric
node-0:188:585 [0] NCCL INFO DMA-BUF is available on GPU device 0
node-0:188:706 [0] NCCL INFO Assigned NET plugin Libfabric to comm
node-0:188:706 [0] NCCL INFO Using network Libfabric
node-0:188:709 [0] NCCL INFO Channel 00/0 : 3[0] -> 0[0] [receive] via NET/Libfabric/0/GDRDMA
"""
LOGS = {  # with the network and the provider that they name
    "NCCL 2.18 by TCP": (SOCKET_2_18, "Socket", ""),
    "NCCL 2.27 by TCP": (SOCKET_2_27, "Socket", ""),
    "NCCL 2.27 by InfiniBand": (IB_2_27, "IB", ""),
    "a plugin of 2023": (AWS_LIBFABRIC_2_18, "AWS Libfabric", "cxi"),
    "a plugin of 2025": (LIBFABRIC_2_27, "Libfabric", "efa"),
}
