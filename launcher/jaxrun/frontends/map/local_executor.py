"""Batches of a plain Python function in processes of this machine, by loky: concurrent.futures for real programs.

Unlike those of concurrent.futures, loky's processes start without running the user's script again, take functions that
cannot be imported, and can be killed at once. Added here: they end with this process, however it ends.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
import weakref
from collections.abc import Collection, Mapping
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from jaxrun import RUNTIME
from jaxrun.errors import EXIT_SIGNAL_BASE
from jaxrun.frontends.gang.exceptions import GangError, RemoteFailure, WorkerDied
from jaxrun.frontends.map.python_map import BatchOutcome
from jaxrun.protocol.map_messages import BatchResult, CallBatch
from jaxrun.protocol.payload import FunctionReference
from jaxrun.text import format_signal

_RUN_PICKLED = FunctionReference(f"{RUNTIME}.map.python_calls", "run_pickled")
_PREPARE = FunctionReference(f"{RUNTIME}.map.python_calls", "prepare_process")
_TERMINATED = "the pool was terminated"


class LocalExecutor:
    """Processes of this machine, by loky. Threads may use it."""

    def __init__(self, processes: int, env: Mapping[str, str]) -> None:
        self.processes = processes
        self._env = dict(env)
        self._lock = threading.Lock()
        self._loky: Any = None
        self._terminated = False

    def submit(self, batch: CallBatch, future: Future[BatchOutcome] | None = None) -> Future[BatchOutcome]:
        """Start a batch; its outcome is that of `future`, which is settled by another thread."""
        import cloudpickle
        from loky.process_executor import BrokenProcessPool

        data = cloudpickle.dumps(batch)
        future = Future() if future is None else future
        with self._lock:
            if self._terminated:
                future.set_exception(GangError(_TERMINATED))
                return future
            try:
                running = self._started().submit(_RUN_PICKLED, data)
            except BrokenProcessPool:  # a process has died since the last batch
                self._loky = None
                running = self._started().submit(_RUN_PICKLED, data)
            _terminate_at_exit(self)
        submitter = threading.get_ident()

        def settle(done: Future[bytes]) -> None:
            if threading.get_ident() == submitter:  # the batch was done before this callback was added
                threading.Thread(target=_settle, args=(future, done), name="jaxrun-pool", daemon=True).start()
            else:
                _settle(future, done)

        running.add_done_callback(settle)
        return future

    def wait(self, batches: Collection[Future[BatchOutcome]], timeout: float | None) -> None:
        futures.wait(batches, timeout, futures.FIRST_COMPLETED)

    def close(self) -> None:
        """Wait for all batches, and end the processes."""
        if self._loky is not None:
            self._loky.shutdown(wait=True)

    def terminate(self) -> None:
        """Kill the processes; the batches that are not done fail."""
        with self._lock:
            self._terminated = True
        if self._loky is not None:
            self._loky.shutdown(wait=True, kill_workers=True)

    def _started(self) -> Any:
        if self._loky is None:
            from loky import ProcessPoolExecutor

            self._loky = ProcessPoolExecutor(
                self.processes, initializer=_PREPARE, initargs=(os.getpid(),), env=self._env
            )
        return self._loky


def _settle(future: Future[BatchOutcome], done: Future[bytes]) -> None:
    """Pass on what has come of a batch that loky ran."""
    error = done.exception()
    try:
        if error is not None:
            raise _translated(error)
        result: BatchResult = pickle.loads(done.result())
        errors = {
            place: RemoteFailure.from_rank(0, "", details).to_exception_of_process()
            for place, details in result.errors.items()
        }
        future.set_result(BatchOutcome(result.results, errors, result.seconds))
    except BaseException as error:
        future.set_exception(error)


def _translated(error: BaseException) -> BaseException:
    """Return the error that a user of the pool sees for one of loky's."""
    from loky.process_executor import ShutdownExecutorError, TerminatedWorkerError

    if isinstance(error, ShutdownExecutorError):
        return GangError(_TERMINATED)
    if not isinstance(error, TerminatedWorkerError):
        return error
    found = re.search(r"\w+\((-?\d+)\)", str(error))  # "{EXIT(3)}", "{SIGKILL(-9)}"
    code = int(found[1]) if found else 1
    if code >= 0:
        return WorkerDied(f"a process of the pool ended with exit status {code}", (), {}, code)
    death = WorkerDied(f"a process of the pool was killed by {format_signal(-code)}", (), {}, EXIT_SIGNAL_BASE - code)
    death.signal = -code
    return death


_local: weakref.WeakSet[LocalExecutor] = weakref.WeakSet()


def _terminate_at_exit(executor: LocalExecutor) -> None:
    """Have `executor` terminated before the interpreter waits for loky, which would wait for all batches."""
    if not _local:
        # Called in reverse order, so before loky's own hook, which was registered when its first process was started.
        threading._register_atexit(_terminate_all)  # type: ignore[attr-defined]
    _local.add(executor)


def _terminate_all() -> None:
    for executor in tuple(_local):
        executor.terminate()
