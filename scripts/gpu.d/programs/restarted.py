"""Is killed in its first attempt, while it holds the GPU's memory; prints when the second attempt computes."""

import os
import signal
import time

import jax
from jax.experimental.multihost_utils import sync_global_devices

import jaxrun_runtime as jr

held = jax.numpy.ones((2**28,)) + 1  # 1 GiB; on a GPU, XLA also holds three quarters of all memory
held.block_until_ready()
if os.environ["JAXRUN_ATTEMPT"] == "1":
    sync_global_devices("all hold it")
    if jr.rank == 0:
        with open("failed-at", "w") as file:
            file.write(f"{time.time()}")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
with open("failed-at") as file:
    print(f"computes {time.time() - float(file.read()):.2f} s after the failure", flush=True)
