"""How ranks are written, everywhere alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxrun.wording import several_hosts

UNKNOWN_HOST = "?"  # of a rank whose agent has not said yet where it is


def compact(ranks: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` → `0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def spell(ranks: Iterable[int]) -> str:
    """`[3]` → `rank 3`; `[0, 1, 2, 5]` → `ranks 0-2, 5`."""
    known = sorted(set(ranks))
    return f"rank{'s' if len(known) != 1 else ''} {compact(known)}"


def locate(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """The same with their hosts, where the job has more than one: `rank 5 (h3)`."""
    known = sorted(set(ranks))
    if not several_hosts(hosts):
        return spell(known)
    places = ", ".join(dict.fromkeys(hosts[rank] for rank in known if hosts[rank] != UNKNOWN_HOST))
    return f"{spell(known)} ({places})" if places else spell(known)
