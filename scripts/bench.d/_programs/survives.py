"""`survives.py HOW EVERY`: steps of 0.1 s until `over` is there; the state is kept once in EVERY steps.

HOW is "memory", by snapshots, or "disk", by orbax. Rank 0 adds a line to `steps` after each step: the attempt, its
size, the step, and seconds since the epoch. `works` is there after the first.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrun_runtime as jr

how, every = sys.argv[1], int(sys.argv[2])
split = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
state = jax.jit(lambda: {"x": jnp.zeros(3 * 2**18)}, out_shardings=split)()
step = jax.jit(lambda state: {"x": state["x"] + 1 + jnp.sum(state["x"]) * 0})
manager = ocp.CheckpointManager(Path("checkpoints").resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2))
done = 0
if how == "memory" and (found := jr.restore(state)):
    done, state = found
if how == "disk" and (done := manager.latest_step() or 0):
    state = manager.restore(done, args=ocp.args.StandardRestore(state))
while not process_allgather(np.int32(Path("over").exists() or jr.should_stop(done))).any():
    time.sleep(0.1)
    state, done = jax.block_until_ready(step(state)), done + 1
    if jr.rank == 0:
        with open("steps", "a") as log:
            print(jr.attempt().number, jr.size, done, time.time(), file=log, flush=True)
        Path("works").touch()
    if how == "memory" and done % every == 0:
        jr.snapshot(done, state)
    if how == "disk" and done % every == 0:
        manager.save(done, args=ocp.args.StandardSave(state))
manager.wait_until_finished()
