"""Reports workers of process pools that die while the pool runs.

multiprocessing.Pool starts another worker in place of one that has ended, and nobody learns that it was killed: whoever
waits for the result of its task waits forever. Executors of concurrent.futures raise BrokenProcessPool instead, without
a word about which worker has died, and of what. A pool that ends its workers itself, or lets them end after some tasks,
has lost nothing.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from jaxrun.protocol.worker_messages import PoolWorkerDied
from jaxrun_runtime.agent_channel import AgentChannel
from jaxrun_runtime.import_watch import call_after_import

_MODULES = ("multiprocessing.pool", "multiprocess.pool")  # Python's own, and the copy that pathos and datasets use
_JOIN = "_join_exited_workers"  # a running pool calls it with its workers, and it removes the ones that have ended
_EXECUTORS = "concurrent.futures.process"
_TERMINATE = "terminate_broken"  # an executor's thread calls it when a worker has ended, before it ends the others
_REAP_S = 1.0  # between the end of a worker's files and its own
_INTERVAL_S = 1.0  # between two reports: workers that fail in their first line die again and again


def report_deaths(channel: AgentChannel, rank: int) -> None:
    """Send a PoolWorkerDied for workers of the program's pools that end with another status than 0."""
    reported_at = float("-inf")

    def report(ended: Sequence[Any]) -> None:
        nonlocal reported_at
        died = [worker for worker in ended if worker.exitcode]
        now = time.monotonic()
        if not died or now - reported_at < _INTERVAL_S:
            return
        reported_at = now
        channel.send(PoolWorkerDied(rank, time.time(), died[-1].pid, died[-1].exitcode))

    def watch(module: ModuleType) -> None:
        join = getattr(getattr(module, "Pool", None), _JOIN, None)
        if join is None:  # another Python: then nothing is reported
            return

        @functools.wraps(join)
        def join_and_report(pool: Any) -> Any:
            before = list(pool)
            result = join(pool)
            with contextlib.suppress(Exception):
                report([worker for worker in before if worker not in pool])
            return result

        module.Pool._join_exited_workers = staticmethod(join_and_report)

    def watch_executors(module: ModuleType) -> None:
        manager = getattr(module, "_ExecutorManagerThread", None)
        terminate = getattr(manager, _TERMINATE, None)
        if terminate is None:
            return

        @functools.wraps(terminate)
        def report_and_terminate(thread: Any, cause: Any) -> Any:
            with contextlib.suppress(Exception):
                if cause is None:  # else a worker's answer could not be read
                    report(_ended_workers(thread))
            return terminate(thread, cause)

        setattr(manager, _TERMINATE, report_and_terminate)

    for name in _MODULES:
        call_after_import(name, watch)
    call_after_import(_EXECUTORS, watch_executors)


def _ended_workers(thread: Any) -> list[Any]:
    """Return the workers of a broken executor that have ended; the executor ends the others afterwards."""
    from multiprocessing import connection  # the executor has imported it

    workers = list(thread.processes.values())
    ended = connection.wait([worker.sentinel for worker in workers], timeout=0)
    found = [worker for worker in workers if worker.sentinel in ended]
    for worker in found:
        worker.join(_REAP_S)
    return found
