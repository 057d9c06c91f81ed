"""Generates values by their annotations, for hypothesis: messages as they are, or as what a peer may write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import Meta, Struct
from msgspec.structs import fields


@dataclass(frozen=True)
class Values:
    """Which values there are of each type.

    by_type:   the strategy of a type, such as int or a Struct that has values of its own
    by_name:   the strategy of a field of that name, whatever its type is
    keys:      the strategy of a mapping's keys, by their type
    sequence:  makes the value of a tuple[X, ...] from a list
    choice:    makes the value of a member of an enumeration
    record:    makes the strategy of a Struct from the strategies of its fields
    within_bounds:  whether values are within the bounds of their fields
    """

    by_type: Mapping[Any, SearchStrategy[Any]]
    by_name: Mapping[str, SearchStrategy[Any]] = field(default_factory=dict)
    keys: Mapping[Any, SearchStrategy[Any]] = field(default_factory=dict)
    sequence: Callable[[list[Any]], Any] = tuple
    choice: Callable[[Enum], Any] = lambda member: member
    record: Callable[[type, dict[str, SearchStrategy[Any]]], SearchStrategy[Any]] = lambda kind, of: st.builds(
        kind, **of
    )
    within_bounds: bool = True

    def of(self, kind: Any) -> SearchStrategy[Any]:
        """The strategy of a type."""
        kind = getattr(kind, "__supertype__", kind)  # of a NewType
        origin, inner = get_origin(kind), get_args(kind)
        if kind in self.by_type:
            return self.by_type[kind]
        if origin is Annotated:
            return _within(inner[1], inner[0]) if self.within_bounds else self.of(inner[0])
        if origin is UnionType:
            return st.one_of(*map(self.of, inner))
        if origin is Literal:
            return st.sampled_from(inner)
        if origin is tuple and inner[-1] is Ellipsis:
            return st.lists(self.of(inner[0]), max_size=3).map(self.sequence)
        if origin is tuple:
            return st.tuples(*map(self.of, inner)).map(list).map(self.sequence)
        if origin is Mapping:
            key = getattr(inner[0], "__supertype__", inner[0])
            return st.dictionaries(self.keys[key], self.of(inner[1]), max_size=3)
        if issubclass(kind, Enum):
            return st.sampled_from(kind).map(self.choice)
        return self.record(kind, self.fields_of(kind))

    def fields_of(self, kind: type) -> dict[str, SearchStrategy[Any]]:
        """The strategies of the fields of a Struct."""
        hints = {field.name: field.type for field in fields(kind)} if issubclass(kind, Struct) else get_type_hints(kind)
        return {name: self.by_name[name] if name in self.by_name else self.of(hints[name]) for name in hints}


def _within(bounds: Meta, kind: type) -> SearchStrategy[Any]:
    """The strategy of the numbers or texts that these bounds allow."""
    if bounds.pattern is not None:
        return st.from_regex(bounds.pattern).filter(lambda text: len(text) <= (bounds.max_length or len(text)))
    assert bounds.ge is not None and bounds.le is not None
    return st.integers(int(bounds.ge), int(bounds.le)) if kind is int else st.floats(bounds.ge, bounds.le)
