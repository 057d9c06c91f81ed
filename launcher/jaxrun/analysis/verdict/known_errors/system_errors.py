"""Known errors of the launch commands (mpirun, srun, ssh), which cannot start agents, and of GPUs, limits, networks."""

from __future__ import annotations

from jaxrun.analysis.verdict.known_errors import KnownError

_ISSUES = "https://github.com/jax-ml/jax/issues"
_MEMORY = "https://docs.jax.dev/en/latest/gpu_memory_allocation.html"
_SSH_TRY = "from the host where jaxrun runs, `ssh HOST true` must work for each host without any question."
_PYTHON_TRY = "start jaxrun with a Python that all hosts have at the same path: on a shared disk, or installed alike."

_LAUNCH_COMMANDS = (
    KnownError(
        "no-jaxrun",
        r"No module named '?jaxrun(?:_runtime)?\b",
        "a host's Python does not have jaxrun.",
        _PYTHON_TRY,
    ),
    KnownError(
        "no-python",
        r"(?:execvp error on file |execve\(\): )(?P<file>[^\s:]{1,200})",
        "{file} is not there on every host of the job, or may not be run.",
        _PYTHON_TRY,
    ),
    KnownError(
        "no-executable",
        (
            r"(?s)(?:could not\s{1,80}access\s{1,80}an executable|specified executable file)"
            r".{0,900}?Executable: (?P<file>\S{1,200})"
        ),
        "{file} is not there on every host of the job, or may not be run.",
        _PYTHON_TRY,
    ),
    KnownError(
        "slots",
        r"not enough slots available|number of available slots when deciding",
        "mpirun was asked for more processes than the hosts have slots.",
        "fewer (-n), more slots (-H h1:8,h2:8), or --mpi-args '--map-by :OVERSUBSCRIBE'.",
        "https://docs.open-mpi.org/en/v5.0.8/launching-apps/scheduling.html",
    ),
    KnownError(
        "unknown-host",
        r"Could not resolve hostname (?P<host>[^\s:]{1,100})",
        "the host {host} is unknown: it is mistyped, or not in DNS or /etc/hosts.",
        "`getent hosts {host}`; then correct -H or the hostfile.",
    ),
    KnownError(
        "ssh-key",
        r"Permission denied \((?:publickey|password|keyboard)",
        "a host does not let ssh in without a password.",
        f"ssh-copy-id HOST; {_SSH_TRY}",
    ),
    KnownError(
        "not-on-path",
        r"(?:bash|sh): (?:line )?(?:\d+: )?(?P<what>\S{1,200}): (?:command )?not found",
        "{what} is not in the PATH that a command gets over ssh on that host.",
        "--mpirun /full/path/to/mpirun, which the other hosts then use too; or set PATH where the shell starts.",
    ),
    KnownError(
        "mpi-leftovers",
        r"PMIx server's listener thread failed to start|Daemon exit status: 213",
        "Open MPI cannot use its session directory: a killed job has left one of the same name, or the disk is "
        "full or read-only.",
        "`rm -r /tmp/prted.* /tmp/ompi.*` on each host, while no Open MPI job of yours runs there; or another TMPDIR.",
    ),
    KnownError(
        "mpi-daemon",
        r"daemon failed to report back|(?:inability to create a connection back|TCP connection\s{1,80}back)",
        "mpirun could not start its helper on another host, or the helper could not call back.",
        f"{_SSH_TRY} The same MPI there? Another network: --interface NAME.",
    ),
)

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
        "NCCL could not do {what}: {why}; its own log has the cause.",
        "jaxrun --env NCCL_DEBUG=INFO ...; --env NCCL_SOCKET_IFNAME=NAME chooses the network between hosts.",
    ),
    KnownError(
        "gpu-memory",
        r"RESOURCE_EXHAUSTED: (?:Out of memory while trying to allocate|Failed to allocate request for)",
        "the memory of the GPU is full, or another process has taken it: JAX reserves 75 % of it at its start.",
        "a smaller batch or more devices; where processes share a GPU: --env XLA_PYTHON_CLIENT_MEM_FRACTION=.4",
        _MEMORY,
    ),
)

_LIMITS = (
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
    KnownError(
        "mpi-under-srun",
        r'direct launched using "srun"',
        "the program uses an Open MPI that cannot be started by srun: it was built without Slurm's PMI.",
        "jaxrun --backend mpirun inside of the allocation; or jaxrun --slurm-args=--mpi=pmix, if srun has it.",
    ),
)

SYSTEM_ERRORS = (*_LAUNCH_COMMANDS, *_GPUS, *_LIMITS, *_NETWORK, *_STARTED_OTHERWISE)
