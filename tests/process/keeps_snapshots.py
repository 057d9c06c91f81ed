"""`keeps_snapshots.py FATE [ARGUMENT]`: 12 steps with a snapshot after each; then each rank prints its bits.

Also whether they are those of 12 steps that nothing has disturbed. The first snapshot has one array more than the
others, which are restored.

FATE, in the first attempt:
  none           nothing; in the end the state is also restored with other shardings
  kill RANK      after step 8, before its snapshot, SIGKILL for this rank
  agent RANK     after step 8, before its snapshot, SIGKILL for the agent of this rank
  lose h1,h3     after step 8, the memory of these hosts is gone, and SIGKILL for the last rank
  hold           after step 8, before its snapshot, wait
  small          there is no memory on the last rank's host
"""

import hashlib
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrun_runtime as jr
from jaxrun.files.shared_memory import remove_shared_directory, snapshot_directory
from jaxrun_runtime.state_snapshots import snapshots
from jaxrun_runtime.state_snapshots.host_memory import HostMemory
from jaxrun_runtime.state_snapshots.placement import Room

fate, argument = (*sys.argv[1:], "")[:2]
rows = 2 if jax.device_count() % 2 == 0 else 1
mesh = Mesh(np.array(jax.devices()).reshape(rows, -1), ("a", "b"))


def cut(*axes):
    return NamedSharding(mesh, PartitionSpec(*axes))


SHARDINGS = {"both": cut("a", "b"), "one": cut("a"), "low": cut(("a", "b")), "whole": cut(), "count": cut()}
OTHERS = {"both": cut(), "one": cut(None, ("a", "b")), "low": cut("a"), "whole": cut("a"), "count": cut()}


def start():
    numbers = jnp.arange(144 * 24, dtype=jnp.float32).reshape(144, 24)
    low = numbers.astype(jnp.bfloat16)
    return {"both": numbers, "one": numbers + 0.5, "low": low, "whole": numbers[::12], "count": jnp.int32(0)}


@jax.jit
def following(state):
    return {name: leaf * 3 % 1009 + 1 if name != "count" else leaf + 1 for name, leaf in state.items()}


step_in_place = jax.jit(following, donate_argnums=0)


def bits(tree):
    parts = [np.asarray(shard.data).tobytes() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def fail(step):
    if jr.attempt().number > 1 or step != 8:
        return
    snapshots._keeper()._wait()  # so that all know which is the last that is whole
    if fate in ("kill", "agent") and jr.rank == int(argument):
        os.kill(os.getpid() if fate == "kill" else os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    if fate == "lose" and jr.rank == jr.size - 1:  # not rank 0, whose end is that of the coordinator, too
        for host in argument.split(","):
            remove_shared_directory(snapshot_directory(os.environ["JAXRUN_JOB_ID"], host))
        os.kill(os.getpid(), signal.SIGKILL)
    if fate in ("lose", "hold"):
        print("holds", flush=True)
        time.sleep(1000)


if fate == "small" and jr.rank == jr.size - 1:
    HostMemory.room = lambda self: Room(2**10, [0, 0])
begin = jax.jit(start, out_shardings=SHARDINGS)
state = begin()
found = jr.restore(state)
print("restored", found and found.step, flush=True)
done = 0
if found is not None:
    done, state = found
while done < 12:
    state = jax.block_until_ready(step_in_place(state))
    done += 1
    fail(done)
    jr.snapshot(done, {**state, "warmup": state["both"]} if done == 1 else state)
expected = begin()
for _ in range(12):
    expected = jax.block_until_ready(step_in_place(expected))
print("bits", bits(state), bits(state) == bits(expected), flush=True)
if fate == "none":
    like = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=OTHERS[name]) for name, leaf in state.items()}
    step, other = jr.restore(like)
    for name, leaf in other.items():
        assert leaf.sharding == OTHERS[name] and step == 12
        both = [process_allgather(each, tiled=True).tobytes() for each in (leaf, state[name])]
        assert both[0] == both[1], name
    print("other", jr.restore({"both": like["one"], "more": jnp.ones(3)}), jr.restore(like).step, flush=True)
