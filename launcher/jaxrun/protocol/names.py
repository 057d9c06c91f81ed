"""Names of variables, files and a plugin. They are not in env.py because a start's first lines need no dataclass."""

VERSION = "0.1.0"  # of jaxrun, the same on all hosts of a job
RUNTIME = "jaxrun_runtime"  # the package that runs in every worker; the launcher only names it
RESERVED_PREFIX = "JAXRUN_"
JOB_ID = f"{RESERVED_PREFIX}JOB_ID"
TOKEN = f"{RESERVED_PREFIX}TOKEN"
# Of a rank (env.py), and of the commands of --host-check.
RANK = f"{RESERVED_PREFIX}RANK"
SIZE = f"{RESERVED_PREFIX}SIZE"
HOST = f"{RESERVED_PREFIX}HOST"
ATTEMPT = f"{RESERVED_PREFIX}ATTEMPT"
RUN_DIR = f"{RESERVED_PREFIX}RUN_DIR"
# Of a command on each host (spec/engines/host_info.py), set by a person or a manifest: --hosts, --host-rank and --head.
HOSTS = f"{RESERVED_PREFIX}HOSTS"
HOST_RANK = f"{RESERVED_PREFIX}HOST_RANK"
HEAD = f"{RESERVED_PREFIX}HEAD"
# Of agents that mpirun or srun has started (env.py), or ssh (ssh_start.py).
HEAD_ADDRESSES = f"{RESERVED_PREFIX}HEAD_ADDRESSES"  # where the head listens
AGENT_RANKS = f"{RESERVED_PREFIX}AGENT_RANKS"  # an agent's ranks and the size of the job, "0-3 8"
HEAD_TUNNEL = f"{RESERVED_PREFIX}HEAD_TUNNEL"  # where ssh forwards to the head, "127.0.0.1:40123", on the agent's host
GANG_TUNNEL = f"{RESERVED_PREFIX}GANG_TUNNEL"  # the same for the process that owns a gang
# Where jaxrun is carried: an agent's lock on the copy in which it runs, and the environment that --stage brings.
CARRIED_LOCK = f"{RESERVED_PREFIX}CARRIED_LOCK"
CARRIED_ENVIRONMENT = f"{RESERVED_PREFIX}CARRIED_ENVIRONMENT"
LACKS_DIRECTORY = f"{RESERVED_PREFIX}LACKS_DIRECTORY"  # the launcher's directory, if the agent's host waits for a copy
STAGED = f"{RESERVED_PREFIX}STAGED"  # this host's copies (staging_messages.py)
EVENT = f"{RESERVED_PREFIX}EVENT"  # of the commands of --notify: what has happened
COORDINATOR_ADDRESS = "JAX_COORDINATOR_ADDRESS"
NUM_PROCESSES = "JAX_NUM_PROCESSES"
PROCESS_ID = "JAX_PROCESS_ID"
CHILD_OF = f"{RESERVED_PREFIX}CHILD_OF"  # in processes that a rank starts: that rank, as JSON
# A child of a rank prints this when it calls the function; the rank's number follows. The screen shows it once a rank.
INITIALIZE_IN_CHILD = "jaxrun: jax.distributed.initialize() does nothing in a child of rank"
POD_MARKER = "KUBERNETES_SERVICE_HOST"  # Kubernetes sets it in every pod
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", MASTER_ADDR, MASTER_PORT)
GANG_ADDRESS = f"{RESERVED_PREFIX}GANG"
GANG_TOKEN = f"{RESERVED_PREFIX}GANG_TOKEN"
CONTROL_FD = f"{RESERVED_PREFIX}CONTROL_FD"
GANG_DIRECTORY_PREFIX = "jaxrun-gang-"  # temporary directories of gangs begin with this and the parent's process id
# A Python process sends this to its gangs' fork server at the end; without it, the process has died.
SHUTDOWN_BYTE = b"."
RANK_PLUGIN = "jaxrun-rank"  # the pytest plugin that runs the session of a rank
# The commands of `jaxrun` other than running a program; none of them forks workers.
SUBCOMMANDS = (
    *("attach", "clean", "debug", "doctor", "explain", "kill", "list", "logs"),
    *("profile", "stacks", "status", "stop", "top"),
)
# Words that other tools have for them, as the first word: jaxrun's own words instead.
WORDS_OF_OTHERS = {
    **{"help": ("--help",), "version": ("--version",), "ls": ("list",), "ps": ("list",)},
    **{"run": (), "launch": (), "exec": ()},
}
