"""Known errors of a program's arrays, meshes, shardings and collective calls."""

from __future__ import annotations

from jaxrun.analysis.verdict.known_errors import KnownError

_DOCS = "https://docs.jax.dev/en/latest"
_ISSUES = "https://github.com/jax-ml/jax/issues"
_IN_STEP = "every rank must make the same calls in the same order: what here depends on the rank, or on its data?"

PROGRAM_ERRORS = (
    KnownError(
        "several-slices",
        r"does not support multi-slice topologies",
        "jax.make_mesh takes the hosts for separate slices, and refuses a mesh over several of them.",
        "no --make-mesh jax; or jax.sharding.Mesh(numpy.array(jax.devices()).reshape(shape), names).",
        f"{_ISSUES}/37769",
    ),
    KnownError(
        "devices-set-late",
        r"jax_num_cpu_devices config should be updated before backends are initialized",
        "JAX has its devices before the program's first line, so their number cannot be changed in it.",
        "take that line out of the program, and type jaxrun -d N.",
    ),
    KnownError(
        "joined-late",
        r"jax\.distributed\.initialize\(\) must be called before any JAX",
        "a process can join a job only before it uses JAX; jaxrun has done it before the program's first line.",
        "take the program's own calls of jax.distributed.shutdown() and initialize() out.",
    ),
    KnownError(
        "no-stdin",
        r"EOF when reading a line",
        "one rank has jaxrun's standard input, rank 0 or that of --stdin RANK; the others find nothing to read.",
        "read it on that rank, and send it on: jax.experimental.multihost_utils.broadcast_one_to_all.",
    ),
    KnownError(
        "not-addressable",
        r"spans non-addressable \(non process local\) devices",
        "a part of that array lies in other processes, and this one cannot read it.",
        "multihost_utils.process_allgather(x, tiled=True) on every rank, or x.addressable_shards for the own part.",
        f"{_DOCS}/_autosummary/jax.experimental.multihost_utils.process_allgather.html",
    ),
    KnownError(
        "local-data-size",
        (
            r"In dimension (?P<axis>\d+), the process data has (?P<size>\d+) elements\. "
            r"Process addresses (?P<own>\d+) elements"
        ),
        "this process gave {size} entries of axis {axis}, but its devices hold {own}.",
        "give each process its own {own} entries (jaxrun_runtime.shard cuts them out), or all of them.",
        f"{_DOCS}/multi_process.html",
    ),
    KnownError(
        "differs-between-ranks",
        r"is not the same on each process",
        "jax.device_put to devices of several processes wants equal arrays in all, and these differ (NaNs always do).",
        "jax.make_array_from_process_local_data for data that differ; else one random seed, and no float64 or int64.",
        f"{_DOCS}/multi_process.html",
    ),
    KnownError(
        "cross-host-transfer",
        r"does not support cross-host device transfers|Cross-host transfers are not supported by this backend",
        "jax.device_put would have to send the array to another process, which this platform cannot do.",
        "jax.make_array_from_callback makes it where it is wanted; jit(f, out_shardings=...) moves it between ranks.",
        f"{_DOCS}/multi_process.html",
    ),
    KnownError(
        "sync-names",
        r"sync_global_devices name mismatch \('(?P<name>[^'\n]{1,100})'\)",
        "the ranks have come to different points of the program: this one is at '{name}'.",
        _IN_STEP,
    ),
    KnownError(
        "numpy-into-jit",
        r"Passing non-trivial shardings for numpy inputs is not allowed",
        "a NumPy array is this process's alone, and cannot stand for a part of a global one.",
        "jax.make_array_from_process_local_data(sharding, x) before the call.",
        f"{_DOCS}/multi_process.html",
    ),
    KnownError(
        "collective-mismatch",
        r"(?P<got>\d+) vs (?P<wants>\d+)\. Received data size doesn't match expected size",
        "the ranks are in different steps, or their shapes differ: {got} bytes came where {wants} were expected.",
        f"print shapes on every rank, as in an uneven last batch; {_IN_STEP}",
    ),
)
