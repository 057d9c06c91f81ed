"""A program that works in step until one of its ranks misbehaves, in the way that its flags say.

Every rank takes part in a sum over all devices, again and again. `--rank` names the rank that misbehaves (-1: all of
them) once it has made `--after` steps; `--steps` ends the loop, and with it the program, in the others.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Trouble(Exception):
    """What `--raise` raises."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--after", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--pause", type=float, default=0.005)
    parser.add_argument("--raise", dest="message")
    parser.add_argument("--raise-in-thread", dest="thread_message")
    parser.add_argument("--os-exit", type=int)
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--loop-until", metavar="FILE", help="compute in Python until this file exists")
    parser.add_argument("--finish", action="store_true", help="end normally while the others go on")
    parser.add_argument("--slow-exit-handler", type=float, metavar="SECONDS")
    parser.add_argument("--until-preempted", action="store_true", help="end when JAX's preemption notice says so")
    parser.add_argument("--print-signals", action="store_true", help="print SIGUSR1 and SIGUSR2")
    return parser.parse_args()


def misbehave(flags: argparse.Namespace) -> None:
    """Everything that one rank can do to the others."""
    if flags.slow_exit_handler is not None:
        import atexit

        atexit.register(_linger, flags.slow_exit_handler)
    if flags.thread_message:
        thread = threading.Thread(target=_raise, args=(flags.thread_message,), name="Loader-1")
        thread.start()
        thread.join()
    if flags.message:
        _raise(flags.message)
    if flags.os_exit is not None:
        os._exit(flags.os_exit)
    while flags.hang:
        time.sleep(1)
    while flags.loop_until and not os.path.exists(flags.loop_until):
        pass


def _raise(message: str) -> None:
    raise Trouble(message)


def _linger(seconds: float) -> None:
    print("exit handler begins", flush=True)
    time.sleep(seconds)
    print("exit handler ends", flush=True)


def main() -> None:
    flags = parse()
    devices = np.array(jax.devices())
    sharding = NamedSharding(Mesh(devices, ("devices",)), PartitionSpec("devices"))
    ones = jax.make_array_from_callback((devices.size,), sharding, lambda index: np.ones(devices.size)[index])
    total = jax.jit(lambda x: x.sum())
    if flags.print_signals:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda received, _: print("received", received, flush=True))
    print("ready", flush=True)
    for step in range(flags.steps):
        if step == flags.after and flags.rank in (-1, jax.process_index()):
            misbehave(flags)
            if flags.finish:
                return
        assert float(total(ones)) == devices.size
        if flags.until_preempted:
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                print("preempted", flush=True)
                return
            if step == 0:
                print("listening", flush=True)
        time.sleep(flags.pause)
    print("finished", flush=True)


if __name__ == "__main__":
    main()
