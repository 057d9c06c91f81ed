"""Pickles exceptions, also those whose class cannot be called with their args, or makes another message of them."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any


def pickle_exception(error: BaseException) -> bytes:
    """Return `error` for pickle.loads, without its traceback, cause and context; empty if it cannot be pickled."""
    import cloudpickle

    for form in (error, _Rebuilt(error)):
        with contextlib.suppress(Exception):
            data: bytes = cloudpickle.dumps(form)
            made = pickle.loads(data)
            if type(made).__name__ == type(error).__name__ and str(made) == str(error):
                return data
    return b""


class _Rebuilt:
    """Pickles an exception so that unpickling does not call its __init__."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        return _rebuild, (type(error), error.args, {k: v for k, v in vars(error).items() if not k.startswith("__")})


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(state)
    return error
