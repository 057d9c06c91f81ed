"""A rank's part in a map of a Python function: calls it for one item after the other, and says what came of each."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

from jaxrun.contract import exceptions
from jaxrun.contract.mapping import Back, Errand
from jaxrun_runtime import conversation, lastwords
from jaxrun_runtime.conversation import Conversation

_Function = Callable[[Any], Any]


def serve() -> None:
    """Run errands until the parent says that no more come; on every rank, in a conversation."""
    talk = conversation.current()
    function: _Function = _unknown
    while isinstance(errand := talk.receive(), Errand):
        if errand.code is not None:
            function = _loaded(errand.code, star=errand.star)
        back = _run(errand, function, talk.rank)
        try:
            talk.send(back)
        except conversation.Over:
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


def _run(errand: Errand, function: _Function, rank: int) -> Back:
    results: list[Any] = []
    errors: dict[int, dict[str, Any]] = {}
    began = time.perf_counter()
    for number, item in enumerate(errand.items):
        try:
            results.append(function(item))
        except Exception as error:
            errors[number] = _words(error, rank)
            if not errand.through:
                break
            results.append(None)
    return Back(errand.task, errand.start, results, errors, time.perf_counter() - began)


def _lost(errand: Errand, error: Exception, talk: Conversation) -> Back:
    words = _words(error, talk.rank)
    results = [None] * len(errand.items) if errand.through else []
    return Back(errand.task, errand.start, results, {n: words for n in range(len(results) or 1)}, 0.0)


def _words(error: Exception, rank: int) -> dict[str, Any]:
    said = lastwords.describe(error, rank, "program")
    words = {name: getattr(said, name) for name in ("error", "message", "traceback", "notes", "status", "time")}
    return {**words, "home": type(error).__module__, "exception": exceptions.pickled(error)}
