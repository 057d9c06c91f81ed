"""A session of a gang over several hosts, as its user would type it: what it saw, as JSON on stdout.

python gang_session.py BACKEND [OPTION]...
"""

from __future__ import annotations

import json
import os
import re
import sys
import time

import jaxrun

WAIT_FOR_ONE = re.compile(r"rank 1 \(h2\) sleeps at .*ranks 0, 2\b.*wait\s+for\s+it\s+in\s+JAX", re.DOTALL)
DEAF = 1000.0  # seconds; longer than the test waits


def gathered(scale: float) -> list[float]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    print("gathering")
    everyone = multihost_utils.process_allgather(jnp.ones(1) * jax.process_index() * scale)
    return [float(value) for value in everyone.ravel()]


def die(rank: int) -> None:
    import jax

    if jax.process_index() == rank:
        os._exit(3)
    time.sleep(DEAF)


def leave_alone(rank: int) -> None:
    import jax

    if jax.process_index() != rank:
        gathered(1.0)
    else:
        time.sleep(DEAF)


def halved(x: float) -> float:
    return x / 2


def main() -> None:
    import numpy as np

    backend, *options = sys.argv[1:]
    seen: dict[str, object] = {}
    with jaxrun.Gang(3, backend=backend, platform="cpu", options=options) as gang:
        seen["hosts"] = [worker.host for worker in gang.workers]
        seen["gathered"] = gang.run(gathered, 2.0).main
        seen["sums"] = [float(total) for total in gang.run(np.sum, np.ones(2_000_000))]
        seen["mapped"] = float(gang.map(halved, np.arange(30_000.0)).sum(dtype=np.float64))
        seen["items"] = gang.map(str, range(7), jax=False)
        try:
            gang.run(die, 2)
        except jaxrun.WorkerDied as error:
            seen["died"] = [error.rank, error.host, error.status]
        try:
            with gang.start_call(leave_alone, 1) as call:
                while not WAIT_FOR_ONE.search(gang.stacks()):
                    time.sleep(0.2)
                call.results(0.1)
        except jaxrun.CallTimeout as error:
            seen["late"] = str(error)
        with gang.start_call(time.sleep, DEAF) as talk:
            gang.kill(0)
            while talk.running:
                talk.receive()
            error = talk.explain_death()
            seen["killed"] = error and [error.rank, error.host, error.signal]
        seen["again"] = gang.run(gathered, 1.0)[1]
        gang.pause(2)
        seen["paused"] = gang.rank_stacks().waits[2]
        gang.stop()
        seen["jax"] = "jax" in sys.modules
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
