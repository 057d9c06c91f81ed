"""Notes which barrier or key of JAX's coordination service a thread waits for.

These calls have no Python frame, and no stack shows the name that they were given. So JAX's client gets functions that
note the name and call the original; the frames of this file mark the wait in stacks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from jaxrun.protocol.error_chain import GET_KEY, GET_KEY_BYTES, GET_LIVE_NODES, WAIT_AT_BARRIER, CoordinationWait
from jaxrun_runtime import jax_private

_MAX_NAME_LENGTH = 200
_NAMED = {WAIT_AT_BARRIER: "barrier_id", GET_KEY: "key", GET_KEY_BYTES: "key"}  # the argument with the name
FUNCTIONS = (*_NAMED, GET_LIVE_NODES)

_waits: dict[int, CoordinationWait] = {}  # by the thread's identifier


def watch() -> None:
    """Note the waits of this process from now on."""
    jax_private.wrap_coordination_calls(FUNCTIONS, _with_note)


def current_waits() -> dict[int, CoordinationWait]:
    """Return what each thread waits for at this moment, by the thread's identifier."""
    return dict(_waits)


def _with_note(function: str, original: Callable[..., Any]) -> Callable[..., Any]:
    argument = _NAMED.get(function, "")

    @functools.wraps(original)
    def wait_noted(client: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get(argument)
        name = str.__str__(given)[:_MAX_NAME_LENGTH] if argument and isinstance(given, str) else ""
        ident = threading.get_ident()
        outer = _waits.get(ident)
        _waits[ident] = CoordinationWait(function, name)
        try:
            return original(client, *args, **kwargs)
        finally:
            if outer is None:
                _waits.pop(ident, None)
            else:
                _waits[ident] = outer

    # Python's fault handler shows the function only by this name.
    named: Any = wait_noted
    named.__code__ = named.__code__.replace(co_name=function)
    return wait_noted
