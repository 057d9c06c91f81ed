"""jax_sum.py for PyTorch, by torchrun: torch_sum.py STEPS FAULT RANK, with an all_reduce over Gloo in each step."""

import sys

import torch
import torch.distributed as dist
from fault import commit

steps, fault, culprit = (int(sys.argv[1]), sys.argv[2], int(sys.argv[3])) if sys.argv[1:] else (1, "", -1)
dist.init_process_group("gloo")
for step in range(steps):
    total = torch.ones(1) * (dist.get_rank() + 1)
    if step == steps // 2 and dist.get_rank() == culprit:
        commit(fault)
        if fault == "mismatch":
            dist.all_reduce(total, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
dist.destroy_process_group()
