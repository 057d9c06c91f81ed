"""A mapping from objects by identity, for objects that cannot be hashed or referenced weakly, such as executables.

An id alone cannot be the key: after its object has died, another object may have the same id.
"""

from __future__ import annotations

import sys
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")
_FEW = 64  # entries before the first clean-up


class IdentityDict(Generic[_Value]):
    """A mapping that keeps its keys alive, so that their ids stay unique, and drops keys that only it still holds.

    It drops them in clean-ups as it grows. It has at most 64 entries, or twice as many as after the last clean-up.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, _Value]] = {}
        self._look_at = _FEW

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: object) -> _Value | None:
        """Return the value of this very object, or None."""
        entry = self._entries.get(id(key))
        return None if entry is None else entry[1]

    def set(self, key: object, value: _Value) -> None:
        self._entries[id(key)] = key, value
        if len(self._entries) > self._look_at:
            for number in [number for number, entry in self._entries.copy().items() if _count(entry) == _OURS]:
                del self._entries[number]
            self._look_at = max(_FEW, 2 * len(self._entries))


def _count(entry: tuple[Any, Any]) -> int:
    return sys.getrefcount(entry[0])


_OURS = _count((object(), None))  # the count of a key that only its entry holds; it differs between Python versions
