"""Three ranks that Ctrl-C finds in Python, in a call that waits for another rank, and in endless C++ code."""

import atexit
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

rank = jax.process_index()
both = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec("x"))
total = jax.jit(lambda x: x.sum())


def total_of_ranks_0_and_1() -> float:
    return float(total(jax.make_array_from_callback((2,), both, lambda _: np.ones(1))))


def endless() -> None:
    loop = jax.jit(lambda x: jax.lax.while_loop(lambda y: y > -1, lambda y: y * 0.5, x))
    loop(jnp.float32(1)).block_until_ready()


atexit.register(print, "exit handler")
if rank < 2:
    total_of_ranks_0_and_1()
print("ready", flush=True)
try:
    if rank == 0:
        time.sleep(600)
    if rank == 1:
        total_of_ranks_0_and_1()
    endless()
except KeyboardInterrupt:
    print("caught", flush=True)
    raise
finally:
    print("finally")
