"""Steps under jaxrun, each with one cross-process call at its end: steps.py STEPS SECONDS WORK RANK DELAY.

WORK is how the seconds of a step pass: `sleep`, or `spin`, as CPU time. RANK takes DELAY of them longer, as 0.1; with
-1 no rank does.
"""

from __future__ import annotations

import random
import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

JITTER = 0.02  # of a step: no two of them take the same time


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def load(work: str, seconds: float) -> None:
    if work == "sleep":
        time.sleep(seconds)
    else:
        spin(seconds)


def main(argv: list[str]) -> None:
    steps, seconds, work, slow, delay = int(argv[0]), float(argv[1]), argv[2], int(argv[3]), float(argv[4])
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    rows = np.ones(jax.local_device_count(), np.float32)
    batch = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), rows)
    step = jax.jit(lambda batch: batch / batch.sum())
    factor = 1.0 + (delay if jax.process_index() == slow else 0.0)
    for _ in range(steps):
        load(work, seconds * factor * random.uniform(1 - JITTER, 1 + JITTER))
        step(batch)


if __name__ == "__main__":
    main(sys.argv[1:])
