"""The rank's side of NCCL's network: what is set for NCCL, and what is said of what it writes."""

import os
import threading

import pytest
from msgspec.structs import replace

from jaxrun.protocol.env import WorkerEnv
from jaxrun_runtime import nccl_network

# Lines that NCCL and RCCL of several years log as they make the first communicator: put together from the formats in
# public logs and sources.
TCP = """\
nid001:8527:8527 [0] NCCL INFO Bootstrap : Using hsn0:10.249.0.14<0>
nid001:8527:8601 [0] NCCL INFO NET/IB : No device found.
nid001:8527:8601 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.249.0.14<0> [1]hsn1:10.249.0.15<0>
nid001:8527:8601 [0] NCCL INFO Using network Socket
nid001:8527:8601 [0] NCCL INFO Channel 00/0 : 3[3] -> 0[0] [receive] via NET/Socket/0
"""
INFINIBAND = """\
node-0:152:386 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.1.0.4<0>
node-0:152:386 [0] NCCL INFO Assigned NET plugin IB to comm
node-0:152:386 [0] NCCL INFO Using network IB
"""
PLUGIN_OF_2023 = """\
nid001:51404:51404 [0] NCCL INFO NET/Plugin: Loaded net plugin AWS Libfabric (v5)
nid001:51404:52019 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)
nid001:51404:52019 [0] NCCL INFO Using network AWS Libfabric
"""
PLUGIN_OF_2025 = """\
node-0:188:585 [0] NCCL INFO NET/OFI Using Libfabric version 2.1
node-0:188:585 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 1 nics)
node-0:188:585 [0] NCCL INFO Assigned NET plugin Libfabric to comm
node-0:188:585 [0] NCCL INFO Using network Libfabric
node-0:188:706 [0] NCCL INFO Using network Libfabric
"""
LOGS = {  # with the network and the provider that they name
    "NCCL 2.18 by TCP": (TCP, "Socket", ""),
    "NCCL 2.27 by InfiniBand": (INFINIBAND, "IB", ""),
    "a plugin of 2023": (PLUGIN_OF_2023, "AWS Libfabric", "cxi"),
    "a plugin of 2025": (PLUGIN_OF_2025, "Libfabric", "efa"),
}
ENV = WorkerEnv("ab" * 16, 0, 6, 0, 3, "h2", channel_fd=0, stacks_fd=0, flight_fd=0, init_timeout=60.0)
NAMES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")


@pytest.fixture
def threads(monkeypatch):
    """The threads that would have been started."""
    made = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: made.append(thread))
    return made


@pytest.fixture
def watch(threads, monkeypatch):
    """watch(…) of rank 0."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
    monkeypatch.setattr(nccl_network, "_POLL_INTERVAL_S", 0.01)
    return lambda platform="gpu", **changes: nccl_network.watch(replace(ENV, **changes), platform)


def test_what_nccl_writes_to_the_file_that_it_is_given_is_said(watch, threads, capsys):
    watch()
    assert [os.environ[name] for name in NAMES[::2]] == ["INFO", "INIT,NET"]
    log, network, provider = LOGS["a plugin of 2023"]
    with open(os.environ["NCCL_DEBUG_FILE"], "w", buffering=1) as file:  # as NCCL opens it
        file.write(log)
    (thread,) = threads
    thread.run()
    assert capsys.readouterr().err == f"jaxrun: NCCL's network between hosts: {network} ({provider})\n"
    os.close(int(os.environ["NCCL_DEBUG_FILE"].rpartition("/")[2]))


@pytest.mark.parametrize("changes", [{"platform": "cpu"}, {"rank": 3}, {"local_size": 6}], ids=str)
def test_nothing_is_set_where_there_is_no_way_between_gpu_hosts_or_another_rank_says(watch, threads, changes):
    watch(**changes)
    assert threads == [] and not any(os.environ[name] for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_log_that_the_user_has_asked_for_is_left_alone(watch, threads, monkeypatch, name):
    monkeypatch.setenv(name, "x")
    watch()
    assert threads == [] and [os.environ[one] for one in NAMES if os.environ[one]] == ["x"]


@pytest.mark.parametrize(("log", "network", "provider"), LOGS.values(), ids=LOGS)
def test_the_network_is_read_from_the_log_as_soon_as_that_line_is_whole(log, network, provider):
    found = nccl_network.NETWORK.search(log.encode())
    assert found.groups(b"") == (provider.encode(), network.encode())
    end = log.index("Using network ") + len("Using network ") + len(network)
    whole = (nccl_network.NETWORK.search(log[:to].encode()) is not None for to in (end, end + 1))
    assert tuple(whole) == (False, True)


@pytest.mark.parametrize(
    ("taken", "nics", "beside"),
    [
        (("Socket", ""), ("cxi/cxi1", "cxi/cxi0", "net/hsn0"), "cxi0"),
        (("AWS Libfabric", "tcp;ofi_rxm"), ("infiniband/mlx5_0",), "mlx5_0"),
        (("Socket", ""), ("net/hsn0", "net/eth0"), "hsn0"),
        (("Socket", ""), ("net/eth0",), ""),
        (("AWS Libfabric", "cxi"), ("cxi/cxi0",), ""),
    ],
    ids=str,
)
def test_tcp_beside_a_fabric_is_a_warning(tmp_path, taken, nics, beside):
    for nic in nics:
        (tmp_path / nic).mkdir(parents=True)
    text = nccl_network.describe_network(*taken, tmp_path)
    assert text.startswith("warning: ") == bool(beside) and (not beside or f", TCP beside {beside};" in text)
