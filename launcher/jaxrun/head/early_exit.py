"""Has a rank left the others waiting for it for ever?

A rank that finishes early is legal as long as the others work. They wait in vain when each of them stands in
JAX and uses no CPU, in two looks in a row.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.verdict import stacks

_FIRST_LOOK = 10.0  # seconds after the first rank has finished
_SECOND_LOOK = 2.0  # seconds between the two looks that must agree
IDLE = 0.05  # of a core: a process that uses less is waiting


class EarlyExit:
    """Remembers the last look. `next_look` says in how many seconds to look again."""

    first_look = _FIRST_LOOK

    def __init__(self) -> None:
        self.next_look = _FIRST_LOOK
        self._before: tuple[float, Mapping[int, float]] | None = None

    def look(self, dumps: Mapping[int, str], waits: Mapping[int, str], cpu: Mapping[int, float], now: float) -> bool:
        """Whether the unfinished ranks wait in vain.

        By rank: its stacks, what it waits in as the kernel says, and the CPU seconds that it has used so far.
        """
        waiting = bool(dumps) and all(stacks.waits_in_jax(dump, waits[rank]) for rank, dump in dumps.items())
        before, self._before = self._before, (now, cpu) if waiting else None
        self.next_look = _SECOND_LOOK if waiting else _FIRST_LOOK
        if not waiting or before is None:
            return False
        then, used = before
        return all(cpu[rank] - used.get(rank, 0.0) < IDLE * (now - then) for rank in cpu)
