"""A program with a warm-up, training and evaluations, which asks in all of them whether it should stop.

As orbax does in each save, it also asks JAX whether it is being preempted. Ranks other than 0 are late now and then.
"""

import sys
import time

from jax.experimental import multihost_utils

import jaxrun_runtime as jr


def work(name: str) -> None:
    time.sleep(0.002 if jr.rank else 0.001)
    multihost_utils.sync_global_devices(name)


def stop(where: str, step: int) -> None:
    if jr.rank == 0:
        jr.saved(step)
    print(f"stops in {where} at {step}", flush=True)
    sys.exit()


for step in range(int(sys.argv[1])):
    work("warm-up")
    if jr.should_stop():
        stop("warm-up", step)
    if step == 2:
        print("warm", flush=True)
print("ready", flush=True)
for step in range(20_000):
    work("step")
    assert not multihost_utils.reached_preemption_sync_point(step)
    if jr.should_stop(step):
        stop("training", step)
    for _ in range(3 if step % 10 == 0 else 0):
        work("evaluation")
        if jr.should_stop():
            assert jr.should_stop() and jr.should_stop(step)
            stop("evaluation", step)
print("finished")
