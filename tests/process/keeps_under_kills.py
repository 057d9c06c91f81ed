"""`keeps_under_kills.py KILLS`: in so many attempts one rank or all are killed, at any moment of the first steps.

Each attempt restores at least the last snapshot that an attempt before has known to be whole, with its values. Every
third snapshot has another structure and size than the two before it, and is not restored.
"""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrun_runtime as jr
from jaxrun_runtime.state_snapshots import snapshots

mesh = Mesh(np.array(jax.devices()), ("data",))
split = NamedSharding(mesh, PartitionSpec("data"))
attempt, kills, known = jr.attempt().number, int(sys.argv[1]), Path("known")  # the last step known to be whole
LENGTH = 2**20 * jax.device_count()
make = jax.jit(lambda step: jnp.full(LENGTH, step), out_shardings=split)
chance = random.Random(attempt)
victim, steps, delay = chance.choice([0, 1, None]), chance.randrange(6), chance.uniform(0.0, 0.1)


def die():
    time.sleep(delay)
    os.kill(os.getpid(), (signal.SIGKILL, signal.SIGABRT)[attempt % 2])  # two equal ends in a row would be a bug


found = jr.restore({"step": 0, "array": make(0.0)})
whole = int(known.read_text()) if known.exists() else 0
restored = found.step if found else 0
assert restored >= whole, (restored, whole)
if found:
    parts = [np.asarray(part.data) for part in found.state["array"].addressable_shards]
    assert found.state["step"] == restored and all((part == restored).all() for part in parts)
for step in range(restored + 1, restored + (10**9 if attempt <= kills else 10)):
    if attempt <= kills and victim in (None, jr.rank) and step == restored + 1 + steps:
        threading.Thread(target=die, daemon=True).start()
    state = {"step": step, "array": make(float(step))}
    if step % 3 == 0:
        state["more"] = make(0.0)[: LENGTH // 2]
    jr.snapshot(step, state)
    before = snapshots._keeper()._kept  # which may be this one already
    if jr.rank == 0 and before and before.step % 3:
        Path("draft").write_text(str(before.step))
        os.replace("draft", known)
print(f"killed {attempt - 1} times, the last time before step {restored + 1}", flush=True)
