"""Compiles programs of one rank and of all, and prints how many this rank found in the cache, and how many not."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))
devices = np.array(jax.devices())
over_all = NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x"))
x = jax.make_array_from_callback((devices.size * 4,), over_all, lambda index: np.arange(devices.size * 4.0)[index])
total = float(jax.jit(lambda x: jnp.sin(x).sum())(x))
local = NamedSharding(Mesh(np.array(jax.local_devices()), ("x",)), PartitionSpec("x"))
own = float(jax.jit(lambda x: jnp.cos(x).sum())(jax.device_put(np.arange(8.0), local)))
print(f"{total:.4f} {own:.4f}")
asked = counts["compile_requests_use_cache"]
print(f"found {counts['cache_hits']} of {asked}", "all" if asked == counts["cache_hits"] else "")
