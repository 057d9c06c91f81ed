"""Pickles JAX's arrays as numpy arrays for the caller, which has no jax, where this rank can see all of an array."""

from __future__ import annotations

import sys
from typing import Any


def reduce_array(value: Any) -> Any:
    """For a pickler's reducer_override: an array of JAX as a numpy array; NotImplemented for other values.

    Raises ValueError for an array of which this rank holds a part only.
    """
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(value, jax.Array):
        return NotImplemented
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise ValueError(
            "a function that a gang runs cannot return a key of jax.random, which numpy does not know; "
            "return jax.random.key_data(key)"
        )
    if not (value.is_fully_addressable or value.is_fully_replicated):
        raise ValueError(
            f"no rank can see all of an array of shape {value.shape} whose sharding is {value.sharding}, so none can "
            "return it; return what each rank has, [shard.data for shard in x.addressable_shards], or gather it first, "
            "jax.experimental.multihost_utils.process_allgather(x, tiled=True)"
        )
    import numpy

    return numpy.asarray, (numpy.asarray(value),)
