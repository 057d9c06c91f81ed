"""Programs of two processes with two devices each whose calls are recorded, and what was recorded of them."""

SETTING = """
import os, sys, threading, time
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jaxrun_runtime as jr

mesh = Mesh(np.array(jax.devices()), ("data",))

def rows(n, dtype=np.float32):
    # n rows of this process
    part = np.arange(n * 3).reshape(n, 3).astype(dtype)
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), part)

x = rows(2)
"""


def record(start, script, body, size=2, **more):
    """The ranks of a job that runs `body` to its end, and has recorded."""
    workers = start([script(SETTING + body)], size, **more).run()
    for worker in workers:
        assert worker.status == 0, worker.err
    return workers


def named(worker, name):
    """The records of calls of jit(name)."""
    return [call for call in worker.flight.calls if call.name == f"jit({name})"]


def line_of(body, marker):
    """The number of the line that holds this marker, in a program that `record` runs."""
    lines = (SETTING + body).splitlines()
    return next(number for number, line in enumerate(lines, 1) if f"# {marker}" in line)
