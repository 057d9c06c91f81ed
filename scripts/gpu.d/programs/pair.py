"""Two ranks on two hosts, with a fault in rank 1: `pair.py FATE`.

lag         rank 1 sleeps while rank 0 waits for it
function    rank 1 calls another function where rank 0 repeats a known one
shape       the same function, with another shape
early       rank 1 ends early, with status 0
kill        rank 1 is killed
restart     in the first attempt rank 1 is killed after a snapshot, and the next attempt continues from there
straggler   rank 1 comes late to every step
cost        prints how long one call takes
tls         prints whether JAX's coordinator speaks TLS
nothing     no fault
left-out    rank 1 computes forever on its own device, at the line where rank 0 waits for a collective
"""

import os
import signal
import socket
import ssl
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrun_runtime as jr

fate, late = sys.argv[1], jax.process_index() == 1
rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))
total = jax.jit(lambda x: x.sum())
other = jax.jit(lambda x: (x * x).max())
forever = jax.jit(lambda x: jax.lax.while_loop(lambda y: y >= 0, lambda y: (y + 1) % 1000, x))


def cut(width=4):
    return jax.make_array_from_process_local_data(rows, np.ones((1, width), np.float32))


def step():
    return float(total(cut()))


def speaks_tls(address):
    """Whether the server begins a TLS handshake. It may then refuse us for lack of a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=10) as raw, context.wrap_socket(raw):
            return True
    except ssl.SSLError as error:
        return "CERTIFICATE_REQUIRED" in str(error)
    except OSError:
        return False


def go_on_from_snapshots():
    state, first = {"x": jnp.zeros(4)}, 0
    if (restored := jr.restore(state)) is not None:
        first, state = restored.step + 1, restored.state
        step()
        print(f"went on from step {first - 1}, computes {time.time() - os.stat('failed-at').st_mtime:.1f} s later")
    for number in range(first, 6):
        step()
        jr.snapshot(number, state)
        if number == 3 and not first and late:
            open("failed-at", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


step()
if fate == "left-out":
    result = forever(jnp.int32(0)) if late else total(cut())
    result.block_until_ready()
elif fate == "restart":
    go_on_from_snapshots()
elif fate == "tls":
    if not late:
        print("JAX's coordinator speaks", "TLS" if speaks_tls(os.environ["JAX_COORDINATOR_ADDRESS"]) else "no TLS")
elif fate == "cost":
    seconds = []
    for _ in range(200):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    if not late:
        print(f"one call takes {1e6 * statistics.median(seconds):.0f} us", flush=True)
else:
    # Long enough that a pause of the machine of a second or two is no doubt about who comes late.
    for number in range(300 if fate == "straggler" else 20):
        if fate == "straggler" and late:
            time.sleep(0.04)
        if late and number == 12:
            match fate:
                case "lag":
                    time.sleep(3600)
                case "function":
                    float(other(cut()))
                case "shape":
                    float(total(cut(8)))
                case "early":
                    sys.exit(0)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
        step()
