"""The table of known error texts of JAX, hosts and launchers, with cause and advice; the first match decides."""

from __future__ import annotations

import re

from msgspec import Struct


class KnownError(Struct, frozen=True):
    """A known text, its cause, and what to do.

    pattern:        a regular expression; every repetition has a bound and none is nested, so that a search is linear
    means, advice:  one sentence each, the cause and what to type; may contain groups of the pattern: "{size}"
    link:           documentation or an issue; may be empty
    is_root:        whether the text names a cause although it comes with a broken connection
    is_network:     whether it does so only in a job of several hosts

    There is no entry for texts that explain themselves, for jaxrun's own texts, or for errors that any user of one
    process meets: JAX's own text is enough there, unless one host of a job may be at fault, as for a lack of memory,
    which all ranks of a host share.
    """

    pattern: str
    means: str
    advice: str
    link: str = ""
    is_root: bool = False
    is_network: bool = False

    def search(self, text: str) -> re.Match[str] | None:
        return re.search(self.pattern, text)


_DOCS = "https://docs.jax.dev/en/latest"
_ISSUES = "https://github.com/jax-ml/jax/issues"
_IN_STEP = "every rank must make the same calls in the same order: what here depends on the rank or its data?"
_OPTION_VALUE = "JAX reads {name} when it is imported, and {value!r} is not a valid value."
_SSH_TRY = "from the host where jaxrun runs, `ssh HOST true` must work for each host without asking anything."
_PYTHON_TRY = "start jaxrun with a Python that all hosts have at the same path: on a shared disk, or installed alike."

