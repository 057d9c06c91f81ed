"""Takes most of the memory of its GPU, as JAX does at its start, and is killed."""

import os
import signal
import subprocess

import jax
from jax.experimental.multihost_utils import sync_global_devices

jax.numpy.ones(1).block_until_ready()
sync_global_devices("all have their GPU")
query = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
used = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
print("holds", max(map(int, used)), "MiB", flush=True)
if jax.process_index() == 0:
    os.kill(os.getpid(), signal.SIGKILL)
sync_global_devices("never reached")
