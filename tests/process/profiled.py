"""Makes steps of two calls each until there is a file `stop`; while there is a file `own`, it takes its own profile."""

import os
import tempfile
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()), ("data",))


def spread(part):
    """The parts of all ranks as one array."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), np.float32(part))


@jax.jit
def step(x):
    return x + x.mean()


@jax.jit
def measure(x, flags):
    return x.sum(), flags.max(axis=0)


rows, own, stop = spread(np.ones((2, 8))), False, False
print("ready", flush=True)
while not stop:
    time.sleep(0.005)
    flags = spread([[os.path.exists("own"), os.path.exists("stop")]])
    wanted, stop = np.asarray(measure(step(rows), flags)[1]) > 0  # the ranks agree on it
    if wanted != own:
        own = wanted
        jax.profiler.start_trace(tempfile.mkdtemp(dir=".")) if own else jax.profiler.stop_trace()
        print("own" if own else "no more", flush=True)
