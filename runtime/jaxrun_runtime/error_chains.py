"""Makes values of exceptions and of what led to them: of an exception that ends the program, and of those that threads
handle while others ask where they are.

While an exception is being handled, no code of the program may run for a description: its `__str__` could wait for a
lock, or for an array that other ranks compute. So `handled_errors` reads only what Python's own exceptions keep in C.
"""

from __future__ import annotations

import itertools
import opcode
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from jaxrun.protocol.error_chain import ChainedError, ErrorChain
from jaxrun_runtime import callback_errors

_RAISE = opcode.opmap["RAISE_VARARGS"]
_MAX_ERRORS = 20  # of one chain
_MAX_FRAMES = 30  # of one exception: the innermost ones
_MAX_MESSAGE_LENGTH = 1_000
# Exceptions by which JAX shows other stacks, and that nobody has raised.
_STACKS_OF_JAX = ("UnfilteredStackTrace", "SimplifiedTraceback", "JaxStackTraceBeforeTransformation")
_PLAIN = (str, int, float, bool, bytes, types.NoneType)
_GROUPS = (BaseExceptionGroup,)  # of exceptions, whose own text says how many there are


def describe_chain(error: BaseException, text: Callable[[BaseException], str]) -> ErrorChain:
    """Return the chain of exceptions that ends with `error`; `text` returns the message of one."""
    chain = list(itertools.islice(_walk_back(error), _MAX_ERRORS))[::-1]
    following = [*chain[1:], None]
    found = [_describe(one, later, text) for one, later in zip(chain, following, strict=True)]
    return tuple(itertools.chain.from_iterable(map(_with_callback, found)))


def handled_errors() -> dict[int, ErrorChain]:
    """Return the chain of exceptions that each thread handles at this moment, by the thread's identifier."""
    read = getattr(sys, "_current_exceptions", None)
    if read is None:
        return {}
    found: dict[int, Any] = read()
    # Before Python 3.12, the values are as those of sys.exc_info().
    errors = {ident: one[1] if isinstance(one, tuple) else one for ident, one in found.items()}
    return {ident: describe_chain(error, plain_text) for ident, error in errors.items() if error is not None}


def plain_text(error: BaseException) -> str:
    """Return the message of an exception without running code of the program; only a part of it if that is needed."""
    arguments = BaseException.args.__get__(error)  # type: ignore[attr-defined]
    if _is_made_in_c(error) and all(type(one) in _PLAIN for one in _kept_values(error, arguments)):
        return str(error)
    return next((one for one in arguments if type(one) is str), "")


def _is_made_in_c(error: BaseException) -> bool:
    return not isinstance(error, _GROUPS) and isinstance(type(error).__str__, types.WrapperDescriptorType)


def _kept_values(error: BaseException, arguments: tuple[object, ...]) -> tuple[object, ...]:
    """The values from which Python makes the message."""
    if not isinstance(error, OSError):
        return arguments
    slots: Any = OSError
    names = (slots.errno, slots.strerror, slots.filename, slots.filename2)
    return (*arguments, *(name.__get__(error) for name in names))


def _walk_back(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, what it followed from or what was handled when it was raised, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if type(current).__name__ not in _STACKS_OF_JAX:
            yield current
        current = _predecessor(current)


def _predecessor(error: BaseException) -> BaseException | None:
    slots: Any = BaseException  # the program's class may have properties of the same names
    if (cause := slots.__cause__.__get__(error)) is not None:
        return cause  # type: ignore[no-any-return]
    return None if slots.__suppress_context__.__get__(error) else slots.__context__.__get__(error)


def _describe(
    error: BaseException, following: BaseException | None, text: Callable[[BaseException], str]
) -> ChainedError:
    is_replaced = following is not None and _replaces(following, error)
    return ChainedError(type(error).__name__, text(error), _places(error), is_replaced)


def _with_callback(error: ChainedError) -> tuple[ChainedError, ...]:
    """Return an exception, with a limit to its text, after the one of a callback that its text quotes, if any."""
    quoted = callback_errors.find_quoted(error.message)
    if quoted is None:
        return (replace(error, message=_clip(error.message)),)
    cause = ChainedError(quoted.error, _clip(quoted.message), quoted.places[-_MAX_FRAMES:], in_callback=True)
    return cause, replace(error, message=_clip(quoted.outer_message))


def _clip(message: str) -> str:
    # Undecodable bytes in a message become surrogates, which JSON refuses.
    return message[:_MAX_MESSAGE_LENGTH].encode("utf-8", "backslashreplace").decode()


def _replaces(error: BaseException, earlier: BaseException) -> bool:
    """Whether `error` was raised in place of the earlier exception, and not by chance while that was handled."""
    slots: Any = BaseException
    if slots.__cause__.__get__(error) is not None:
        return True
    first, last = _traceback(earlier), _last(_traceback(error))
    if first is None or last is None:
        return False
    # The outermost frame of an exception that was caught is the frame that has caught it.
    code, at = last.tb_frame.f_code.co_code, last.tb_lasti
    return last.tb_frame is first.tb_frame and 0 <= at < len(code) and code[at] == _RAISE


def _places(error: BaseException) -> tuple[tuple[str, int, str], ...]:
    places = []
    entry = _traceback(error)
    while entry is not None:
        code = entry.tb_frame.f_code
        places.append((code.co_filename, entry.tb_lineno or 0, code.co_name))
        entry = entry.tb_next
    return tuple(places[-_MAX_FRAMES:])


def _traceback(error: BaseException) -> types.TracebackType | None:
    slots: Any = BaseException
    return slots.__traceback__.__get__(error)  # type: ignore[no-any-return]


def _last(entry: types.TracebackType | None) -> types.TracebackType | None:
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry
