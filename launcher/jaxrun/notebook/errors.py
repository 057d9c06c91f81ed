"""What a notebook shows of the errors that a cell's ranks have raised: one traceback, and whose it is. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxrun.gang.exceptions import RemoteFailure
from jaxrun.notebook.transcript import MimeBundle, fold
from jaxrun.text import format_ranks

_CELL = re.compile(r'^( *)File "(In\[\d+\])", line', re.MULTILINE)


def group_failures(failures: Sequence[RemoteFailure]) -> list[list[RemoteFailure]]:
    """Those that are alike, the first in time first."""
    found: dict[tuple[str, str, str], list[RemoteFailure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.time):
        found.setdefault(failure.group_key, []).append(failure)
    return list(found.values())


def format_main_error(failures: Sequence[RemoteFailure], size: int, more: Sequence[str] = ()) -> str:
    """The first error, whose it is, and `more` lines below; `size`: how many ranks there are."""
    first, *others = group_failures(failures)
    whose = "all ranks" if len(first) == size > 1 else format_ranks(failure.rank for failure in first)
    same = " the same" if len(first) > 1 else ""
    rest = (
        f"; other errors of {format_ranks(f.rank for group in others for f in group)} are folded above"
        if others
        else ""
    )
    return "\n".join([f"{whose} raised{same}{rest}", _text(first[0]), *more])


def fold_other_errors(failures: Sequence[RemoteFailure]) -> list[MimeBundle]:
    """All but the first kind of error, folded."""
    return [
        fold(f"{format_ranks(failure.rank for failure in group)} raised {_headline(group[0])}", _text(group[0]))
        for group in group_failures(failures)[1:]
    ]


def name_cells(text: str) -> str:
    """A traceback, with cells named as IPython names them."""
    return _CELL.sub(r"\1Cell \2, line", text)


def _text(failure: RemoteFailure) -> str:
    return name_cells(failure.traceback.rstrip() or _headline(failure))  # a sys.exit has no traceback


def _headline(failure: RemoteFailure) -> str:
    first = failure.message.partition("\n")[0]
    return f"{failure.error}: {first}" if first else failure.error
