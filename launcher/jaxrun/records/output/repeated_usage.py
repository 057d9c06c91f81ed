"""Usage errors and help of a program, which all ranks print: the screen shows each text once, as `[0-3] usage: …`.

A stream is held for a moment from a line that begins with "usage:", as the lines of argparse and click do. That happens
once in an attempt: a program that prints such lines all the time is not delayed. Pure.
"""

from __future__ import annotations

from msgspec import Struct

from jaxrun.text import format_ranges

HOLD_S = 1.0  # for a rank's text, unless jaxrun itself has something to say before
_MAX_BYTES = 2**16  # of a text that is held
_FIRST_WORD = b"usage:"


class _Held(Struct):
    since: float
    text: bytearray


class RepeatedUsage:
    """The texts that are held, by rank and stream."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], _Held] = {}
        self._released: set[tuple[int, str]] = set()

    def hold(self, rank: int, stream: str, lines: bytes, now: float) -> bool:
        """Keep whole lines if they begin a usage error, or continue one; returns whether they are kept."""
        key = rank, stream
        held = self._held.get(key)
        if held is not None:
            held.text += lines
            if len(held.text) > _MAX_BYTES:
                held.since = float("-inf")  # due at once
        elif key not in self._released and lines[: len(_FIRST_WORD)].lower() == _FIRST_WORD:
            self._held[key] = _Held(now, bytearray(lines))
        return key in self._held

    @property
    def due(self) -> float | None:
        """The time at which the texts are to be shown; None if nothing is held."""
        return min(held.since for held in self._held.values()) + HOLD_S if self._held else None

    def release(self) -> list[tuple[list[int], str, bytes]]:
        """Return each text with its stream and the ranks that printed it, the lowest rank first, and forget them."""
        ranks_of: dict[tuple[str, bytes], list[int]] = {}
        for (rank, stream), held in sorted(self._held.items()):
            ranks_of.setdefault((stream, bytes(held.text)), []).append(rank)
        self._released.update(self._held)
        self._held.clear()
        return [(ranks, stream, text) for (stream, text), ranks in ranks_of.items()]


def shared_prefix(ranks: list[int]) -> bytes:
    """Return the tag of lines that several ranks have printed: "[0-2,5] "."""
    return f"[{format_ranges(ranks).replace(' ', '')}] ".encode()
