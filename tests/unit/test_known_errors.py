"""Each known error against the real text that it is for, and where that text came from."""

from __future__ import annotations

import re
import signal
import string
import time

import pytest

from jaxrun.diagnosis.worker_outcome import WorkerOutcome
from jaxrun.protocol.worker_messages import Failed, ThreadFailed
from jaxrun.verdict.known_errors import lookup
from jaxrun.verdict.known_errors.known_error import KnownError

FILTERED = "--------------------\nFor simplicity, JAX has removed its internal frames from the traceback.\n"
DIED = (
    "F1121 client.h:80] Terminating process because the JAX distributed service detected fatal errors. This most "
    "likely indicates that another task died; see the other task logs for more details. absl::Status: "
)
LOOPBACK = (
    "UNKNOWN: Gloo context initialization failed: [external/gloo/gloo/transport/tcp/pair.cc:152] timed out "
    "connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:40357$0"
)
MISMATCH = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at "
    "external/gloo/gloo/transport/tcp/pair.cc:459] op.preamble.length <= op.nbytes. 16 vs 8. Received data size "
    "doesn't match expected size. Is there a distributed collective mismatch in your code?\n"
)
NOT_THE_SAME = (
    "<class 'numpy.ndarray'> passed to device_put is not the same on each process. Make sure you are passing the same "
    "value of <class 'numpy.ndarray'> on each process.."
)
DELETED = "Array has been deleted with shape=float32[4]."

