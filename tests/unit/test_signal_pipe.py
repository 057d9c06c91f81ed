"""A signal at any moment of a SignalPipe's life has one owner, which learns of it once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from jaxrun.node.agent import signals
from jaxrun.node.agent.signals import SignalPipe

_MOST_LINES = 200


class _SignalAtLine:
    """Sends SIGTERM to this process at the line of signals.py with this number, counted from 0 as they run."""

    def __init__(self, number: int) -> None:
        self.left = number

    def trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != signals.__file__:
            return None
        if event == "line":
            if self.left == 0:
                signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # pytest may have other threads
            self.left -= 1
        return self.trace


def _seen_at(number: int, use: Callable[[SignalPipe], list[int]]) -> list[str] | None:
    """Return who has seen the signal at this line, each time; None if so many lines do not run."""
    seen: list[str] = []
    at = _SignalAtLine(number)
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("before or after"))
    try:
        sys.settrace(at.trace)
        with SignalPipe((signal.SIGTERM, signal.SIGCHLD)) as pipe:
            seen += ["in the pipe"] * len(use(pipe))
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGTERM, before)
    return seen if at.left < 0 else None


@pytest.mark.parametrize("use", [SignalPipe.receive, lambda pipe: []], ids=["received", "not received"])
def test_a_signal_at_any_line_is_seen_once(use: Callable[[SignalPipe], list[int]]) -> None:
    seen = [found for number in range(_MOST_LINES) if (found := _seen_at(number, use)) is not None]
    assert len(seen) > 20 and not [(n, each) for n, each in enumerate(seen) if len(each) != 1]
    assert (["in the pipe"] in seen) == (use is SignalPipe.receive)


def test_signals_do_nothing_once_all_is_decided_until_the_process_ends() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with SignalPipe((signal.SIGTERM,)) as pipe:
            pipe.ignore_rest()
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert seen == []
    finally:
        signal.signal(signal.SIGTERM, before)
