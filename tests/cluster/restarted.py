"""A program whose ranks stay in step, and to which something happens in its first attempt (argv[1]).

kill    rank 1 is killed        agent   the agent of rank 1 is killed        wait    all go on, until told otherwise
"""

import os
import signal
import sys
import time

from jax.experimental import multihost_utils

import jaxrun_runtime as jr

attempt = int(os.environ["JAXRUN_ATTEMPT"])
print(f"attempt {attempt} of rank {jr.rank} of {jr.size} on {os.uname().nodename}", flush=True)
for step in range(10_000 if sys.argv[1] == "wait" and attempt == 1 else 5):
    multihost_utils.sync_global_devices(f"{step}")
    if step == 3:
        print("step 3", flush=True)
    if step == 3 and attempt == 1 and jr.rank == 1 and sys.argv[1] in ("kill", "agent"):
        os.kill(os.getpid() if sys.argv[1] == "kill" else os.getppid(), signal.SIGKILL)
    time.sleep(0.05)
print("finished", flush=True)
