"""Sets a variable that JAX has already read, and prints how nvidia-smi lists the processes of the job."""

import os
import subprocess

os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = ".5"

import jax
from jax.experimental.multihost_utils import sync_global_devices

sync_global_devices("all have their GPU")
if jax.process_index() == 0:
    query = ("nvidia-smi", "--query-compute-apps=process_name", "--format=csv,noheader")
    print("listed:", "; ".join(subprocess.run(query, capture_output=True, text=True).stdout.splitlines()), flush=True)
sync_global_devices("rank 0 has looked")