# (row, where the text is from, the text)
EXAMPLES = [
    (
        "mesh-shape",
        "JAX 0.8.0, 0.10.2, 0.12.0.1: make_mesh",
        "Number of devices 4 must be >= the product of mesh_shape (10,)",
    ),
    (
        "mesh-shape",
        "JAX 0.10.2: create_device_mesh",
        "Number of devices 4 must equal the product of mesh_shape (10,)",
    ),
    (
        "logical-devices",
        "JAX 0.8.0: pmap",
        "compiling computation that requires 10 logical devices, but only 1 XLA devices are available",
    ),
    (
        "several-slices",
        "JAX 0.11.0, netket#2260",
        "`jax.make_mesh` does not support multi-slice topologies. Please use "
        "jax.experimental.mesh_utils.create_hybrid_device_mesh",
    ),
    (
        "no-slices",
        "JAX 0.10.2",
        "Device cpu:0 does not have attribute slice_index. See `process_is_granule` option.",
    ),
    (
        "no-such-backend",
        "JAX 0.10.2",
        "Unknown backend tpu. Available backends are ['cpu']",
    ),
    (
        "no-such-backend",
        "JAX 0.12.0.1",
        "Unknown backend: 'gpu' requested, but no platforms that are instances of gpu are present. "
        "Platforms present are: cpu",
    ),
    (
        "devices-set-late",
        "JAX 0.10.2",
        "jax_num_cpu_devices config should be updated before backends are initialized i.e. before any JAX operation",
    ),
    (
        "joined-late",
        "JAX 0.10.2",
        "jax.distributed.initialize() must be called before any JAX calls that might initialise the XLA backend.",
    ),
    (
        "uneven-shard-map",
        "JAX 0.10.2: shard_map",
        "the passed args[0] of shape float32[10], where args[0] is bound to <lambda>'s parameter 'x', corresponds to "
        "in_specs of value P('x',), which maps array axis 0 (of size 10) to mesh axis 'x' (of size 4), but 4 does "
        "not evenly divide 10",
    ),
    (
        "uneven-sharding",
        "JAX 0.10.2: jit",
        "Sharding NamedSharding(mesh=Mesh('x': 4, axis_types=(Auto,)), spec=P('x',), memory_kind=device) implies that "
        "array axis 0 is partitioned 4 times, but the dimension size is 10 (full shape: (10,), per-dimension tiling "
        "factors: [4] should evenly divide the shape)",
    ),
    (
        "uneven-dimension",
        "JAX 0.8.0: device_put",
        "One of device_put args was given the sharding of NamedSharding(mesh=Mesh('x': 4, axis_types=(Auto,)), "
        "spec=PartitionSpec('x',), memory_kind=device), which implies that the global size of its dimension 0 should "
        "be divisible by 4, but it is equal to 10 (full shape: (10,))",
    ),
    (
        "uneven-mesh",
        "JAX 0.12.0.1: with_sharding_constraint",
        "shape=[2, 2] is incompatible with mesh_shape=OrderedDict({'x': 4}): dim_size=2 is not divisible by "
        "axis_size=4.",
    ),
    (
        "not-addressable",
        "JAX 0.8.0, 0.10.2, 0.12.0.1: numpy.asarray",
        "Fetching value for `jax.Array` that spans non-addressable (non process local) devices is not possible.",
    ),
    (
        "gather-tiled",
        "JAX 0.10.2",
        "Gathering global non-fully-addressable arrays only supports tiled=True",
    ),
    (
        "local-data-size",
        "JAX 0.10.2",
        "Invalid host data, each dimension should match either global or process shape. In dimension 0, the process "
        "data has 3 elements. Process addresses 2 elements and global_shape=(4, 3).",
    ),
    (
        "global-shape",
        "JAX 0.10.2, from its source",
        "Unable to compute global_shape due to non-uniform sharding. Specify global shape directly. Partially "
        "computed global_shape=(None,).",
    ),
    (
        "rounded-by-jax",
        "JAX 0.12.0.1: device_put of float64 on two ranks",
        f"{NOT_THE_SAME} Expected: [[ 1.7640524   0.4001572 ]\n [ 2.2408931   1.867558  ]\n [ 1.7640524   0.4001572 ]"
        "\n [ 2.2408931   1.867558  ]]; got: [[ 1.76405235  0.40015721]\n [ 2.2408932   1.86755799]].",
    ),
    (
        "rounded-by-jax",
        "JAX 0.12.0.1: a large one",
        f"{NOT_THE_SAME} Expected: [[ 1.7640524   0.4001572 ]\n ...\n [ 0.01695851  1.5388683 ]]; got: [[ 1.76405235  "
        "0.40015721]\n ...\n [ 0.01695851  1.53886832]].",
    ),
    (
        "nan-between-ranks",
        "JAX 0.12.0.1",
        f"{NOT_THE_SAME} Expected: [ 1. nan  1. nan]; got: [ 1. nan].",
    ),
    ("differs-between-ranks", "JAX 0.12.0.1: rank 0", f"{NOT_THE_SAME} Expected: [0. 0. 1. 1.]; got: [0. 0.]."),
    (
        "differs-between-ranks",
        "JAX 0.12.0.1: int64",
        f"{NOT_THE_SAME} Expected: [0 1 0 1]; got: [1099511627776             1].",
    ),
    (
        "cross-host-transfer",
        "JAX 0.12.0.1",
        "UNIMPLEMENTED: Cross-host transfers are not supported by this backend. Set the "
        "`--jax_cross_host_transfer_socket_address` flag to enable DCN transfers on Linux for any backend.",
    ),
    (
        "cross-host-transfer",
        "JAX 0.10.2",
        "The backend (cpu, cpu) does not support cross-host device transfers. Please set "
        "jax_cross_host_transfer_socket_address and (optionally) jax_cross_host_transport_addresses flags",
    ),
    (
        "cross-host-reshard",
        "JAX 0.12.0.1",
        "For a cross-host reshard in multi-controller JAX, input and target sharding should have the same set of "
        "devices. Got input's device set ids: [0, 2048] on platform CPU and target sharding's device set ids: [0]",
    ),
    (
        "host-local-checkpoint",
        "orbax 0.12.8",
        "Cannot serialize host local jax.Array (ParamInfo=[name=a,value_typestr=jax.Array], jax.Array=[value=[1. 1.]]) "
        "in multi-host setting. Arrays like this are typically obtained using pmap.",
    ),
    ("torchrun-variables", "os.environ", "Traceback (most recent call last):\nKeyError: 'MASTER_ADDR'"),
    (
        "torchrun-variables",
        "PyTorch 2",
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, "
        "but not set",
    ),
    ("engine-variables", "os.environ", "KeyError: 'SLURM_NTASKS'"),
    (
        "child-died",
        "Python 3.13: ProcessPoolExecutor",
        "A process in the process pool was terminated abruptly while the future was running or pending.",
    ),
    (
        "child-died",
        "PyTorch 2",
        "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Segmentation fault.",
    ),
    ("child-died", "PyTorch 2", "RuntimeError: DataLoader worker (pid(s) 4711, 4712) exited unexpectedly"),
    (
        "differs-between-ranks",
        "JAX 0.10.2: device_put",
        "<class 'numpy.ndarray'> passed to device_put is not the same on each process. Make sure you are passing the "
        "same value of <class 'numpy.ndarray'> on each process.. Expected: [[0 0 0]\n [1 1 1]]; got: [[0 0 0]].",
    ),
    (
        "sync-names",
        "JAX 0.10.2",
        "sync_global_devices name mismatch ('step 0'). Expected: [3681739692 2893402938]; got: 3681739692.",
    ),
    (
        "numpy-into-jit",
        "JAX 0.10.2",
        "Passing non-trivial shardings for numpy inputs is not allowed. To fix this error, either specify a",
    ),
    (
        "arrays-per-device",
        "JAX 0.10.2",
        "Expected 2 per-device arrays (this is how many devices are addressable by the sharding), but got 1",
    ),
    ("donated", "JAX 0.10.2", f"{DELETED}\n{FILTERED}"),
    (
        "different-devices",
        "JAX 0.10.2",
        "Received incompatible devices for jitted computation. Got argument x of add with shape float32[4] and with "
        "device ids [0] on platform CPU and argument y of add with shape float32[4] and with device ids [1]",
    ),
    (
        "explicit-sharding",
        "JAX 0.10.2: a sum",
        "add operation with inputs: f32[4@x,4], f32[4,4@x] produces an illegally sharded result: f32[4@x,4@x]",
    ),
    (
        "explicit-sharding",
        "JAX 0.10.2: a product",
        "Contracting dimensions are sharded and it is ambiguous how the output should be sharded.",
    ),
    (
        "axis-not-in-mesh",
        "JAX 0.10.2",
        "Resource axis: y of P('y',) is not found in mesh: ('x',).",
    ),
    (
        "axis-unbound",
        "JAX 0.10.2",
        "unbound axis name: x",
    ),
    ("collective-mismatch", "JAX 0.10.2: stderr of an all-gather of 4 and 6 numbers", MISMATCH),
    ("not-in-this-jax", "JAX 0.10.2", "No module named 'jax.experimental.maps'"),
    ("not-in-this-jax", "JAX 0.10.2", "module 'jax' has no attribute 'xla_computation'"),
    (
        "not-in-this-jax",
        "JAX 0.12.0.1",
        "cannot import name 'PositionalSharding' from 'jax.sharding' (/env/lib/jax/sharding.py)",
    ),
    (
        "not-in-this-jax",
        "JAX 0.8.0",
        "jax.tree_map was removed in JAX v0.6.0: use jax.tree.map (jax v0.4.25 or newer)",
    ),
    # mpirun, srun, ssh
    (
        "no-jaxrun",
        "Python 3.11, started by srun",
        "  /usr/bin/python3: Error while finding module specification for 'jaxrun.agent' (ModuleNotFoundError: "
        "No module named 'jaxrun')",
    ),
    ("no-jaxrun", "Python 3.11", "  /usr/bin/python3: No module named jaxrun"),
    (
        "no-python",
        "Hydra of MPICH 5.0.2",
        "  [proxy:1@h2] HYDU_create_process (lib/utils/launch.c:73): execvp error on file /env/bin/python (No such "
        "file or directory)",
    ),
    (
        "no-python",
        "Slurm 22.05",
        "  slurmstepd-h2: error: execve(): /env/bin/python: No such file or directory",
    ),
    (
        "no-executable",
        "Open MPI 5.0.11",
        "  prterun was unable to launch the specified application as it could not\n  access an executable:\n"
        "     Executable: /env/bin/python\n     Node: h2\n  while attempting to start process rank 1.",
    ),
    (
        "no-executable",
        "Open MPI 4.1.4",
        "  mpirun was unable to find the specified executable file, and therefore\n  did not launch the job.  This "
        "error was first reported for process\n  rank 0; it may have occurred for other processes as well.\n"
        "  Node:       h1\n  Executable: /env/bin/python",
    ),
    (
        "slots",
        "Open MPI 4.1.4, its first lines",
        "  There are not enough slots available in the system to satisfy the 200\n  slots that were requested",
    ),
    (
        "slots",
        "Open MPI 5.0.11, its last lines",
        "  Alternatively, you can use the --map-by :OVERSUBSCRIBE option to ignore the\n  number of available slots "
        "when deciding the number of processes to\n  launch.",
    ),
    (
        "unknown-host",
        "OpenSSH, under Hydra",
        "  ssh: Could not resolve hostname nosuchhost: Name or service not known",
    ),
    ("ssh-key", "OpenSSH, as reported", "  me@h2: Permission denied (publickey,password)."),
    ("ssh-host-key", "OpenSSH, as reported", "  Host key verification failed."),
    ("not-on-path", "dash", "  /bin/sh: 1: orted: not found"),
    ("not-on-path", "bash", "  bash: line 1: prted: command not found"),
    (
        "mpi-leftovers",
        "Open MPI 5.0.11, on the launcher's host",
        "  The PMIx server's listener thread failed to start. We cannot\n  continue.",
    ),
    (
        "mpi-leftovers",
        "Open MPI 5.0.11, on another host",
        "  A daemon failed to report back after being spawned. This could\n  be due to several factors, including\n"
        "    Local host:    h1\n    Remote host:   h2\n    Daemon exit status: 213",
    ),
    (
        "mpi-daemon",
        "Open MPI 5.0.11",
        "  A daemon failed to report back after being spawned. This could\n  be due to several factors, including",
    ),
    (
        "mpi-daemon",
        "Open MPI 4.1.4, its last lines",
        "  * an inability to create a connection back to mpirun due to a\n    lack of common network interfaces",
    ),
    (
        "partition",
        "Slurm 22.05",
        "  srun: error: invalid partition specified: nosuch\n  srun: error: Unable to allocate resources: Invalid "
        "partition name specified",
    ),
    (
        "account",
        "Slurm, as reported",
        "  sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
    ),
    (
        "gres",
        "Slurm 22.05",
        "  srun: error: Invalid generic resource (gres) specification",
    ),
    (
        "nodes",
        "Slurm 22.05",
        "  srun: error: Unable to allocate resources: Requested node configuration is not available",
    ),
    (
        "nodes",
        "Slurm 22.05: -w",
        "  srun: error: Unable to allocate resources: Invalid node name specified",
    ),
    (
        "allocation-over",
        "Slurm 22.05",
        "  srun: error: Unable to confirm allocation for job 99999: Invalid job id specified\n  srun: Check "
        "SLURM_JOB_ID environment variable. Expired or invalid job 99999",
    ),
    # GPUs
    (
        "gpu-twice",
        "NCCL 2.17.1, nccl#1241",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 3 and rank 2 both on CUDA device e2000",
    ),
    (
        "shared-memory",
        "jax#26465",
        "INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error (run with NCCL_DEBUG=INFO for "
        "details). Last NCCL warning(error) log entry (may be unrelated) 'Error while creating shared memory segment "
        "/dev/shm/nccl-kXqNYh (size 9637888), error: No space left on device (28)'.",
    ),
    (
        "nccl",
        "jax#26465, its first half",
        "INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    ),
    (
        "gpu-number",
        "jax#23452",
        "INTERNAL: Failed call to cuDeviceGet: CUDA_ERROR_INVALID_DEVICE: invalid device ordinal",
    ),
    (
        "no-gpu",
        "jax#28194",
        "Unable to initialize backend 'cuda': INTERNAL: no supported devices found for platform CUDA (you may need to "
        "uninstall the failing plugin package, or set JAX_PLATFORMS=cpu to skip this backend.)",
    ),
    (
        "no-cuda-backend",
        "JAX 0.11.2 on an H100, CUDA_VISIBLE_DEVICES empty",
        "Unable to initialize backend 'cuda': Backend 'cuda' is not in the list of known backends: ['cpu', 'tpu']. "
        "(set JAX_PLATFORMS='' to automatically choose an available backend)",
    ),
    ("no-gpu", "jax#24866", "FAILED_PRECONDITION: No visible GPU devices."),
    (
        "no-gpu",
        "jax#28376",
        "failed call to cuInit: INTERNAL: CUDA error: Failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable "
        "device is detected",
    ),
    (
        "gpu-memory",
        "jax#13428",
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes.\nBufferAssignment OOM Debugging.",
    ),
    (
        "gpu-memory",
        "equinox#737",
        "RESOURCE_EXHAUSTED: Failed to allocate request for 6.27GiB (6727663616B) on device ordinal 0",
    ),
    (
        "cudnn",
        "jaxlib-feedstock#329",
        "E1027 15:11:27.184481 3266602 cuda_dnn.cc:456] Loaded runtime CuDNN library: 9.10.1 but source was compiled "
        "with: 9.13.1.  CuDNN library needs to have matching major version and equal or higher minor version.",
    ),
    # memory, limits, networks
    (
        "host-memory",
        "JAX 0.8.0, 0.10.2, 0.12.0.1 on CPU",
        "RESOURCE_EXHAUSTED: Out of memory allocating 4398046511104 bytes.",
    ),
    (
        "numpy-memory",
        "NumPy 2",
        "Unable to allocate 1.00 PiB for an array with shape (16777216, 16777216) and data type float32",
    ),
    ("disk-full", "Python 3.11", "[Errno 28] No space left on device"),
    ("open-files", "Python 3.11", "[Errno 24] Too many open files: '/dev/null'"),
    ("processes", "Python 3.13", "can't start new thread"),
    (
        "processes",
        "JAX 0.12.0",
        "E1122 12:34:55.321474   30265 thd.cc:157] pthread_create failed: Resource temporarily unavailable",
    ),
    ("processes", "jaxrun", "rank 0 could not be started: Resource temporarily unavailable (/usr/bin/python)"),
    ("loopback", "JAX 0.10.2: two hosts, each with 127.0.1.1 for its own name", LOOPBACK),
    (
        "own-name",
        "JAX 0.10.2",
        "Unable to initialize backend 'cpu': [enforce fail at external/gloo/gloo/transport/tcp/device.cc:99] "
        "rv == 0. -2 vs 0 (set JAX_PLATFORMS='' to automatically choose an available backend)",
    ),
    (
        "join-deadline",
        "JAX 0.8.0",
        f"{DIED}DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: /tensorflow.CoordinationService/RegisterTask\n",
    ),
    (
        "join-deadline",
        "JAX 0.10.2",
        f"{DIED}DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: /xla.coordination.CoordinationService/RegisterTask\n",
    ),
    ("port-in-use", "Python 3.11", "[Errno 98] Address already in use"),
    (
        "port-in-use",
        "JAX 0.10.2: before a crash",
        "E1121 add_port.cc:83] Failed to add port to server: No address added out of total 1 resolved for '[::]:1996'",
    ),
    ("proxy", "Python 3.11", "<urlopen error Tunnel connection failed: 403 Forbidden>"),
    # what is installed
    (
        "jaxlib-older",
        "JAX 0.10.2 with jaxlib 0.8.0",
        "jaxlib is version 0.8.0, but this version of jax requires version >= 0.10.1.",
    ),
    (
        "jaxlib-newer",
        "JAX 0.8.0 with jaxlib 0.10.2",
        "jaxlib version 0.10.2 is newer than and incompatible with jax version 0.8.0. Please update your jax and/or "
        "jaxlib packages.",
    ),
    (
        "plugin-interface",
        "JAX 0.4.28, jax#22416",
        "Unable to initialize backend 'cuda': INVALID_ARGUMENT: Mismatched PJRT plugin PJRT API version (0.54) and "
        "framework PJRT API version 0.51).",
    ),
    (
        "plugin-version",
        "jaxlib 0.7.1",
        "plugin_support.py:71: RuntimeWarning: JAX plugin jax_cuda12_plugin version 0.7.2 is installed, but it is not "
        "compatible with the installed jaxlib version 0.7.1, so it will not be used.",
    ),
    (
        "xla-flags",
        "JAX 0.10.2",
        "F1121 04:43:19.775147   18466 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_foo=1",
    ),
    (
        "mpitrampoline",
        "JAX 0.10.2: JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi",
        "MPItrampoline: ERROR: The environment variable MPITRAMPOLINE_LIB is not set.",
    ),
    (
        "no-mpi-library",
        "mpi4py 4",
        "cannot load MPI library\n/nosuch/libmpi.so: cannot open shared object file: No such file or directory",
    ),
    (
        "mpi-under-srun",
        "Open MPI 4.1.4 under Slurm 22.05",
        'The application appears to have been direct launched using "srun",\nbut OMPI was not built with SLURM\'s PMI '
        "support and therefore cannot\nexecute.",
    ),
]


def died(status: int | None, **more: object) -> WorkerOutcome:
    return WorkerOutcome(0, "h1", 1.0, status, **more)  # type: ignore[arg-type]


def raised(message: str, traceback: str = "", *, tail: str = "", error: str = "ValueError") -> WorkerOutcome:
    return died(1, failure=Failed(0, 0.0, "program", 1, error, message, traceback), stderr_tail=tail)


@pytest.mark.parametrize(("key", "text"), [(key, text) for key, _, text in EXAMPLES])
def test_a_text_matches_its_row_and_none_before_it(key: str, text: str) -> None:
    assert next((row.key for row in lookup.KNOWN_ERRORS if row.search(text)), "no row") == key


def test_every_row_has_an_example_and_a_name_of_its_own() -> None:
    keys = [row.key for row in lookup.KNOWN_ERRORS]
    assert len(set(keys)) == len(keys) >= 25
    assert {key for key, _, _ in EXAMPLES} == set(keys)


@pytest.mark.parametrize("row", lookup.KNOWN_ERRORS, ids=lambda row: row.key)
def test_a_row_holds_one_text_of_each_kind(row: KnownError) -> None:
    assert row.means.endswith(".") and row.means.count(". ") == 0
    assert row.advice and len(row.means) <= 120 and len(row.advice) <= 200
    assert row.link == "" or row.link.startswith("https://")
    for sentence in (row.means, row.advice):
        assert {name for _, name, _, _ in string.Formatter().parse(sentence) if name} <= set(
            re.compile(row.pattern).groupindex
        )


@pytest.mark.parametrize("text", [text for _, _, text in EXAMPLES])
def test_an_explanation_has_its_numbers_filled_in(text: str) -> None:
    known = lookup.find_explanation(text)
    assert known.means and "{" not in known.means + known.advice and "None" not in known.means + known.advice


def test_numbers_of_the_text_stand_in_the_sentences() -> None:
    known = lookup.find_explanation(dict((key, text) for key, _, text in EXAMPLES)["logical-devices"])
    assert known.means == "the computation wants 10 devices, and 1 can be used."
    assert known.advice.startswith("jaxrun -n 10, or -d 10 for simulated devices")


@pytest.mark.parametrize("text", ["", "bad record in shard 2", "KeyError: 'x'", "Connection reset by peer", FILTERED])
def test_an_unknown_text_is_not_explained(text: str) -> None:
    assert lookup.find_explanation(text, text) == lookup.Explanation()


def test_an_exception_is_known_by_its_message_before_the_rest_of_its_chain() -> None:
    chain = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\nOSError: [Errno 24] Too many open files\n\n'
        "During handling of the above exception, another exception occurred:\n\n"
    )
    assert "donated" in lookup.explain_worker(raised(DELETED, f"{chain}RuntimeError: {DELETED}\n")).means
    assert "open files" in lookup.explain_worker(raised("cannot load shard", f"{chain}ValueError: cannot load\n")).means


