"""Finds the moment at which a rank may be at a prompt: a line that it has begun must then be shown unfinished."""

from __future__ import annotations

from collections.abc import Callable

PROMPT_DELAY_S = 0.3  # from the last piece of an unfinished line to the first look at its rank, and between two looks
_PATIENCE_S = 3.0  # after which the screen shows any unfinished line


class PromptWatch:
    """Watches the unfinished lines of one rank, which has the job's standard input. Pure but for its callables.

    A line that is written in pieces while the rank computes stays one line. A rank that has not written for a moment,
    and neither runs nor sleeps, may wait for what a person types.
    """

    def __init__(self, is_at_work: Callable[[], bool], clock: Callable[[], float]) -> None:
        """`is_at_work`: whether the rank certainly reads no input now."""
        self._is_at_work = is_at_work
        self._clock = clock
        self._begun: dict[str, float] = {}  # by stream: since when it has an unfinished line
        self._next_look: float | None = None

    @property
    def deadline(self) -> float | None:
        """When to call `poll` next."""
        return self._next_look

    def note_output(self, stream: str, data: bytes) -> None:
        """Note what the rank has written to its "out" or "err"."""
        if b"\n" in data:
            self._begun.pop(stream, None)
        if data.endswith(b"\n"):
            if not self._begun:
                self._next_look = None
            return
        now = self._clock()
        self._begun.setdefault(stream, now)
        self._next_look = now + PROMPT_DELAY_S

    def poll(self) -> bool:
        """Whether the rank may be at a prompt. It is said once for a line."""
        now = self._clock()
        if self._next_look is None or now < self._next_look:
            return False
        if self._is_at_work():
            is_shown_soon = now >= min(self._begun.values()) + _PATIENCE_S
            self._next_look = None if is_shown_soon else now + PROMPT_DELAY_S
            return False
        self._begun.clear()
        self._next_look = None
        return True
