"""`snapshots.py HOW STEPS EVERY SECONDS MIB`: steps of so many seconds over a state of so many MiB, cut over all ranks.

HOW is "nothing", "snapshot" or "orbax": what becomes of the state after every EVERY steps. `notes` has how long the
steps took all together, in seconds, the last snapshot's background included, and how long the calls of them did.
"""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrun_runtime as jr

how, steps, every, seconds, mib = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
mesh = Mesh(np.array(jax.devices()), ("data",))
split = NamedSharding(mesh, PartitionSpec("data"))
make = jax.jit(lambda: [jnp.full(mib * 2**20 // 4 // 16, float(n)) for n in range(16)], out_shardings=[split] * 16)
work = jax.random.normal(jax.random.key(0), (1024, 1024))


@jax.jit
def burn(x, times):
    return jax.lax.fori_loop(0, times, lambda _, y: jnp.tanh(y @ x), x).sum()


# Outside of it each rank works for itself; so do the steps of a large model, for most of their time.
step = jax.jit(lambda state, x: [leaf + 0 * x for leaf in state], donate_argnums=0)


def one_step(state, times):
    return jax.block_until_ready(step(state, jnp.minimum(float(burn(work, times)), 0.0)))


state = one_step(make(), 1)
burn(work, 5).block_until_ready()
began = time.monotonic()
burn(work, 20).block_until_ready()
times = max(1, int(20 * seconds / (time.monotonic() - began)))
if Path("times").exists():
    times = int(Path("times").read_text())  # as many as in the run before
elif jr.rank == 0:
    Path("times").write_text(str(times))
times = int(np.asarray(jax.experimental.multihost_utils.broadcast_one_to_all(np.int32(times))))
manager = None
if how == "orbax":
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(Path("checkpoints").resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2))


def save(number):
    if how == "snapshot":
        jr.snapshot(number, state)
    elif manager is not None:
        manager.save(number, args=ocp.args.StandardSave(state))


for number in range(-2, 0):  # the memory is taken, and the files are made
    state = one_step(state, times)
    save(number + 3)
if manager is not None:
    manager.wait_until_finished()
sync_global_devices("warm")
began, in_calls, each = time.monotonic(), 0.0, []
for number in range(10, 10 + steps):
    at = time.monotonic()
    state = one_step(state, times)
    if number % every == every // 2:
        called = time.monotonic()
        save(number)
        in_calls += time.monotonic() - called
    each.append(time.monotonic() - at)
total = time.monotonic() - began
if jr.rank == 0:
    Path("notes").write_text(json.dumps({"total": total, "in_calls": in_calls, "steps": each}))
sync_global_devices("done")
