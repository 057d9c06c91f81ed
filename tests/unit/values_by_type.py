"""Generates values by their annotations, for hypothesis: messages as they are, or as the JSON that a peer may write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy


@dataclass(frozen=True)
class Values:
    """Which values there are of each type.

    by_type:   the strategy of a type, such as int or a dataclass that has values of its own
    by_name:   the strategy of a field of that name, whatever its type is
    keys:      the strategy of a mapping's keys, by their type
    sequence:  makes the value of a tuple[X, ...] from a list
    choice:    makes the value of a member of an enumeration
    record:    makes the strategy of a dataclass from the strategies of its fields
    """

    by_type: Mapping[Any, SearchStrategy[Any]]
    by_name: Mapping[str, SearchStrategy[Any]] = field(default_factory=dict)
    keys: Mapping[Any, SearchStrategy[Any]] = field(default_factory=dict)
    sequence: Callable[[list[Any]], Any] = tuple
    choice: Callable[[Enum], Any] = lambda member: member
    record: Callable[[type, dict[str, SearchStrategy[Any]]], SearchStrategy[Any]] = lambda kind, of: st.builds(
        kind, **of
    )

    def of(self, kind: Any) -> SearchStrategy[Any]:
        """The strategy of a type."""
        kind = getattr(kind, "__supertype__", kind)  # of a NewType
        origin, inner = get_origin(kind), get_args(kind)
        if kind in self.by_type:
            return self.by_type[kind]
        if origin is UnionType:
            return st.one_of(*map(self.of, inner))
        if origin is Literal:
            return st.sampled_from(inner)
        if origin is tuple and inner[-1] is Ellipsis:
            return st.lists(self.of(inner[0]), max_size=3).map(self.sequence)
        if origin is Mapping:
            key = getattr(inner[0], "__supertype__", inner[0])
            return st.dictionaries(self.keys[key], self.of(inner[1]), max_size=3)
        if issubclass(kind, Enum):
            return st.sampled_from(kind).map(self.choice)
        return self.record(kind, self.fields_of(kind))

    def fields_of(self, kind: type) -> dict[str, SearchStrategy[Any]]:
        """The strategies of a dataclass's fields."""
        hints = get_type_hints(kind)
        return {name: self.by_name[name] if name in self.by_name else self.of(hints[name]) for name in hints}
