"""jax_sum.py with PyTorch's gloo: what torchrun's users do.

torch_sum.py [STEPS FAULT RANK]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed


def main(argv: list[str]) -> None:
    steps, fault, culprit = (int(argv[0]), argv[1], int(argv[2])) if argv else (1, "", -1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    total = torch.zeros(1)
    for step in range(steps):
        if step == steps // 2 and rank == culprit:
            from fault import commit

            commit(fault)
        total = torch.tensor([rank + 1.0])
        torch.distributed.all_reduce(total)
    Path(os.environ["BENCH_DIR"], f"sum-{rank}").write_text(f"{total.item():g}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
