"""Runs batches of calls of a plain Python function, on a rank of a gang or in a process that loky has started."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxrun.protocol import exceptions
from jaxrun.protocol.map_messages import BatchResult, CallBatch
from jaxrun_runtime import failure_report
from jaxrun_runtime.gang import calls

_Function = Callable[[Any], Any]
_last: tuple[bytes, bool, _Function] | None = None


def serve() -> None:
    """Run batches until the parent sends something else; called on every rank by the gang."""
    call = calls.current_call()
    while isinstance(batch := call.receive(), CallBatch):
        result = run(batch, call.rank)
        try:
            call.send(result)
        except calls.CallEnded:
            raise
        except Exception as error:  # a result that cannot be pickled
            call.send(_all_failed(batch, error, call.rank))


def prepare_process(parent: int) -> None:
    """Prepare a process that loky has started: it ends with its parent, and a Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.pidfd_open(parent)

    def end_with_parent() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=end_with_parent, name="jaxrun-parent", daemon=True).start()


def run_pickled(data: bytes) -> bytes:
    """Run a pickled CallBatch; the pickled BatchResult."""
    import cloudpickle

    batch = CallBatch(b"", False, [None], False)  # stands for one that cannot be unpickled
    try:
        batch = pickle.loads(data)
        result = run(batch, 0)
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        return bytes(cloudpickle.dumps(_all_failed(batch, error, 0)))
    finally:
        sys.stdout.flush()  # the process may be killed next


def run(batch: CallBatch, rank: int) -> BatchResult:
    """Call the function for one item after the other."""
    function = _loaded(batch)
    results: list[Any] = []
    errors: dict[int, dict[str, Any]] = {}
    began = time.perf_counter()
    for place, item in enumerate(batch.items):
        try:
            results.append(function(item))
        except Exception as error:
            errors[place] = _details(error, rank)
            if not batch.continue_on_error:
                break
            results.append(None)
    return BatchResult(results, errors, time.perf_counter() - began)


def _loaded(batch: CallBatch) -> _Function:
    """The function of one item, kept for the next batch; one that raises the error where it cannot be unpickled."""
    global _last
    code, unpack = batch.code, batch.unpack_items
    if _last is None or (code is not None and (code, unpack) != _last[:2]):
        assert code is not None
        try:
            function, static = pickle.loads(code)
        except Exception as error:
            return _raising(error)
        call = (lambda item: function(*item, **static)) if unpack else (lambda item: function(item, **static))
        _last = code, unpack, call
    return _last[2]


def _raising(error: Exception) -> _Function:
    def fail(item: Any) -> Any:
        raise error

    return fail


def _all_failed(batch: CallBatch, error: Exception, rank: int) -> BatchResult:
    details = _details(error, rank)
    results = [None] * len(batch.items) if batch.continue_on_error else []
    return BatchResult(results, dict.fromkeys(range(len(results) or 1), details), 0.0)


def _details(error: Exception, rank: int) -> dict[str, Any]:
    failure = failure_report.describe_failure(error, rank)
    words = {name: getattr(failure, name) for name in ("error", "message", "traceback", "notes", "status", "time")}
    return {**words, "home": type(error).__module__, "exception": exceptions.pickle_exception(error)}
