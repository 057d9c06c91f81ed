"""Finds the groups of devices that exchange data in a compiled program, from the text of its HLO. Pure.

A device is numbered by its place in the program's device assignment. Each collective operation names its groups in one
of three ways, all of which occur in JAX 0.8 to 0.12:

    replica_groups={{0,1},{2,3}}                a list of groups; {} is one group of all devices
    replica_groups=[2,2]<=[2,2]T(1,0)           2 groups of 2: the numbers 0 … 3, reshaped, transposed, reshaped
    replica_groups=mesh['x'=2,'y'=2] {'y'}      the devices that differ only in their places on these axes of a mesh

A collective-permute has source_target_pairs instead, and XLA connects all devices for it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

Group = tuple[int, ...]  # places of devices, in the order in which the operation names them

_COLLECTIVE = re.compile(
    r" (?:all-gather|all-reduce|all-to-all|ragged-all-to-all|reduce-scatter|collective-[a-z]+)(?:-start)?\(.*"
)
_GROUPS = re.compile(
    r", replica_groups=(?:(?P<listed>\{[{}\d, ]*\})|\[(?P<groups>\d+),(?P<size>\d+)\]<=\[(?P<shape>[\d,]+)\]"
    r"(?:T\((?P<order>[\d,]+)\))?|mesh\[(?P<mesh>[^\]]*)\] \{(?P<axes>[^}]*)\})(?=,|$)"
)
_LISTED = re.compile(r"\{([\d, ]+)\}")
_PAIRS = ", source_target_pairs="
_AXIS = re.compile(r" ?'([^']*)'(?:=(\d+))?(?:,|$)")


def find_groups(hlo: str, devices: int) -> list[Group]:
    """Return the groups of all collectives in a program over `devices` devices, each once, in the program's order.

    Raises ValueError for a collective whose groups cannot be read.
    """
    found: dict[Group, None] = {}
    for match in _COLLECTIVE.finditer(hlo):
        found |= dict.fromkeys(_groups_of(match[0], devices))
    return list(found)


def _groups_of(operation: str, devices: int) -> list[Group]:
    everybody = [tuple(range(devices))]
    match = _GROUPS.search(operation)
    if match is None:
        if _PAIRS in operation:
            return everybody
        raise ValueError(f"the groups of a collective cannot be read: {operation[:200]}")
    if match["listed"]:
        return [tuple(map(int, group.split(","))) for group in _LISTED.findall(match["listed"])] or everybody
    if match["mesh"]:
        return _groups_on_axes(match["mesh"], match["axes"])
    shape = _numbers(match["shape"])
    return _cut(
        _transposed(shape, _numbers(match["order"]) if match["order"] else range(len(shape))), int(match["size"])
    )


def _groups_on_axes(mesh: str, selected: str) -> list[Group]:
    """Return the groups of `mesh`, "'x'=2,'y'=2", along the axes "'y'". Raises ValueError for parts of an axis."""
    sizes = {name: int(size) for name, size in _read_axes(mesh)}
    names = [name for name, _ in _read_axes(selected)]
    axes = list(sizes)
    order = [axes.index(name) for name in (*(name for name in axes if name not in names), *names)]
    return _cut(_transposed(list(sizes.values()), order), math.prod(sizes[name] for name in names))


def _read_axes(text: str) -> list[tuple[str, str]]:
    if _AXIS.sub("", text):
        raise ValueError(f"the axes {text} cannot be read")
    return _AXIS.findall(text)


def _transposed(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return 0, 1, 2 … as an array of this shape, its axes in this order."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    places = itertools.product(*(range(shape[axis]) for axis in order))
    return [sum(index * strides[axis] for index, axis in zip(place, order, strict=True)) for place in places]


def _cut(numbers: Sequence[int], size: int) -> list[Group]:
    return [tuple(numbers[start : start + size]) for start in range(0, len(numbers), size)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
