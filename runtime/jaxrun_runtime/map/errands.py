"""A rank's part in a map of a Python function: calls it for one item after the other, and says what came of each."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

from jaxrun.protocol import exceptions
from jaxrun.protocol.map_messages import BatchResult, CallBatch
from jaxrun_runtime import failure_report, gang_worker
from jaxrun_runtime.gang_worker import ParentConnection

_Function = Callable[[Any], Any]


def serve() -> None:
    """Run errands until the parent says that no more come; on every rank, in a conversation."""
    talk = gang_worker.current_call()
    function: _Function = _unknown
    while isinstance(errand := talk.receive(), CallBatch):
        if errand.code is not None:
            function = _loaded(errand.code, star=errand.unpack_items)
        back = _run(errand, function, talk.rank)
        try:
            talk.send(back)
        except gang_worker.CallEnded:
            raise
        except Exception as error:  # a result that cannot be pickled
            talk.send(_lost(errand, error, talk))


def _loaded(code: bytes, *, star: bool) -> _Function:
    """The function of one item; one that raises the error where it cannot be unpickled here."""
    try:
        function, static = pickle.loads(code)
    except Exception as error:
        trouble = error

        def fail(item: Any) -> Any:
            raise trouble

        return fail
    return (lambda item: function(*item, **static)) if star else (lambda item: function(item, **static))


def _unknown(item: Any) -> Any:
    raise RuntimeError("an errand came without its function")


def _run(errand: CallBatch, function: _Function, rank: int) -> BatchResult:
    results: list[Any] = []
    errors: dict[int, dict[str, Any]] = {}
    began = time.perf_counter()
    for number, item in enumerate(errand.items):
        try:
            results.append(function(item))
        except Exception as error:
            errors[number] = _words(error, rank)
            if not errand.continue_on_error:
                break
            results.append(None)
    return BatchResult(errand.task, errand.start, results, errors, time.perf_counter() - began)


def _lost(errand: CallBatch, error: Exception, talk: ParentConnection) -> BatchResult:
    words = _words(error, talk.rank)
    results = [None] * len(errand.items) if errand.continue_on_error else []
    return BatchResult(errand.task, errand.start, results, {n: words for n in range(len(results) or 1)}, 0.0)


def _words(error: Exception, rank: int) -> dict[str, Any]:
    said = failure_report.describe_failure(error, rank, "program")
    words = {name: getattr(said, name) for name in ("error", "message", "traceback", "notes", "status", "time")}
    return {**words, "home": type(error).__module__, "exception": exceptions.pickle_exception(error)}
