"""Programs with JAX's live_devices for tests of --keep-survivors, and the marks of tests that need it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

jax = find_spec("jax")
assert jax is not None and jax.submodule_search_locations is not None
# Its text, as a process that collects tests should not import JAX.
_MULTIHOST_UTILS = Path(jax.submodule_search_locations[0], "experimental/multihost_utils.py").read_text()
HAS_LIVE_DEVICES = "class _LiveDevices" in _MULTIHOST_UTILS
NEEDS_LIVE_DEVICES = [
    pytest.mark.jax_version,
    pytest.mark.live_devices,
    pytest.mark.skipif(not HAS_LIVE_DEVICES, reason="--keep-survivors refuses this JAX, as another test shows"),
]

# Fits y = 2x by gradient descent on the ranks that live; prints each step's loss and the state before it, exactly.
TRAINING = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.multihost_utils import live_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

rank, step, weight, last = jax.process_index(), int(sys.argv[1]), float.fromhex(sys.argv[2]), int(sys.argv[3])
known = None

def fails():
    open("failed", "w").close()
    {fails}

def newest(states):
    return states[jnp.argmax(states[:, 0])]

def take_state(mesh, step, weight):
    split, mine = NamedSharding(mesh, P("x")), np.array([[step, weight]], np.float32)
    states = jax.make_array_from_callback((mesh.size, 2), split, lambda at: mine)
    step, weight = np.asarray(jax.jit(newest, out_shardings=NamedSharding(mesh, P()))(states)).tolist()
    return int(step), weight

@jax.jit
def train(weight, x):
    loss, slope = jax.value_and_grad(lambda weight: jnp.mean((weight * x - 2 * x) ** 2))(weight)
    return loss, weight - 0.1 * slope

while step < last:
    if rank == 2 and step == 20 and not os.path.exists("failed"):
        print("failing at", time.time(), flush=True)
        fails()
    try:
        with live_devices(jax.devices()) as devices:
            mesh = Mesh(np.array(devices), "x")
            if devices != known:
                step, weight = take_state(mesh, step, weight)
                known = devices
                if len(devices) == 3 and step >= 20:  # the lost rank is back
                    last = step + 20
            data = np.random.default_rng(step).normal(size=12 * len(devices)).astype(np.float32)
            x = jax.make_array_from_callback(data.shape, NamedSharding(mesh, P("x")), lambda at: data[at])
            loss, after = map(float, train(jax.device_put(np.float32(weight), NamedSharding(mesh, P())), x))
    except Exception as error:
        known = None
        print("lost", type(error).__name__, flush=True)
        continue
    if rank == 0:
        print(f"{{time.time()}} step {{step}} on {{len(devices)}}: {{float(weight).hex()}} {{loss.hex()}}", flush=True)
    step, weight = step + 1, after
"""
STEP = re.compile(r"\[0\] ([\d.]+) step (\d+) on (\d+): (\S+) (\S+)")
FIRST = ("0", "0x0p+0", "40")


def write(tmp_path: Path, code: str) -> str:
    (tmp_path / "train.py").write_text(code)
    return "train.py"


def program(tmp_path: Path, fails: str) -> str:
    return write(tmp_path, TRAINING.format(fails=fails))


def steps_of(out: str) -> list[tuple[int, int, str, str]]:
    """Each step with the number of devices, the state before it and its loss."""
    return [(int(step), int(size), weight, loss) for _, step, size, weight, loss in STEP.findall(out)]
