"""Refuses to let a program replace its rank by os.exec…: what is executed would run alone, as process 0 of 1.

Processes that the program has forked may execute what they want.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn

_CALLS = ("execv", "execve")  # the others of `os` call these


class ExecError(RuntimeError):
    """The program has called os.exec… in a rank."""


def refuse_exec() -> None:
    """From now on an os.exec… of this process raises ExecError."""
    owner = os.getpid()
    for name in _CALLS:
        setattr(os, name, _guard(getattr(os, name), owner))


def _guard(original: Callable[..., NoReturn], owner: int) -> Callable[..., NoReturn]:
    @functools.wraps(original)
    def execute(path: Any, *args: Any) -> NoReturn:
        if os.getpid() == owner:
            raise ExecError(
                f"os.{original.__name__} would replace this process by {os.fsdecode(path)}, which is no part of the "
                "job and would run alone, as process 0 of 1. For variables that must be set before the start: "
                "jaxrun --env NAME=VALUE; for another program: jaxrun PROGRAM, or subprocess.run."
            )
        original(path, *args)

    return execute