KNOWN_ERRORS = {
    # ---- a program's arrays, meshes, shardings and collective calls
    "several-slices": KnownError(
        r"does not support multi-slice topologies",
        "jax.make_mesh considers the hosts to be separate slices, and refuses a mesh over several of them.",
        "leave out --make-mesh jax; or jax.sharding.Mesh(numpy.array(jax.devices()).reshape(shape), names).",
        f"{_ISSUES}/37769",
    ),
    "devices-set-late": KnownError(
        r"jax_num_cpu_devices config should be updated before backends are initialized",
        "JAX has initialized its devices before the program's first line, so their number cannot be changed in it.",
        "remove that line from the program, and type jaxrun -d N.",
    ),
    "option-value": KnownError(
        r"invalid (?:truth )?value '(?P<value>[^'\n]{0,80})' for environment '(?P<name>JAX_\w{1,60})'",
        _OPTION_VALUE,
        "`unset {name}`, or set it to 1 or 0.",
    ),
    "flag-value": KnownError(
        r"Invalid value \"(?P<value>[^\"\n]{0,80})\" for JAX flag (?P<name>\w{1,60})",
        _OPTION_VALUE,
        "unset the variable of that name in capitals, or set it to a value that JAX knows.",
    ),
    "devices-set-by-chex": KnownError(
        r"Attempted to set (?P<count>\d+) devices, but \d+ CPUs already available",
        "JAX has initialized its devices before the program's first line, so their number cannot be changed in it.",
        "take chex.set_n_cpu_devices out of the program, and type jaxrun -d {count}.",
    ),
    "joined-late": KnownError(
        r"jax\.distributed\.initialize\(\) must be called before any JAX",
        "a process can join a job only before it uses JAX; jaxrun has done it before the program's first line.",
        "remove the program's own calls of jax.distributed.shutdown() and initialize().",
    ),
    "joined-twice": KnownError(
        r"\b(?P<rank>\d+) unexpectedly tried to connect with a different incarnation",
        "another process joined the job as rank {rank}: a child of that rank that calls jax.distributed.initialize().",
        "give the child the rank's PYTHONPATH, so that this call does nothing there; or remove JAX_COORDINATOR_ADDRESS "
        "and the variables of mpirun or srun (OMPI_..., SLURM_...) from its environment.",
        is_root=True,
    ),
    "no-stdin": KnownError(
        r"EOF when reading a line|\(25, 'Inappropriate ioctl for device'\)[\s\S]{0,200}EOFError",
        "only one rank has jaxrun's standard input: rank 0, or the RANK of --stdin; the others have an empty one.",
        "read it on that rank, and broadcast it: jax.experimental.multihost_utils.broadcast_one_to_all; "
        "for a password, use a variable of --env-file.",
    ),
    "not-addressable": KnownError(
        r"spans non-addressable \(non process local\) devices",
        "a part of the array is in other processes, and this process cannot read it.",
        "multihost_utils.process_allgather(x, tiled=True) on every rank, or x.addressable_shards for this rank's part.",
        f"{_DOCS}/_autosummary/jax.experimental.multihost_utils.process_allgather.html",
    ),
    "local-data-size": KnownError(
        (
            r"In dimension (?P<axis>\d+), the process data has (?P<size>\d+) elements\. "
            r"Process addresses (?P<own>\d+) elements"
        ),
        "this process passed {size} entries of axis {axis}, but its devices hold {own}.",
        "pass each process's own {own} entries (jaxrun_runtime.shard selects them), or all of them.",
        f"{_DOCS}/multi_process.html",
    ),
    "differs-between-ranks": KnownError(
        r"is not the same on each process",
        "jax.device_put to devices of several processes needs equal arrays in all, and these differ (NaNs always do).",
        "jax.make_array_from_process_local_data for data that differ; otherwise one random seed, no float64, no int64.",
        f"{_DOCS}/multi_process.html",
    ),
    "cross-host-transfer": KnownError(
        r"does not support cross-host device transfers|Cross-host transfers are not supported by this backend",
        "jax.device_put would have to send the array to another process, which this platform cannot do.",
        "jax.make_array_from_callback makes it where it is needed; jit(f, out_shardings=...) moves it between ranks.",
        f"{_DOCS}/multi_process.html",
    ),
    "sync-names": KnownError(
        r"sync_global_devices name mismatch \('(?P<name>[^'\n]{1,100})'\)",
        "the ranks are at different points of the program: this one is at '{name}'.",
        _IN_STEP,
    ),
    "numpy-into-jit": KnownError(
        r"Passing non-trivial shardings for numpy inputs is not allowed",
        "a NumPy array belongs to this process alone, and cannot be a part of a global array.",
        "call jax.make_array_from_process_local_data(sharding, x) first.",
        f"{_DOCS}/multi_process.html",
    ),
    "collective-mismatch": KnownError(
        r"(?P<got>\d+) vs (?P<wants>\d+)\. Received data size doesn't match expected size",
        "the ranks are in different steps, or their shapes differ: {got} bytes came where {wants} were expected.",
        f"print the shapes on every rank: is the last batch uneven? {_IN_STEP}",
    ),
    # ---- launch commands
    "no-jaxrun": KnownError(
        r"No module named '?jaxrun(?:_runtime)?\b",
        "a host's Python does not have jaxrun.",
        _PYTHON_TRY,
    ),
    "no-python": KnownError(
        (
            r"(?s)(?:execvp error on file |execve\(\): |(?:could not\s{1,80}access\s{1,80}an executable"
            r"|specified executable file).{0,900}?Executable: )(?P<file>[^\s:]{1,200})"
        ),
        "{file} does not exist on every host of the job, or is not executable.",
        _PYTHON_TRY,
    ),
    "slots": KnownError(
        r"not enough slots available|number of available slots when deciding",
        "mpirun was asked for more processes than the hosts have slots.",
        "fewer processes (-n), more slots (-H h1:8,h2:8), or --mpi-args '--map-by :OVERSUBSCRIBE'.",
        "https://docs.open-mpi.org/en/v5.0.8/launching-apps/scheduling.html",
    ),
    "unknown-host": KnownError(
        r"Could not resolve hostname (?P<host>[^\s:]{1,100})",
        "the host {host} is unknown: it is mistyped, or not in DNS or /etc/hosts.",
        "`getent hosts {host}`; then correct -H or the hostfile.",
    ),
    "ssh-key": KnownError(
        r"Permission denied \((?:publickey|password|keyboard)",
        "a host does not let ssh in without a password.",
        f"ssh-copy-id HOST; {_SSH_TRY}",
    ),
    "not-on-path": KnownError(
        r"(?:bash|sh): (?:line )?(?:\d+: )?(?P<what>\S{1,200}): (?:command )?not found",
        "{what} is not in the PATH of commands that ssh runs on that host.",
        "--mpirun /full/path/to/mpirun, which the other hosts then use, too; or set PATH in the shell's start-up file.",
    ),
    "mpi-leftovers": KnownError(
        r"PMIx server's listener thread failed to start|Daemon exit status: 213",
        "Open MPI cannot use its session directory: a killed job has left one of the same name, or the disk is "
        "full or read-only.",
        "`rm -r /tmp/prted.* /tmp/ompi.*` on each host, while no Open MPI job of yours runs there; or another TMPDIR.",
    ),
    "mpi-daemon": KnownError(
        r"daemon failed to report back|(?:inability to create a connection back|TCP connection\s{1,80}back)",
        "mpirun could not start its helper on another host, or the helper could not call back.",
        f"{_SSH_TRY} Is the same MPI installed there? For another network: --interface NAME.",
    ),
    # ---- GPUs
    "no-gpu-backend": KnownError(
        (
            r"Backend '(?:cuda|rocm|gpu)' is not in the list of known backends"
            r"|Unknown backend:? '?(?:cuda|rocm|gpu)'?(?: requested, but no platforms|\. Available backends)"
        ),
        "JAX has no backend for GPUs in this rank: its plugin is not installed on this host, or has found no GPU.",
        "`nvidia-smi -L` on that host, and CUDA_VISIBLE_DEVICES there; pip install 'jax[cuda13]' installs the plugin; "
        "--platform cpu hides GPUs.",
        "https://docs.jax.dev/en/latest/installation.html",
    ),
    "no-gpu": KnownError(
        (
            r"No visible GPU devices|no supported devices found for platform (?:CUDA|ROCM)"
            r"|CUDA_ERROR_NO_DEVICE|Backend '(?:cuda|rocm)' provides no devices"
            r"|Could not initialize backend '(?:cuda|rocm)'"
        ),
        "JAX's plugin finds no GPU that this rank may use, or another process uses all its memory.",
        "`nvidia-smi` on that host; is CUDA_VISIBLE_DEVICES empty there? With Slurm: --gpus-per-host N.",
        f"{_ISSUES}/28194",
    ),
    "gpu-twice": KnownError(
        r"Duplicate GPU detected ?: rank (?P<one>\d+) and rank (?P<two>\d+) both on CUDA device (?P<gpu>\w+)",
        "ranks {one} and {two} use the same GPU ({gpu}), and NCCL does not connect two ranks on one GPU.",
        "start no more processes on a host than it has GPUs: jaxrun -n N, --processes-per-host N.",
        "https://github.com/NVIDIA/nccl/issues/1241",
    ),
    "shared-memory": KnownError(
        r"Error while creating shared memory segment (?P<file>/dev/shm/\S{1,80})",
        "NCCL finds no room in /dev/shm; a container has 64 MB there by default.",
        "docker run --shm-size=1g (or --ipc=host); `df -h /dev/shm` shows the size.",
        f"{_ISSUES}/26465",
    ),
    "nccl": KnownError(
        r"NCCL operation (?P<what>\w{1,60})\(.{0,300}?\) failed: (?P<why>[^(\n]{1,60}\w)",
        "NCCL could not do {what}: {why}; its own log shows the cause.",
        "jaxrun --env NCCL_DEBUG=INFO ...; --env NCCL_SOCKET_IFNAME=NAME chooses the network between hosts.",
    ),
    "gpu-memory": KnownError(
        r"RESOURCE_EXHAUSTED: (?:Out of memory while trying to allocate|Failed to allocate request for)",
        "the memory of the GPU is full, or another process uses it: JAX reserves 75 % of it at its start.",
        "use a smaller batch or more devices; if processes share a GPU: --env XLA_PYTHON_CLIENT_MEM_FRACTION=.4",
        f"{_DOCS}/gpu_memory_allocation.html",
    ),
    # ---- the memory of hosts, and limits
    "host-memory": KnownError(
        (
            r"RESOURCE_EXHAUSTED: Out of memory allocating \d{1,20} bytes|std::bad_alloc|LLVM ERROR: out of memory"
            r"|(?m:^(?:[\w.]{1,80}\.)?_?(?:Array|Arrow)?MemoryError\b)|Unable to allocate [\d.]{1,20} [KMGTPE]iB"
            r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory|Cannot allocate memory"
        ),
        "there is no memory for what this rank asked for: a host's ranks share its memory, and a limit may be lower.",
        "`free -h`, `ulimit -v` and the limit of the container or of Slurm there; fewer ranks on each host. "
        "jnp.ones makes a whole array on each rank, jax.make_array_from_callback only the rank's part.",
        f"{_DOCS}/multi_process.html",
    ),
    "broken-pool": KnownError(
        r"process in the process pool was terminated abruptly",
        "a worker of a ProcessPoolExecutor was killed, perhaps by the kernel for lack of memory, or it crashed.",
        "`dmesg` names what the kernel has killed; fewer workers (max_workers), or run its task in the rank itself.",
    ),
    "processes": KnownError(
        r"pthread_create failed: Resource temporarily unavailable|can't start new thread|"
        r"(?:could not be started|can be forked): Resource temporarily unavailable",
        "no further thread or process can be started: a limit on processes or memory has been reached.",
        "check `ulimit -u`, `ulimit -v` and the container's pids limit; use fewer processes (-n); OMP_NUM_THREADS=1.",
    ),
    # ---- networks
    "loopback": KnownError(
        r"Gloo context initialization failed.{0,300}?remote=\[127\.0\.1\.1\]",
        "a host's own /etc/hosts maps its name to 127.0.1.1, which no other host can reach.",
        "map the name to the host's real address there, or choose the network with jaxrun --interface NAME.",
        "https://github.com/pytorch/gloo/issues/223",
        is_root=True,
        is_network=True,
    ),
    "own-name": KnownError(
        r"gloo/transport/tcp/device\.cc:\d+\] rv == 0",
        "this host's own name, as `hostname` prints it, has no address.",
        "add the name with the host's address to /etc/hosts.",
        f"{_ISSUES}/28160",
    ),
    "coordinator-lost": KnownError(
        r"Failed to send RPC to coordination service",
        "each rank keeps a connection to JAX's coordinator in rank 0, and JAX ends a process when it breaks, although "
        "all processes may be alive.",
        "--max-restarts 3 starts all ranks again, from the last checkpoint; does a firewall cut connections there?",
        is_root=True,
    ),
    "join-deadline": KnownError(
        r"(?s)DEADLINE_EXCEEDED.{0,300}?RegisterTask",
        "not all ranks reached rank 0's coordinator in time, so JAX gave up.",
        "are ports between hosts closed? --interface NAME selects another network; --init-timeout 600 waits longer.",
        is_root=True,
        is_network=True,
    ),
    "port-in-use": KnownError(
        r"Address already in use|Failed to add port to server",
        "the program listens on a port that another process uses, perhaps another rank on the same host.",
        "`ss -ltnp` names its owner; use port 0, or add jax.process_index() to the number.",
    ),
    "proxy": KnownError(
        r"Tunnel connection failed: (?P<code>\d+)|HTTP proxy returned response code",
        "the connection went to the proxy that the environment names, and the proxy refused it.",
        "jaxrun --env no_proxy=HOST for hosts that need no proxy; `env | grep -i proxy` shows the proxy.",
    ),
    # ---- programs that were written for another launcher
    "torchrun-variables": KnownError(
        (
            r"(?:KeyError: '|environment variable )"
            r"(?P<name>MASTER_(?:ADDR|PORT)|(?:LOCAL_)?WORLD_SIZE|(?:LOCAL_)?RANK)(?:'| expected)"
        ),
        "the program reads {name}, which torchrun sets; jaxrun sets it only with --torch-env.",
        "jaxrun --torch-env sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
    ),
    "engine-variables": KnownError(
        r"KeyError: '(?P<name>(?:SLURM|OMPI|PMIX?)_\w{1,60})'",
        "the program reads {name}, which only srun or mpirun sets.",
        "use jax.process_index() and jax.process_count(), or RANK and WORLD_SIZE, which --torch-env sets.",
    ),
    "mpi-under-srun": KnownError(
        r'direct launched using "srun"',
        "the program uses an Open MPI that srun cannot start, because it was built without Slurm's PMI.",
        "jaxrun --backend mpirun inside the allocation; or jaxrun --slurm-args=--mpi=pmix, if srun has it.",
    ),
}
