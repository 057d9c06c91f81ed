"""Times the start of N processes until each has its device: `start.py fresh N` or `start.py fork N`.

A forked process has jax from its parent, which never touches a device itself: CUDA cannot be used after a fork.
"""

import json
import os
import subprocess
import sys
import time

kind, count = sys.argv[1], int(sys.argv[2])


def use_device(rank: int) -> None:
    import jax

    if os.environ.get("JAX_PLATFORMS") == "cuda":
        jax.config.update("jax_cuda_visible_devices", str(rank))
    jax.devices()


def forked(rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        use_device(rank)
        os._exit(0)
    return pid


began = time.monotonic()
if kind == "rank":
    use_device(count)
    sys.exit()
if kind == "fork":
    import jax.numpy  # noqa: F401

    statuses = [os.waitpid(pid, 0)[1] for pid in [forked(rank) for rank in range(count)]]
else:
    ranks = [subprocess.Popen([sys.executable, __file__, "rank", str(rank)]) for rank in range(count)]
    statuses = [rank.wait() for rank in ranks]
if any(statuses):
    sys.exit(f"the processes ended with {statuses}")
print(json.dumps({"seconds": time.monotonic() - began}))
