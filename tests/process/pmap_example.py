"""The example of JAX's guide to multi-process programs: it joins by itself and knows nothing of jaxrun.

Under jaxrun its own jax.distributed.initialize() finds the work done.
"""

import jax
import jax.numpy as jnp

jax.distributed.initialize()

xs = jnp.ones(jax.local_device_count())
result = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(xs)

print(f"global device count: {jax.device_count()}")
print(f"result: {result}")
