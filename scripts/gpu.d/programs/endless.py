"""Never ends: `endless.py device` waits for a computation, `endless.py collective` for the last rank, which sleeps."""

import sys
import time

import jax
from jax.experimental.multihost_utils import sync_global_devices

if sys.argv[1] == "device":
    forever = jax.jit(lambda x: jax.lax.while_loop(lambda y: y >= 0, lambda y: (y + 1) % 1000, x))
    forever(0).block_until_ready()
sync_global_devices("all ranks have compiled it")
while jax.process_index() == jax.process_count() - 1:
    time.sleep(1)
sync_global_devices("never reached")
