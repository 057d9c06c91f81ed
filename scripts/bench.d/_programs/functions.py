"""Runs jax_sum.py as a function on N ranks, by a tool for functions: functions.py TOOL N [ARGUMENT...].

It is called twice in the same processes where the tool keeps them; BENCH_DIR/again has the seconds of the second call.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax_sum

Call = Callable[[list[str]], object]


@contextmanager
def jaxrun(size: int) -> Iterator[Call]:
    import jaxrun

    with jaxrun.Gang(processes=size) as gang:
        yield lambda argv: list(gang.run(jax_sum.main, argv))


@contextmanager
def submitit(size: int) -> Iterator[Call]:
    import submitit

    executor = submitit.AutoExecutor(os.environ["BENCH_DIR"], cluster="local")
    executor.update_parameters(tasks_per_node=size, nodes=1, timeout_min=60)

    def task(argv: list[str]) -> None:
        jax_sum.main_of(submitit.JobEnvironment().global_rank, size, argv)

    yield lambda argv: executor.submit(task, argv).results()


@contextmanager
def ipyparallel(size: int) -> Iterator[Call]:
    import ipyparallel

    with ipyparallel.Cluster(n=size) as engines:
        yield lambda argv: engines[:].map_sync(jax_sum.main_of, range(size), [size] * size, [argv] * size)


@contextmanager
def monarch(size: int) -> Iterator[Call]:
    from monarch.actor import Actor, current_rank, endpoint, this_host

    class Rank(Actor):
        @endpoint
        def run(self, argv: list[str]) -> None:
            jax_sum.main_of(current_rank().rank, size, argv)

    ranks = this_host().spawn_procs({"ranks": size}).spawn("ranks", Rank)
    yield lambda argv: ranks.run.call(argv).get()


if __name__ == "__main__":
    tool, number, *arguments = sys.argv[1:]
    with globals()[tool](int(number)) as call:
        call(arguments)
        began = time.time()
        call(arguments)
        Path(os.environ["BENCH_DIR"], "again").write_text(f"{time.time() - began}")
