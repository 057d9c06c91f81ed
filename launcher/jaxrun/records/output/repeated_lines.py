"""Lines that several ranks print at about the same time: the screen shows each once, as `[0-7] loading tokenizer`.

The lines of each rank stay in their order. Lines wait at most HOLD_S for the other ranks. A rank that prints much is
not delayed. Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

HOLD_S = 0.2
_MAX_BYTES = 4096  # of a rank, that are held; a rank that prints more at once is shown as it prints
_FLOOD_S = 1.0  # for which such a rank is not held again


Line = tuple[str, bytes]  # the stream that a rank has written it to, and the line


class RepeatedLines:
    """The whole lines that are held, by rank."""

    def __init__(self) -> None:
        self._held: dict[int, list[Line]] = {}
        self._sizes: Counter[int] = Counter()  # bytes, by rank
        self._since = 0.0  # when the first of them came
        self._flooding: dict[int, float] = {}  # until when a rank is not held

    def hold(self, rank: int, stream: str, lines: bytes, now: float) -> bool:
        """Keep whole lines; returns False if the rank prints too much: the held lines come before these."""
        if self._flooding.get(rank, now) > now or self._sizes[rank] + len(lines) > _MAX_BYTES:
            self._flooding[rank] = now + _FLOOD_S
            return False
        if not self._held:
            self._since = now
        self._held.setdefault(rank, []).extend((stream, line) for line in lines.splitlines(keepends=True))
        self._sizes[rank] += len(lines)
        return True

    @property
    def due(self) -> float | None:
        """The time at which the lines are to be shown; None if nothing is held."""
        return self._since + HOLD_S if self._held else None

    def release(self) -> list[tuple[list[int], Line]]:
        """Return texts in the order in which to show them, with the ranks that printed each, and forget them."""
        held = {rank: deque(lines) for rank, lines in sorted(self._held.items())}
        self._held.clear()
        self._sizes.clear()
        return merge_lines(held)


def merge_lines(held: Mapping[int, deque[Line]]) -> list[tuple[list[int], Line]]:
    """Merge the lines of ranks, by rank in order: a line that is next for several ranks is shown once.

    A line that other ranks print only after further lines waits for these, if that is possible.
    """
    merged: list[tuple[list[int], Line]] = []
    later = Counter(line for lines in held.values() for line in list(lines)[1:])
    while heads := {rank: lines[0] for rank, lines in held.items() if lines}:
        chosen = next((line for line in heads.values() if not later[line]), next(iter(heads.values())))
        ranks = [rank for rank, line in heads.items() if line == chosen]
        for rank in ranks:
            held[rank].popleft()
            if held[rank]:
                later[held[rank][0]] -= 1
        stream, line = chosen
        if merged and merged[-1][0] == ranks and merged[-1][1][0] == stream:
            merged[-1] = (ranks, (stream, merged[-1][1][1] + line))
        else:
            merged.append((ranks, chosen))
    return merged
