"""What the plugin knows of a test from its collection on; light, since every session loads it."""

from __future__ import annotations

import pytest

from jaxrun.errors import UsageError
from jaxrun.pytest_plugin.mark import MARK_NAME, MarkSpec, is_parametrized, parse_counts, parse_mark

PARAMETER = "process_count"  # what processes([2, 4]) parametrizes
_WISH = pytest.StashKey[MarkSpec | str]()
_NODEID = pytest.StashKey[str]()


def read_mark(item: pytest.Item) -> None:
    """Read its mark, if it has one; what is wrong with that is kept for when it is run."""
    mark = item.get_closest_marker(MARK_NAME)
    if mark is None:
        return
    item.stash[_NODEID] = item.nodeid  # pytest-xdist changes it
    try:
        counts = parse_counts(mark.args, mark.kwargs)
        if is_parametrized(mark.args, mark.kwargs):
            parameters = getattr(getattr(item, "callspec", None), "params", {})
            if PARAMETER not in parameters:
                raise UsageError(f"@pytest.mark.processes({list(counts)}): this kind of test takes one number only")
            counts = (parameters[PARAMETER],)
        item.stash[_WISH] = parse_mark(mark.args, mark.kwargs, counts[0])
    except UsageError as error:
        item.stash[_WISH] = str(error)


def mark_spec(item: pytest.Item) -> MarkSpec | str | None:
    """What the test asks for, or what is wrong with its mark; None if it has none."""
    return item.stash.get(_WISH, None)


def rank_nodeid(item: pytest.Item) -> str:
    """As the ranks know it."""
    return item.stash[_NODEID]
