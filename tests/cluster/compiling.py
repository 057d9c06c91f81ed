"""Programs that the ranks of a host have in common: of all ranks, of one rank, of its last device alone.

Leaves attempt-A-rank-R.json: of each program how often this rank has loaded it from another, and its result, bit for
bit; and what is in this host's memory. With the argument "kill", in the first attempt each rank of the second host is
killed once it has compiled the third program, before it gives that to the other.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrun_runtime as jr
from jaxrun_runtime.compile_cache.shared_programs import SharedPrograms

loaded = 0
is_fatal = False


def count(event, **_):
    global loaded
    loaded += event == "/jaxrun/compile_once/loaded"


def write(self, key, content, give=SharedPrograms.write):
    if is_fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    give(self, key, content)


jax.monitoring.register_event_listener(count)
SharedPrograms.write = write
dies = sys.argv[1:] == ["kill"] and jr.attempt().number == 1 and jr.rank >= jr.size // 2
outcome = {"loaded": {}, "bits": {}}
mesh = Mesh(np.array(jax.devices()), ("x",))
values = np.linspace(0, 1, jax.device_count() * 4, dtype=np.float32)
everywhere = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("x")), lambda index: values[index])
here = jax.device_put(values)
on_last = jax.device_put(values, jax.local_devices()[-1])

for name, function, x in (
    ("sum of all ranks", lambda x: jnp.sin(x).sum(), everywhere),
    ("rows of all ranks", lambda x: jnp.cos(x) * x.mean(), everywhere),
    ("product", lambda x: jnp.tanh(jnp.outer(x, x)) @ x, here),
    ("by LAPACK", lambda x: jnp.linalg.svd(jnp.outer(x, x) + jnp.eye(x.size))[1], on_last),
):
    is_fatal = dies and name == "product"
    before = loaded
    result = np.asarray(jax.jit(function)(x).addressable_data(0))
    outcome["loaded"][name] = loaded - before
    outcome["bits"][name] = hashlib.sha256(result.tobytes()).hexdigest()
outcome["memory"] = os.environ["JAXRUN_COMPILE_MEMORY"]
outcome["in_memory"] = sorted(os.listdir(f"/dev/shm/jaxrun-{os.geteuid()}"))
Path(f"attempt-{jr.attempt().number}-rank-{jr.rank}.json").write_text(json.dumps(outcome))
