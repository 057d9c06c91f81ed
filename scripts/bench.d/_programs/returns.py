"""Trains until a time that all ranks agree on; goes on when ranks are lost, and takes them back when they return."""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import live_devices
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

step, weight, known, is_over, until = 0, 0.0, None, False, float(sys.argv[1])


def newest(states):
    return states[jnp.argmax(states[:, 0])]


@jax.jit
def train(weight, x):
    loss, slope = jax.value_and_grad(lambda weight: jnp.mean((weight * x - 2 * x) ** 2))(weight)
    return loss, weight - 0.1 * slope


while not is_over:
    try:
        with live_devices(jax.devices()) as devices:
            mesh = Mesh(np.array(devices), "x")
            split, same = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
            if devices != known:
                state = np.array([[step, weight]], np.float32)
                states = jax.make_array_from_callback((mesh.size, 2), split, lambda at: state)  # noqa: B023
                found = np.asarray(jax.jit(newest, out_shardings=same)(states)).tolist()
                step, weight, known = int(found[0]), found[1], devices
            late = np.array([time.time() > until], np.float32)
            lates = jax.make_array_from_callback((mesh.size,), split, lambda at: late)  # noqa: B023
            ends = float(jax.jit(jnp.max, out_shardings=same)(lates)) > 0
            data = np.random.default_rng(step).normal(size=12 * len(devices)).astype(np.float32)
            x = jax.make_array_from_callback(data.shape, split, lambda at: data[at])  # noqa: B023
            loss, after = map(float, train(jax.device_put(np.float32(weight), same), x))
    except Exception as error:
        known = None
        print("lost", type(error).__name__, flush=True)
        time.sleep(0.01)
        continue
    is_over, step, weight = ends, step + 1, after
    print(f"at {time.time()} step {step} on {len(devices)}", flush=True)
    time.sleep(0.01)
