"""Says in one sentence who holds the others up."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.analysis.diagnosis.straggler import Straggler
from jaxrun.protocol.flight import parse_group
from jaxrun.text import format_ranges, format_ranks_on_hosts


def format_straggler(straggler: Straggler, hosts: Mapping[int, str]) -> str:
    """`rank 5 (h3) came last to 94 % of calls, by 38 ms on average: the others waited 31 % of the time; …`."""
    group = parse_group(straggler.group, len(hosts))
    others = sorted(group.difference(straggler.ranks))
    calls = f"the calls at {straggler.place.partition(' ')[0]}" if straggler.place else "calls"
    of_group = f" of ranks {format_ranges(group)}" if len(group) < len(hosts) else ""
    who = f"rank {others[0]}" if len(others) == 1 else "the others"
    where = f"; it was in {straggler.frame}" if straggler.frame else ""
    late = f"{_percent(straggler.last)} of {calls}{of_group}, by {_milliseconds(straggler.late_s)} on average"
    waited = f"{who} waited {_percent(straggler.share)} of the time"
    return f"{format_ranks_on_hosts(straggler.ranks, hosts)} came last to {late}: {waited}{where}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _milliseconds(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"
