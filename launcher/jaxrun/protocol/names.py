"""Names of variables, files and a plugin. They are not in env.py because a start's first lines need no dataclass."""

VERSION = "0.1.0"  # of jaxrun, the same on all hosts of a job
RUNTIME = "jaxrun_runtime"  # the package that runs in every worker; the launcher only names it
RESERVED_PREFIX = "JAXRUN_"
JOB_ID = f"{RESERVED_PREFIX}JOB_ID"
TOKEN = f"{RESERVED_PREFIX}TOKEN"
RANK = f"{RESERVED_PREFIX}RANK"
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
SUBCOMMANDS = ("attach", "clean", "debug", "doctor", "explain", "list", "profile", "stacks", "top")
