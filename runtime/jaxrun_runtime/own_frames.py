"""Keeps jaxrun's own frames out of the stacks that tools of the program print.

They stand above the program's first frame, and tools that print the values of variables fill a screen with them. Python
can hide no frame, so this is possible only where a tool has a way to leave some out, as loguru has.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from jaxrun.stack_frames import is_scaffold
from jaxrun_runtime.import_watch import call_after_import

_HIDDEN = "hidden_frames_filename"  # the argument by which loguru's logger leaves out the frames of its own file


def hide() -> None:
    """From now on, leave jaxrun's frames out of what the program prints by such tools."""
    call_after_import("loguru._better_exceptions", _hide_from_loguru)


def _hide_from_loguru(module: ModuleType) -> None:
    formatter: Any = getattr(module, "ExceptionFormatter", None)
    if formatter is None or _HIDDEN not in inspect.signature(formatter).parameters:
        return  # another version of loguru; its stacks are longer
    original = formatter.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        original(self, *args, **{**given, _HIDDEN: _OwnFiles(given.get(_HIDDEN) or "")})

    formatter.__init__ = __init__


class _OwnFiles(str):
    """Equal to one file, and to each file of jaxrun's own."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or (isinstance(other, str) and is_scaffold(other))

    def __ne__(self, other: object) -> bool:
        return not self == other
