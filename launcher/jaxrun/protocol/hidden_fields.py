"""Values some of whose fields must appear in no log: tokens, and the values of variables."""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct


class HidesFields(Struct, frozen=True):
    """A value whose text (`repr`) leaves out the fields that `hidden` names."""

    hidden: ClassVar[frozenset[str]] = frozenset()

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({shown})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name not in self.hidden]
