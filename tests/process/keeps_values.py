"""`keeps_values.py FATE`: a snapshot of values of every kind; then they come back as what they were.

FATE:
  kill      rank 1 is killed once the snapshot is whole, and the next attempt restores it
  refused   states that cannot be kept, or not restored, each with the words in which all ranks are told
  usage     such a state, once: the program ends by it
"""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrun_runtime as jr
from jaxrun_runtime.state_snapshots import snapshots

mesh = Mesh(np.array(jax.devices()), ("data",))
split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
COUNT = jax.device_count()


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layer, self.dropout = nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)


def spread(make, sharding):
    return jax.jit(make, out_shardings=sharding)()


def on_two_ranks(seed):
    """Others have no part of it."""
    two = [device for device in jax.devices() if device.process_index < 2]
    sharding = NamedSharding(Mesh(np.array(two), ("data",)), PartitionSpec("data"))
    content = np.arange(len(two), dtype=np.float32) + seed
    return jax.make_array_from_callback(content.shape, sharding, lambda index: content[index], dtype=np.float32)


def values(seed):
    """By name, as a program may have them; only their values depend on the seed."""
    params = {"w": jnp.arange(3.0) + seed}
    return {
        "a flax TrainState": TrainState(
            step=seed, apply_fn=None, params=params, tx=None, opt_state=(jnp.int32(seed), None)
        ),
        "an nnx state": nnx.state(Net(nnx.Rngs(seed))),
        "numbers": [seed, -(2**200) - seed, bool(seed), seed + 0.1, float("inf"), complex(seed, -0.0)],
        "numpy": {
            "array": np.arange(6.0).reshape(2, 3)[:, ::2] + seed,
            "big-endian": np.arange(3, dtype=">i4") + seed,
            "scalar": np.float64(seed),
            "low scalar": ml_dtypes.bfloat16(seed),
            "no dimension": np.array(seed, np.int8),
            "empty": np.zeros((0, 3)),
            "low": np.full(3, seed, ml_dtypes.float8_e4m3fn),
            "date": np.array([seed], "datetime64[s]"),
        },
        "local": {
            "array": jnp.arange(4) + seed,
            "committed": jax.device_put(np.arange(4.0) + seed, jax.local_devices()[0]),
            "weak": jnp.asarray(seed + 0.5),
            "weak vector": jnp.broadcast_to(jnp.asarray(seed), (2,)),
            "four bits": jnp.full(3, seed, jnp.int4),
        },
        "keys": {
            "key": jax.random.key(seed),
            "another implementation": jax.random.key(seed, impl="rbg"),
            "several": jax.random.split(jax.random.key(seed), 3),
            "split": spread(lambda: jax.random.split(jax.random.key(seed), 2 * COUNT), split),
            "whole": spread(lambda: jax.random.key(seed), whole),
            "old": jax.random.PRNGKey(seed),
        },
        "global": {
            "split": spread(lambda: jnp.arange(2.0 * COUNT) + seed, split),
            "weak": spread(lambda: jnp.asarray(seed), whole),
            "weak split": spread(lambda: jnp.broadcast_to(jnp.asarray(seed + 0.5), (COUNT,)), split),
            "low": spread(lambda: jnp.full(COUNT, seed, jnp.float8_e5m2), split),
            "empty": spread(lambda: jnp.zeros((0, COUNT)), whole),
            "as device_put makes it": jax.device_put(jnp.arange(3.0) + seed, whole),
            "of two ranks": on_two_ranks(seed),
            "64 dimensions": spread(lambda: jnp.full((1,) * 64, seed, jnp.int32), whole),
        },
        "nothing": {"none": None, "empty": {}},
    }


