"""Known errors of mpirun, srun and ssh that cannot start agents on hosts."""

from __future__ import annotations

from jaxrun.analysis.verdict.known_errors.known_error import KnownError

_SSH_TRY = "from the host where jaxrun runs, `ssh HOST true` must work for each host without any question."
_PYTHON_TRY = "start jaxrun with a Python that all hosts have at the same path: on a shared disk, or installed alike."

LAUNCH_ERRORS = (
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
        "nobody knows the host {host}: it is mistyped, or not in DNS or /etc/hosts.",
        "`getent hosts {host}`; then correct -H or the hostfile.",
    ),
    KnownError(
        "ssh-key",
        r"Permission denied \((?:publickey|password|keyboard)",
        "a host does not let ssh in without a password.",
        f"ssh-copy-id HOST; {_SSH_TRY}",
    ),
    KnownError(
        "ssh-host-key",
        r"Host key verification failed",
        "ssh does not know a host's key yet, or the key has changed.",
        f"ssh HOST once by hand, to accept it; {_SSH_TRY}",
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
    KnownError(
        "partition",
        r"invalid partition specified: (?P<name>\S{1,100})|Invalid partition name specified",
        "Slurm has no partition of that name.",
        "`sinfo -s` lists them; jaxrun --partition NAME.",
    ),
    KnownError(
        "account",
        r"Invalid account or account/partition combination",
        "Slurm does not let this user charge that account, or not in that partition.",
        "`sacctmgr show assoc user=$USER format=account,partition` lists them; jaxrun --account NAME.",
    ),
    KnownError(
        "gres",
        r"Invalid generic resource \(gres\) specification",
        "no partition of this Slurm has the GPUs that were asked for.",
        "`sinfo -o '%P %G'` shows which have how many; jaxrun --gpus-per-host N.",
    ),
    KnownError(
        "nodes",
        r"Requested node configuration is not available|Invalid node name specified",
        "no node of this Slurm is what was asked for, by name or by cores and memory.",
        "`sinfo -N -l` lists the nodes; fewer --cpus-per-process, or other --slurm-args.",
    ),
    KnownError(
        "allocation-over",
        r"Unable to confirm allocation for job (?P<job>\d+)",
        "the Slurm job {job}, which this shell belongs to, is over.",
        "leave the shell and get a new allocation: salloc -N2, or jaxrun --submit.",
    ),
)
