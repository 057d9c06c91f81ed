"""Starts a gang, kills a rank, and starts the gang again: `gang.py PLATFORM RANKS`."""

import sys
import time

import jaxrun


def total():
    import jax
    from jax.experimental.multihost_utils import process_allgather

    return int(process_allgather(jax.numpy.ones(1)).sum()), jax.devices()[0].platform


if __name__ == "__main__":
    platform, ranks = sys.argv[1], int(sys.argv[2])
    expected = [(ranks, "gpu" if platform == "cuda" else platform)] * ranks
    with jaxrun.Gang(ranks, platform=platform) as gang:
        took = []
        for _ in range(2):
            began = time.monotonic()
            assert list(gang.run(total)) == expected
            took.append(time.monotonic() - began)
            gang.kill(ranks - 1)
            try:
                gang.run(total)
            except jaxrun.WorkerDied:
                continue
            sys.exit("a call to a rank that was killed has succeeded")
    print(f"started in {took[0]:.1f} s, anew in {took[1]:.1f} s", flush=True)
