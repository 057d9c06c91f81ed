"""What a map chose, and how fast it was."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from jaxrun.gang.gang import WarmGang


@dataclass(frozen=True, slots=True)
class Account:
    """`way`: how items were mapped; `chunk`: items that went together at the end. As text, one line."""

    way: str
    processes: int
    devices: int
    platform: str
    chunk: int
    items: int
    seconds: float

    @classmethod
    def of(cls, gang: WarmGang, way: str, chunk: int, items: int, seconds: float) -> Self:
        first = gang.workers[0]
        return cls(way, len(gang.workers), first.devices, first.platform, chunk, items, seconds)

    def __str__(self) -> str:
        processes = f"{self.processes} process{'es' * (self.processes > 1)}"
        shape = f"{processes} x {self.devices} device{'s' * (self.devices > 1)} ({self.platform})"
        rate = self.items / self.seconds if self.seconds else 0.0
        return f"{self.way}, {shape}, chunks of {self.chunk}: {self.items} items in {self.seconds:.3g} s, {rate:.3g}/s"


_accounts: weakref.WeakKeyDictionary[WarmGang, Account] = weakref.WeakKeyDictionary()


def note(gang: WarmGang, account: Account) -> None:
    _accounts[gang] = account


def account(gang: WarmGang) -> Account | None:
    """Of the last map of `gang` that has come to its end."""
    return _accounts.get(gang)
