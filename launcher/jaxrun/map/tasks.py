"""One Python function over many items: what is still to be dealt, what has come, and who waits for it.

Items go to the ranks a few at a time: one to each at first, and when their times are known, as many as take about
10 ms. A rank has a second errand waiting only if errands are short, so that none waits behind a long one while others
idle.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

from jaxrun.gang.exceptions import RemoteFailure
from jaxrun.protocol.map_messages import BatchResult

_SECONDS = 0.01
_SHORT = 0.05  # seconds; a rank may have one more errand than it works on, if they take less
_MOST = 4096  # items in an errand
_AHEAD = 8  # errands for each rank that may be dealt before what is asked for next
_numbers = itertools.count()


@dataclass(slots=True)
class Task:
    """One function over the items of one iterator; threads may wait for it.

    left:     items that are not dealt yet, None if nobody knows
    size:     items in an errand, None to choose by time
    through:  whether an item that raises is one of the results, or ends the task
    """

    code: bytes
    items: Iterator[Any]
    star: bool = False
    left: int | None = None
    size: int | None = None
    through: bool = False
    number: int = field(default_factory=lambda: next(_numbers))
    dealt: int = 0
    asked: int = 0  # items whose results have been taken
    item_seconds: float | None = None
    largest: int = 0  # items in an errand
    exhausted: bool = False
    failure: BaseException | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)  # its lock may be taken again
    _on_way: dict[int, int] = field(default_factory=dict)
    _came: dict[int, tuple[list[Any], dict[int, BaseException]]] = field(default_factory=dict)
    _to_call: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def over_all(cls, code: bytes, xs: Iterable[Any], **more: Any) -> Task:
        """Of the items of `xs`, whose number is known if `xs` knows it."""
        return cls(code, iter(xs), left=len(xs) if isinstance(xs, Sized) else None, **more)

    # ---- for who deals

    def take(self, ranks: int) -> tuple[int, list[Any]]:
        """The next items and the number of the first; none if there are no more, or too many are ahead already."""
        size = self.errand_size(ranks)
        if self.exhausted or (self.through and self.dealt - self.asked >= _AHEAD * ranks * size):
            return self.dealt, []
        try:
            items = list(itertools.islice(self.items, size))
        except Exception as error:  # of the user's iterator
            self.fail(error)
            return self.dealt, []
        start = self.dealt
        if not items:
            self.exhaust()
            return start, []
        self._on_way[start] = len(items)
        self.largest = max(self.largest, len(items))
        self.dealt += len(items)
        self.left = None if self.left is None else self.left - len(items)
        return start, items

    def errand_size(self, ranks: int) -> int:
        """How many items the next errand should have."""
        if self.size is not None:
            return self.size
        if self.item_seconds is None:
            return 1
        by_time = int(_SECONDS / max(self.item_seconds, 1e-9))
        fair = math.ceil(self.left / (2 * ranks)) if self.left is not None else _MOST
        return max(1, min(by_time, fair, _MOST))

    def errands_at_once(self, ranks: int) -> int:
        """How many errands a rank should have."""
        if self.item_seconds is None:
            return 1
        return 2 if self.item_seconds * self.errand_size(ranks) < _SHORT else 1

    def took(self, back: BatchResult, rank: int, host: str) -> None:
        """What came of one errand."""
        self.item_seconds = back.seconds / max(1, len(back.results))
        errors: dict[int, BaseException] = {}
        for place, words in back.errors.items():
            error = RemoteFailure.from_rank(rank, host, words).to_exception()
            error.add_note(f"raised for item {back.start + place}")
            errors[place] = error
        if errors and not self.through:
            self.fail(errors[min(errors)])
            return
        with self.changed:
            del self._on_way[back.start]
            self._came[back.start] = back.results, errors
        self._tell()

    def exhaust(self) -> None:
        """There are no more items."""
        with self.changed:
            self.exhausted = True
        self._tell()

    def fail(self, error: BaseException) -> None:
        """It ends with this error, unless it has ended."""
        with self.changed:
            if not self.over:
                self.failure, self.exhausted = error, True
                self._on_way.clear()
        self._tell()

    # ---- for who asked for it

    @property
    def over(self) -> bool:
        """Whether all results are there, or the one error that ended it."""
        return self.exhausted and not self._on_way

    def _tell(self) -> None:
        """Wake who waits; without the lock, because a callback may take its time."""
        with self.changed:
            calls, self._to_call = (self._to_call, []) if self.over else ([], self._to_call)
            self.changed.notify_all()
        for call in calls:
            call()

    def results(self) -> list[Any]:
        """All of them, in order, when it is over. Raises what ended it."""
        if self.failure is not None:
            raise self.failure
        return list(itertools.chain.from_iterable(self._came[start][0] for start in sorted(self._came)))

    def next_results(self, *, ordered: bool) -> list[tuple[Any, BaseException | None]] | None:
        """Of the next errand, or of any, with what an item raised; None if it has not come yet."""
        with self.changed:
            if not self.has_next(ordered=ordered):
                return None
            results, errors = self._came.pop(self.asked if ordered else next(iter(self._came)))
            self.asked += len(results)
            return [(result, errors.get(place)) for place, result in enumerate(results)]

    def has_next(self, *, ordered: bool) -> bool:
        return self.asked in self._came if ordered else bool(self._came)

    def when_over(self, call: Callable[[], None]) -> None:
        """Call it once, in the thread that ends the task, or here if it has ended."""
        with self.changed:
            if not self.over:
                self._to_call.append(call)
                return
        call()

    @property
    def consumed(self) -> bool:
        """Whether there is nothing more to be taken."""
        return self.over and not self._came
