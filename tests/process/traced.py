"""Steps of a job that is restarted once, as rank 1 fails; in its second attempt rank 2 is late to each step."""

import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrun_runtime

mesh = Mesh(np.array(jax.devices()), ("data",))
rows = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), np.ones((2, 8), np.float32))


@jax.jit
def step(x):
    return x.sum()


for number in range(40):
    if jaxrun_runtime.attempt().number == 1 and jax.process_index() == 1 and number == 20:
        raise ValueError("bad record in shard 1")
    if jaxrun_runtime.attempt().number == 2 and jax.process_index() == 2:
        time.sleep(0.03)
    float(step(rows))
print("done", flush=True)
