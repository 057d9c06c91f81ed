"""What a notebook shows of the errors that a cell's ranks have raised: one traceback, and whose it is. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxrun.gang.remote import Remote
from jaxrun.notebook.lines import Bundle, folded
from jaxrun.ranks import spell

_CELL = re.compile(r'^( *)File "(In\[\d+\])", line', re.MULTILINE)


def groups(failures: Sequence[Remote]) -> list[list[Remote]]:
    """Those that are alike, the first in time first."""
    found: dict[tuple[str, str, str], list[Remote]] = {}
    for failure in sorted(failures, key=lambda failure: failure.time):
        found.setdefault(failure.alike, []).append(failure)
    return list(found.values())


def main(failures: Sequence[Remote], size: int, more: Sequence[str] = ()) -> str:
    """The first error, whose it is, and `more` lines below; `size`: how many ranks there are."""
    first, *others = groups(failures)
    whose = "all ranks" if len(first) == size > 1 else spell(failure.rank for failure in first)
    same = " the same" if len(first) > 1 else ""
    rest = f"; other errors of {spell(f.rank for group in others for f in group)} are folded above" if others else ""
    return "\n".join([f"{whose} raised{same}{rest}", _text(first[0]), *more])


def others(failures: Sequence[Remote]) -> list[Bundle]:
    """All but the first kind of error, folded."""
    return [
        folded(f"{spell(failure.rank for failure in group)} raised {_headline(group[0])}", _text(group[0]))
        for group in groups(failures)[1:]
    ]


def cells_named(text: str) -> str:
    """A traceback, with cells named as IPython names them."""
    return _CELL.sub(r"\1Cell \2, line", text)


def _text(failure: Remote) -> str:
    return cells_named(failure.traceback.rstrip() or _headline(failure))  # a sys.exit has no traceback


def _headline(failure: Remote) -> str:
    first = failure.message.partition("\n")[0]
    return f"{failure.error}: {first}" if first else failure.error
