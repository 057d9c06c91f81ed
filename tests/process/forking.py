"""Forks children of every kind, and at last waits on rank 1 for one that never ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import jax
from jax.experimental import multihost_utils


def fork_and_signal(number: int) -> int:
    """The wait status of a child that is sent the signal as soon as it exists."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    os.kill(pid, number)
    return os.waitpid(pid, 0)[1]


def fork_and_crash() -> None:
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    os.waitpid(pid, 0)


def wait_for_ever() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print("waiting", flush=True)
        pool.map(time.sleep, [600])


def main() -> None:
    multihost_utils.sync_global_devices("start")
    ended = {os.WTERMSIG(fork_and_signal(signal.SIGTERM)) for _ in range(20)}
    print(f"ended by {sorted(ended)}", flush=True)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(f"mapped {pool.map(abs, [-1, -2])}", flush=True)
    fork_and_crash()
    if jax.process_index() == 1:
        wait_for_ever()
    multihost_utils.sync_global_devices("end")


def main_with_handler() -> None:
    """The program's own handler of SIGTERM is the children's, too, as under `python`."""
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    print(f"exited with {os.waitstatus_to_exitcode(fork_and_signal(signal.SIGTERM))}", flush=True)


if __name__ == "__main__":
    main() if jax.process_count() > 1 else main_with_handler()
