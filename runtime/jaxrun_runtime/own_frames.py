"""Keeps jaxrun's own frames out of the stacks that the program's tools print.

These frames are above the program's first frame. A tool that prints the values of variables fills a screen with them.
Python cannot hide a frame, so this works only for tools that can leave frames out, such as loguru.
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
    """Leave jaxrun's frames out of the stacks that loguru prints from now on."""
    call_after_import("loguru._better_exceptions", _hide_from_loguru)


def _hide_from_loguru(module: ModuleType) -> None:
    formatter: Any = getattr(module, "ExceptionFormatter", None)
    if formatter is None or _HIDDEN not in inspect.signature(formatter).parameters:
        return  # another version of loguru: its stacks show jaxrun's frames
    original = formatter.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        original(self, *args, **{**given, _HIDDEN: _OwnFiles(given.get(_HIDDEN) or "")})

    formatter.__init__ = __init__


class _OwnFiles(str):
    """A file name that is equal to one file, and to every file of jaxrun."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or (isinstance(other, str) and is_scaffold(other))

    def __ne__(self, other: object) -> bool:
        return not self == other
