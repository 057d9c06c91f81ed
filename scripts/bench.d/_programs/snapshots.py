"""`snapshots.py HOW STEPS EVERY SECONDS MIB FILE`: steps of so many seconds, and a state of so many MiB over all ranks.

HOW is "nothing", "snapshot" or "orbax": what becomes of the state once in EVERY steps. FILE has how much work a step
is, once a run has found out. `notes` has how many seconds all steps took, how many of them the calls that save, and how
much CPU time of rank 0 each of these is, in the background too; that is measured apart from the steps.
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
from jaxrun_runtime.state_snapshots import snapshots

how, known = sys.argv[1], Path(sys.argv[6])
steps, every, seconds, mib = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
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
if not known.exists() and jr.rank == 0:
    known.write_text(str(max(1, int(20 * seconds / (time.monotonic() - began)))))
sync_global_devices("known")
times = int(known.read_text())  # as many in each run
manager = None
if how == "orbax":
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(Path("checkpoints").resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2))


def save(number):
    if how == "snapshot":
        jr.snapshot(number, state)
    elif manager is not None:
        manager.save(number, args=ocp.args.StandardSave(state))


def cpu_of_a_save(number):
    before = time.process_time()
    save(number)
    if manager is not None:
        manager.wait_until_finished()
    if how == "snapshot":
        snapshots._keeper()._wait()
    return time.process_time() - before


cpu = [cpu_of_a_save(number) for number in range(3)][-1]  # by then the memory is taken, and the files are made
sync_global_devices("warm")
began, in_calls = time.monotonic(), 0.0
for number in range(10, 10 + steps):
    state = one_step(state, times)
    if number % every == every // 2:
        called = time.monotonic()
        save(number)
        in_calls += time.monotonic() - called
total = time.monotonic() - began
if jr.rank == 0:
    Path("notes").write_text(json.dumps({"total": total, "in_calls": in_calls, "cpu": cpu}))
sync_global_devices("done")
