"""Names of variables, files and a plugin. Apart from env.py, as the first lines of a start need no dataclass."""

VERSION = "0.1.0"  # of jaxrun, alike on all hosts of a job
RUNTIME = "jaxrun_runtime"  # the package that runs in every worker; the launcher only names it
RESERVED_PREFIX = "JAXRUN_"
JOB_ID = f"{RESERVED_PREFIX}JOB_ID"
TOKEN = f"{RESERVED_PREFIX}TOKEN"
RANK = f"{RESERVED_PREFIX}RANK"
COORDINATOR_ADDRESS = "JAX_COORDINATOR_ADDRESS"
NUM_PROCESSES = "JAX_NUM_PROCESSES"
PROCESS_ID = "JAX_PROCESS_ID"
CHILD_OF = f"{RESERVED_PREFIX}CHILD_OF"  # in what a rank starts: which rank, as JSON
# What each child of a rank says that calls it, and the screen shows once a rank; its number follows.
INITIALIZE_IN_CHILD = "jaxrun: jax.distributed.initialize() does nothing in a child of rank"
POD_MARKER = "KUBERNETES_SERVICE_HOST"  # Kubernetes sets it in every pod
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", MASTER_ADDR, MASTER_PORT)
GANG_ADDRESS = f"{RESERVED_PREFIX}GANG"
GANG_TOKEN = f"{RESERVED_PREFIX}GANG_TOKEN"
CONTROL_FD = f"{RESERVED_PREFIX}CONTROL_FD"
GANG_DIRECTORY_PREFIX = "jaxrun-gang-"  # and the parent's process id: how the temporary directories of gangs begin
SHUTDOWN_BYTE = b"."  # what a Python process sends the fork server of its gangs in the end; else it has died
RANK_PLUGIN = "jaxrun-rank"  # the pytest plugin that runs the session of a rank
# The commands of `jaxrun` besides that which runs a program; none of them forks workers.
SUBCOMMANDS = ("attach", "clean", "doctor", "explain", "list", "profile", "stacks", "top")
