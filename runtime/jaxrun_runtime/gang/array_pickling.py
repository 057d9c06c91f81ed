"""How JAX's arrays travel to the parent, which has no jax: as numpy arrays, where this rank can see all of one."""

from __future__ import annotations

import sys
from typing import Any


def reduce_array(value: Any) -> Any:
    """For pickle: how to make `value` again; NotImplemented if it is no array of JAX's.

    ValueError for one of which this rank holds a part only.
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
