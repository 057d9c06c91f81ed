"""Known errors of GPUs, memory, networks and installed packages."""

from __future__ import annotations

from jaxrun.analysis.verdict.known_errors.known_error import KnownError

_ISSUES = "https://github.com/jax-ml/jax/issues"
_MEMORY = "https://docs.jax.dev/en/latest/gpu_memory_allocation.html"

_GPUS = (
    KnownError(
        "gpu-twice",
        r"Duplicate GPU detected ?: rank (?P<one>\d+) and rank (?P<two>\d+) both on CUDA device (?P<gpu>\w+)",
        "ranks {one} and {two} use the same GPU ({gpu}), and NCCL does not connect two ranks on one.",
        "no more processes on a host than it has GPUs: jaxrun -n N, --processes-per-host N.",
        "https://github.com/NVIDIA/nccl/issues/1241",
    ),
    KnownError(
        "shared-memory",
        r"Error while creating shared memory segment (?P<file>/dev/shm/\S{1,80})",
        "NCCL finds no room in /dev/shm; a container has 64 MB there unless told otherwise.",
        "docker run --shm-size=1g (or --ipc=host); `df -h /dev/shm` shows what there is.",
        f"{_ISSUES}/26465",
    ),
    KnownError(
        "nccl",
        r"NCCL operation (?P<what>\w{1,60})\(.{0,300}?\) failed: (?P<why>[^(\n]{1,60}\w)",
        "NCCL could not do {what}: {why}; the cause stands in its own log.",
        "jaxrun --env NCCL_DEBUG=INFO ...; --env NCCL_SOCKET_IFNAME=NAME chooses the network between hosts.",
    ),
    KnownError(
        "gpu-number",
        r"CUDA_ERROR_INVALID_DEVICE: invalid device ordinal",
        "the process asks for a GPU by a number that it does not have; they count from 0 among those it may see.",
        "no local_device_ids in the program, and no --gpus-per-task; `nvidia-smi -L` and CUDA_VISIBLE_DEVICES.",
        f"{_ISSUES}/23452",
    ),
    KnownError(
        "gpu-memory",
        r"RESOURCE_EXHAUSTED: (?:Out of memory while trying to allocate|Failed to allocate request for)",
        "the memory of the GPU is full, or another process has taken it: JAX reserves 75 % of it at its start.",
        "a smaller batch or more devices; where processes share a GPU: --env XLA_PYTHON_CLIENT_MEM_FRACTION=.4",
        _MEMORY,
    ),
)

_MEMORY_AND_LIMITS = (
    KnownError(
        "host-memory",
        r"RESOURCE_EXHAUSTED: Out of memory allocating (?P<size>\d+) bytes",
        "this host has no {size} bytes of memory left for one more array.",
        "shard it over more processes or hosts; a smaller batch; fewer processes per host (--processes-per-host).",
    ),
    KnownError(
        "numpy-memory",
        r"Unable to allocate (?P<size>[\d.]{1,20} \w{1,5}) for an array",
        "this host has no {size} of memory left for one NumPy array.",
        "load only this rank's part of the data, or fewer processes per host (--processes-per-host).",
    ),
    KnownError(
        "processes",
        r"pthread_create failed: Resource temporarily unavailable|can't start new thread|"
        r"(?:could not be started|can be forked): Resource temporarily unavailable",
        "no further thread or process can be started: a limit on processes, or on memory, is reached.",
        "`ulimit -u` and `ulimit -v`, and the container's limit of pids; fewer processes (-n); OMP_NUM_THREADS=1.",
    ),
)

_NETWORK = (
    KnownError(
        "loopback",
        r"Gloo context initialization failed.{0,300}?remote=\[127\.0\.1\.1\]",
        "a host's name leads to 127.0.1.1 in its own /etc/hosts, where no other host can reach it.",
        "give the name the host's real address there; or jaxrun --interface NAME chooses the network.",
        "https://github.com/pytorch/gloo/issues/223",
        is_root=True,
    ),
    KnownError(
        "own-name",
        r"gloo/transport/tcp/device\.cc:\d+\] rv == 0",
        "this host's own name, as `hostname` prints it, has no address.",
        "add the name with the host's address to /etc/hosts.",
        f"{_ISSUES}/28160",
    ),
    KnownError(
        "join-deadline",
        r"(?s)DEADLINE_EXCEEDED.{0,300}?RegisterTask",
        "not all ranks reached rank 0's coordinator in time, so that JAX gave the job up.",
        "--interface NAME for another network; are ports between the hosts closed? --init-timeout 600 waits longer.",
        is_root=True,
    ),
    KnownError(
        "port-in-use",
        r"Address already in use|Failed to add port to server",
        "the program listens on a port that another process has, perhaps another rank on the same host.",
        "`ss -ltnp` names its owner; take port 0, or add jax.process_index() to the number.",
    ),
    KnownError(
        "proxy",
        r"Tunnel connection failed: (?P<code>\d+)|HTTP proxy returned response code",
        "the connection was led to the proxy of the environment, which refused it.",
        "jaxrun --env no_proxy=HOST for hosts that are reached directly; `env | grep -i proxy` shows the proxy.",
    ),
)

_STARTED_OTHERWISE = (
    KnownError(
        "torchrun-variables",
        (
            r"(?:KeyError: '|environment variable )"
            r"(?P<name>MASTER_(?:ADDR|PORT)|(?:LOCAL_)?WORLD_SIZE|(?:LOCAL_)?RANK)(?:'| expected)"
        ),
        "the program reads {name}, which torchrun sets, and jaxrun only if it is asked to.",
        "jaxrun --torch-env sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
    ),
    KnownError(
        "engine-variables",
        r"KeyError: '(?P<name>(?:SLURM|OMPI|PMIX?)_\w{1,60})'",
        "the program reads {name}, which only srun or mpirun sets.",
        "jax.process_index() and jax.process_count() in its place; RANK and WORLD_SIZE, which --torch-env sets.",
    ),
)

_INSTALLED = (
    KnownError(
        "mpitrampoline",
        r"MPITRAMPOLINE_LIB is not set",
        "JAX was told to send its CPU collectives by MPI, which it loads by MPItrampoline.",
        "leave JAX_CPU_COLLECTIVES_IMPLEMENTATION out (Gloo needs nothing), or set MPITRAMPOLINE_LIB.",
        "https://github.com/eschnett/MPItrampoline",
    ),
    KnownError(
        "no-mpi-library",
        r"cannot load MPI library",
        "mpi4py finds no MPI library to load.",
        "load the MPI's module, or --env MPI4PY_LIBMPI=/path/to/libmpi.so.",
    ),
    KnownError(
        "mpi-under-srun",
        r'direct launched using "srun"',
        "the program uses an Open MPI that cannot be started by srun: it was built without Slurm's PMI.",
        "jaxrun --backend mpirun inside of the allocation; or jaxrun --slurm-args=--mpi=pmix, if srun has it.",
    ),
)

HOST_ERRORS = (*_GPUS, *_MEMORY_AND_LIMITS, *_NETWORK, *_STARTED_OTHERWISE, *_INSTALLED)
