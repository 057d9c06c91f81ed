"""Trees of arrays, without jax: dicts, lists, tuples, named tuples and None are containers, all else is a leaf.

A list of numbers, or of such lists, is a leaf too: one array.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

from jaxrun.errors import UsageError


def leaves(tree: Any) -> list[Any]:
    """Return the leaves in JAX's order: a dict's by its sorted keys."""
    leaves: list[Any] = []
    map_leaves(leaves.append, tree)
    return leaves


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same tree with `function` of each leaf."""
    own = children(tree)
    if own is None:
        return function(tree)
    return _with_parts(tree, {key: map_leaves(function, part) for key, part in own.items()})


def map_with_axes(function: Callable[[Any, int | None], Any], tree: Any, axes: Any) -> Any:
    """Return the same tree with `function` of each leaf and its axis, or None.

    As in vmap, an axis may stand for all of the tree below it. Raises UsageError if `axes` does not fit the tree.
    """
    own = children(tree)
    if axes is None or isinstance(axes, int):
        if own is None:
            return function(tree, axes)
        return _with_parts(tree, {key: map_with_axes(function, part, axes) for key, part in own.items()})
    if own is None:
        raise UsageError(f"in_axes has {axes!r} where there is one array; give an axis, or None")
    wanted = _held(axes)
    if wanted is None or wanted.keys() != own.keys():
        raise UsageError(f"in_axes has {axes!r} where the inputs have {list(own)}; give each an axis, or None")
    return _with_parts(tree, {key: map_with_axes(function, part, wanted[key]) for key, part in own.items()})


def unflatten(template: Any, leaves: Sequence[Any]) -> Any:
    """Return the tree that `template` describes, in which each leaf is a number in `leaves`."""
    own = _held(template)
    if own is None:
        return leaves[template]
    return _with_parts(template, {key: unflatten(part, leaves) for key, part in own.items()})


def same_structure(one: Any, other: Any) -> bool:
    """Whether two trees have the same containers."""
    own, others = children(one), children(other)
    if own is None or others is None:
        return own is others
    return (
        type(one) is type(other)
        and own.keys() == others.keys()
        and all(same_structure(own[key], others[key]) for key in own)
    )


def children(tree: Any) -> dict[Any, Any] | None:
    """Return what a container holds, by key; None for a leaf."""
    return None if _is_numbers(tree) else _held(tree)


def _held(tree: Any) -> dict[Any, Any] | None:
    if tree is None:
        return {}
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if isinstance(tree, OrderedDict):
        return dict(tree)
    return {key: tree[key] for key in sorted(tree)} if isinstance(tree, dict) else None


def _with_parts(tree: Any, parts: Mapping[Any, Any]) -> Any:
    if tree is None:
        return None
    if isinstance(tree, dict):
        return type(tree)((key, parts[key]) for key in tree) if type(tree) in (dict, OrderedDict) else dict(parts)
    if hasattr(tree, "_fields"):
        return type(tree)(*parts.values())
    return list(parts.values()) if isinstance(tree, list) else tuple(parts.values())


def _is_numbers(tree: Any) -> bool:
    if not isinstance(tree, list) or not tree:
        return False
    return all(_is_numbers(part) if isinstance(part, list) else isinstance(part, Number) for part in tree)