def test_a_source_line_in_a_traceback_and_the_log_of_a_rank_that_raised_are_no_evidence() -> None:
    traceback = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    raise E("{DELETED}")\nE: other\n'
    assert lookup.explain_worker(raised("other", traceback, tail=MISMATCH)).means == ""


def test_stderr_explains_a_rank_without_an_exception() -> None:
    assert "16 bytes came where 8" in lookup.explain_worker(died(-signal.SIGABRT, stderr_tail=MISMATCH)).means
    assert "16 bytes came where 8" in lookup.explain_worker(raised("", tail=MISMATCH, error="SystemExit")).means


@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGTERM])
def test_stderr_of_a_rank_that_was_killed_from_outside_is_ignored(status: int) -> None:
    assert lookup.explain_worker(died(status, stderr_tail=MISMATCH)).means == ""


def test_stderr_of_a_lost_rank_is_ignored() -> None:
    assert lookup.explain_worker(died(None, stderr_tail=MISMATCH, lost_reason="its host is off")).means == ""


def test_a_thread_that_died_before_its_rank_is_evidence() -> None:
    thread = ThreadFailed(0, 0.0, "Loader", "OSError", "Traceback:\nOSError: [Errno 24] Too many open files\n")
    assert "open files" in lookup.explain_worker(died(-signal.SIGSEGV, thread_failures=(thread,))).means


def test_of_a_consequence_only_texts_that_name_a_cause_are_believed() -> None:
    assert "127.0.1.1" in lookup.explain_worker(raised(LOOPBACK), roots_only=True).means
    assert lookup.explain_worker(raised(DELETED), roots_only=True).means == ""


def test_of_a_long_text_both_ends_are_looked_at_and_not_the_middle() -> None:
    filler = "x" * 50_000
    assert lookup.find_explanation(f"{DELETED}{filler}").means
    assert lookup.find_explanation(f"{filler}{DELETED}").means
    assert lookup.find_explanation(f"{filler}{DELETED}{filler}").means == ""


@pytest.mark.parametrize("text", [text for _, _, text in EXAMPLES])
def test_a_hostile_text_takes_no_longer_than_its_length_allows(text: str) -> None:
    hostile = "".join(text[: len(text) * part // 4] for part in (3, 2, 1)) or "x"
    before = time.process_time()
    lookup.find_explanation(hostile * (100_000 // len(hostile)))
    assert time.process_time() - before < 1.0
