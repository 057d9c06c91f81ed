"""How ranks are written, and read, everywhere alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from jaxrun.errors import UsageError
from jaxrun.wording import has_several_hosts

Ranks = tuple[range, ...]
UNKNOWN_HOST = "?"  # of a rank whose agent has not said yet where it is


def format_ranges(ranks: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` → `0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def format_ranks(ranks: Iterable[int]) -> str:
    """`[3]` → `rank 3`; `[0, 1, 2, 5]` → `ranks 0-2, 5`."""
    known = sorted(set(ranks))
    return f"rank{'s' if len(known) != 1 else ''} {format_ranges(known)}"


def format_ranks_on_hosts(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """The same with their hosts, where the job has more than one: `rank 5 (h3)`."""
    known = sorted(set(ranks))
    if not has_several_hosts(hosts):
        return format_ranks(known)
    places = ", ".join(dict.fromkeys(hosts[rank] for rank in known if hosts[rank] != UNKNOWN_HOST))
    return f"{format_ranks(known)} ({places})" if places else format_ranks(known)


def parse_ranks(text: str, option: str) -> Ranks:
    """Ranks as people write them: "3", "1-3,7". UsageError names `option` and the part that is wrong."""
    ranks = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        if match is None:
            raise UsageError(f"{option} takes ranks such as 1-3,7; {part!r} in {text!r} is none")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"{option} {text!r}: {part.strip()} runs backwards; write {last}-{first}")
        ranks.append(range(first, last + 1))
    return tuple(ranks)
