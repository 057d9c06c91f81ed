"""The program of restarted.py for torchrun: `restarted_torch.py SECONDS`, with an all_reduce over gloo in each step."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

fault, resumed = Path("fault"), Path("resumed")
again = fault.exists()
dist.init_process_group("gloo")
rank = dist.get_rank()
ends = time.monotonic() + float(sys.argv[1])
while True:
    dist.all_reduce((torch.ones(8) * 2).sum())
    if again:
        if rank == 0:
            resumed.write_text(f"{time.time()}")
        break
    time.sleep(0.02)
    if rank == 2 and time.monotonic() > ends:
        fault.with_suffix(".new").write_text(f"{time.time()}")
        fault.with_suffix(".new").rename(fault)
        os.kill(os.getpid(), signal.SIGKILL)