def describe(leaf):
    """All that is to come back of it."""
    if not isinstance(leaf, jax.Array):
        array = np.asarray(leaf)
        return type(leaf), array.dtype, array.dtype.byteorder, array.shape, str(leaf)
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    impl, data = (jax.random.key_impl(leaf), jax.random.key_data(leaf)) if is_key else ("", leaf)
    is_one = data.is_fully_replicated and data.sharding.addressable_devices
    parts = [data.addressable_data(0)] if is_one else [one.data for one in data.addressable_shards]
    values = [np.asarray(part).tobytes() for part in parts]
    weak = getattr(leaf, "weak_type", False)  # which keys have not
    return jax.Array, leaf.dtype, impl, leaf.shape, weak, leaf.is_fully_addressable, leaf.committed, values


def check(found, expected):
    """Print the names of leaves that are not what they were."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    for (path, one), other in pairs:
        if describe(one) != describe(other):
            print("differs:", jax.tree_util.keystr(path), describe(one), describe(other), flush=True)
    assert jax.tree.structure(found) == jax.tree.structure(expected)


def kill():
    found = jr.restore(values(seed=0))
    if jr.attempt().number == 1:
        assert found is None
        jr.snapshot(1, {})
        jr.snapshot(5, values(seed=3))
        snapshots._keeper()._wait()
        if jr.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        jr.snapshot(9, values(seed=4))  # which waits for rank 1
    check(found.state, values(seed=3))
    shapes = {"numbers": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)}
    print("restored", found.step, jr.restore(shapes), jr.restore({}), flush=True)
    state = {"count": spread(lambda: jnp.asarray(7), whole), "mask": spread(lambda: jnp.ones(4), whole)}
    jr.snapshot(2**63 - 1, state | {"mean": np.full(2, 0.1)})
    _, state = jr.restore({"count": 0, "mask": np.zeros(4), "mean": jnp.zeros(2)})  # `like` as before the first step
    assert state["mean"].dtype == np.float32, state
    print("came back", state["count"].weak_type, state["count"], state["mask"], flush=True)
    both = jax.jit(lambda x, y: x + y.sum() + jnp.ones(COUNT))(state["count"], spread(lambda: jnp.ones(COUNT), split))
    assert both.sharding.is_fully_addressable == (jr.size == 1), both.sharding


def refused():
    mine = jnp.float32(jr.rank)
    gone = spread(lambda: jnp.ones(3), whole)
    gone.delete()
    wrong = {"a": "text", "b": np.array([None]), "c": jax.ShapeDtypeStruct((), "f4"), "d": gone}
    calls = {
        "leaves": lambda: jr.snapshot(1, wrong),
        "unequal": lambda: jr.snapshot(1, {"same": 1, "array": mine, "number": jr.rank // 2}),
        "leaves that differ": lambda: jr.snapshot(1, {"x": 1, f"of {jr.rank % 2}": 1, "y": np.zeros(2 + jr.rank // 2)}),
        "steps that differ": lambda: jr.snapshot(jr.rank, {}),
        "negative": lambda: jr.snapshot(-1, {"a": object()}),
        "too large": lambda: jr.snapshot(2**64, {}),
        "on one rank": lambda: jr.snapshot(1.5 if jr.rank == 1 else 1, {}),
        "traced": lambda: jax.jit(lambda x: jr.snapshot(1, {"x": x}))(1.0),
        "like": lambda: jr.restore({"a": "text", "b": jax.ShapeDtypeStruct((), "f4")}),
        "likes that differ": lambda: jr.restore({"x": np.zeros(jr.rank)}),
    }  # fmt: skip
    for name, call in calls.items():
        try:
            call()
        except jr.SnapshotError as error:
            assert isinstance(error, TypeError) and isinstance(error, ValueError)
            print(f"{name}: {error}".replace("\n  ", " | "), flush=True)
    jr.snapshot(3, {"x": 1})  # after all of these, it is still the same job
    print("goes on:", jr.restore({"x": 0}), flush=True)


def usage():
    jr.snapshot(1, {"name": "text"})


{"kill": kill, "refused": refused, "usage": usage}[sys.argv[1]]()
