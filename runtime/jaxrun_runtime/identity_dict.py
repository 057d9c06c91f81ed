"""A mapping by the identity of objects that can be neither hashed by value nor referenced weakly, such as executables.

An id alone is no key: once its object has died, another one may have it.
"""

from __future__ import annotations

import sys
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")
_FEW = 64  # entries that are kept before it is looked which of them nobody else has


class IdentityDict(Generic[_Value]):
    """Holds its keys, so that their ids are their own, and drops those that nobody else holds as it grows.

    It has at most twice as many entries as there were objects alive when it last looked, and 64.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, _Value]] = {}
        self._look_at = _FEW

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: object) -> _Value | None:
        """The value of this very object; None without one."""
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


_OURS = _count((object(), None))  # what a key counts that nothing but its entry holds; it differs between Pythons
