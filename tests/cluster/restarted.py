"""A program whose ranks stay in step, and to which something happens in its first attempt (argv[1]).

kill    rank 1 is killed        agent   the agent of rank 1 is killed        wait    all go on, until told otherwise
sum     as wait, and a sum over ranks and steps is saved in each step and gone on with
"""

import os
import signal
import sys
import time
from pathlib import Path

from jax.experimental import multihost_utils

import jaxrun_runtime as jr

attempt = int(os.environ["JAXRUN_ATTEMPT"])
print(f"attempt {attempt} of rank {jr.rank} of {jr.size} on {os.uname().nodename}", flush=True)
if sys.argv[1] == "sum":
    saved = Path("state")
    step, total = map(int, saved.read_text().split()) if saved.exists() else (0, 0)
    end = step + 5 if attempt > 1 else 10_000
    while step < end:
        total += step * int(multihost_utils.process_allgather(jr.rank + 1).sum())
        step += 1
        if jr.rank == 0:
            saved.with_suffix(".new").write_text(f"{step} {total}")
            saved.with_suffix(".new").rename(saved)
            jr.saved(step)
        if step == 4:
            print("step 3", flush=True)
        time.sleep(0.05)
    print(f"sum {total} of {step} steps", flush=True)
    sys.exit()
for step in range(10_000 if sys.argv[1] == "wait" and attempt == 1 else 5):
    multihost_utils.sync_global_devices(f"{step}")
    if step == 3:
        print("step 3", flush=True)
    if step == 3 and attempt == 1 and jr.rank == 1 and sys.argv[1] in ("kill", "agent"):
        os.kill(os.getpid() if sys.argv[1] == "kill" else os.getppid(), signal.SIGKILL)
    time.sleep(0.05)
print("finished", flush=True)
