"""Describes divergences, and ranks that wait for others, for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from jaxrun.analysis.lockstep import differences
from jaxrun.analysis.lockstep.compare import Lag
from jaxrun.analysis.lockstep.differences import Difference, DifferenceKind
from jaxrun.analysis.lockstep.divergence import CallGroup, CallOrder, Divergence
from jaxrun.protocol.flight import parse_group
from jaxrun.terminal import PROSE_WIDTH, wrap_prose
from jaxrun.text import format_ranges, format_ranks, format_ranks_on_hosts, plural

_MAX_RANKS_CHARS = 40  # characters of a list of ranks
_MAX_CALL_GROUPS = 6
_DIFFERENCES = 4
_VALUES = 4
_PROGRAMS = {
    DifferenceKind.CODE: "a Python value that is baked in differs",
    DifferenceKind.LAMBDA: "another lambda of this line, or a Python value that is baked in",
    DifferenceKind.OPTIONS: "what it donates, its specs or its options differ",
    DifferenceKind.CONSTANT: "a large array that is baked in differs",
}


def format_divergence(divergence: Divergence, hosts: Mapping[int, str]) -> str:
    """Write several lines: which ranks made which call, what differs, and what to do. `hosts` has every rank."""
    call_groups = divergence.call_groups
    call = f"{divergence.title}{_of_group(divergence.group, hosts)}"
    if divergence.is_earlier:
        lines = [f"the processes were out of step before {call}, the oldest that is still recorded"]
        return "\n".join([*lines, *_rows(divergence, hosts), *_fill(differences.EARLIER_ADVICE)])
    found = differences.find_differences(call_groups)
    lines = [f"the processes disagree at {call}", *_rows(divergence, hosts)]
    callers = [call_group for call_group in call_groups if call_group.absence is None]
    is_only_caller = len(callers) == 1 and len(call_groups) > 1 and not _unknown(divergence, hosts)
    if is_only_caller and not _crossed(call_groups):
        lines.append(f"  only {_names(callers[0].ranks, hosts)} made this call")
    for difference in found[:_DIFFERENCES]:
        lines += _difference(difference, hosts)
    if len(found) > _DIFFERENCES:
        lines.append(f"  and {plural(len(found) - _DIFFERENCES, 'further difference')}")
    return "\n".join([*lines, *_fill(format_advice(divergence))])


def format_advice(divergence: Divergence) -> str:
    """Write what to do about a divergence, the end of its description."""
    if divergence.is_earlier:
        return differences.EARLIER_ADVICE
    callers = [call_group for call_group in divergence.call_groups if call_group.absence is None]
    return _advice(divergence, callers, differences.find_differences(divergence.call_groups))


def format_headline(divergence: Divergence) -> str:
    """Write a headline: `the ranks were out of step at cross-process call #12 (jit(step), train.py:88)`."""
    callers = [call_group for call_group in divergence.call_groups if call_group.absence is None]
    calls = list(dict.fromkeys((call_group.name, _line(call_group.place)) for call_group in callers))
    joint = " at " if len(calls) > 1 else ", "
    shown = " and ".join(joint.join(filter(None, call)) for call in calls[:2])
    when = "before" if divergence.is_earlier else "at"
    return f"the ranks were out of step {when} {divergence.title}{f' ({shown})' if shown else ''}"


def format_lag(lag: Lag, hosts: Mapping[int, str]) -> str:
    """Write `call #5, jit(step) at train.py:46, was reached by ranks 0-1, 3 and not by rank 2`, which is certain."""
    name, place = f", {lag.name}" if lag.name else "", f" at {_line(lag.place)}" if lag.place else ""
    call = f"call #{lag.number}{name}{place}{_of_group(lag.group, hosts)}"
    return f"{call}, was reached by {_names(lag.ahead, hosts)} and not by {_names(lag.behind, hosts)}"


def _rows(divergence: Divergence, hosts: Mapping[int, str]) -> Iterator[str]:
    """Yield a line for each call group, or for the largest ones if there are many."""
    shown = divergence.call_groups[:_MAX_CALL_GROUPS]
    width = max(len(_names(call_group.ranks, hosts)) for call_group in shown) + 1
    names = max(len(call_group.name) for call_group in shown)
    for call_group in shown:
        who = f"  {_names(call_group.ranks, hosts) + ':':{width}}  "
        if call_group.absence is not None:
            yield f"{who}{call_group.absence.format(len(call_group.ranks))}"
        else:
            yield f"{who}{call_group.name:{names}}  {_made(call_group)}".rstrip()
    cut = {rank for call_group in divergence.call_groups[_MAX_CALL_GROUPS:] for rank in call_group.ranks}
    for what, ranks in (("made other calls again", cut), ("not known", _unknown(divergence, hosts))):
        if ranks:
            yield f"  {_names(ranks, hosts)}: {what}"


def _unknown(divergence: Divergence, hosts: Mapping[int, str]) -> frozenset[int]:
    """Return the ranks of which it is not known what they did."""
    known = (call_group.ranks for call_group in divergence.call_groups)
    return parse_group(divergence.group, len(hosts)).difference(*known)


def _made(call_group: CallGroup) -> str:
    """Write `step at model.py:40, called at train.py:88`."""
    source = differences.short_source(call_group.source) if call_group.source else ""
    return ", ".join(filter(None, (source, f"called at {_line(call_group.place)}" if call_group.place else "")))


def _difference(difference: Difference, hosts: Mapping[int, str]) -> Iterator[str]:
    match difference.kind:
        case _ if difference.kind in _PROGRAMS:
            yield f"  same name and shapes, different program: {_PROGRAMS[difference.kind]}"
            yield from _diff(difference, hosts)
        case _ if difference.values:
            yield from _valued(difference, hosts)


def _valued(difference: Difference, hosts: Mapping[int, str]) -> Iterator[str]:
    """Yield one line, or one for each value if the line would be too long."""
    values = [f"{value} on {_names(ranks, hosts)}" for value, ranks in difference.values]
    left = len(values) - _VALUES
    shown = [*values[:_VALUES], *([plural(left, "other value")] if left > 0 else [])]
    line = f"  {difference.subject} {', '.join(shown[:-1])} and {shown[-1]}"
    if len(line) <= PROSE_WIDTH:
        yield line
        return
    yield f"  {difference.subject}"
    yield from (f"    {value}" for value in shown)


def _diff(difference: Difference, hosts: Mapping[int, str]) -> Iterator[str]:
    if not difference.lines:
        return
    first, second = (_names(ranks, hosts) for ranks in difference.sides)
    yield f"  in the lowered programs (- {first}, + {second}):"
    yield from (f"    {line}" for line in difference.lines)
    if difference.omitted:
        yield f"    and {plural(difference.omitted, 'further line')}"


def _advice(divergence: Divergence, callers: Collection[CallGroup], found: Collection[Difference]) -> str:
    if _crossed(divergence.call_groups):
        return differences.CROSSED_ADVICE
    kind = next((difference.kind for difference in found), DifferenceKind.UNKNOWN)
    match divergence.order:
        case CallOrder.NAN_SEARCH:
            return differences.NAN_SEARCH_ADVICE
        case CallOrder.REORDERED if kind is not DifferenceKind.LAMBDA:
            return differences.REORDERED_ADVICE
        case CallOrder.NO_BATCHES | CallOrder.UNREAD if kind is DifferenceKind.TAIL:
            return differences.ADVICE[DifferenceKind.SHAPE]
    if kind in (DifferenceKind.FUNCTION, DifferenceKind.NAMESAKE):
        places = {_line(call_group.place) for call_group in callers}
        if len(places) == 1 and "" not in places:
            return differences.SAME_LINE_ADVICE
    return differences.ADVICE[kind]


def _crossed(call_groups: Collection[CallGroup]) -> bool:
    """Whether two sets of ranks wait for each other in different calls."""
    return any(group.absence is not None and group.absence.waits_in is not None for group in call_groups)


def _fill(sentence: str) -> list[str]:
    return wrap_prose(sentence).split("\n")


def _line(place: str) -> str:
    """`train.py:88 train_step` → `train.py:88`."""
    return place.partition(" ")[0]


def _of_group(group: str, hosts: Mapping[int, str]) -> str:
    """Write which ranks take part, unless all do."""
    ranks = parse_group(group, len(hosts))
    return f" of ranks {format_ranges(ranks)}" if ranks and len(ranks) < len(hosts) else ""


def _names(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Write `ranks 0-510`, or `2048 ranks (0, 2, 4, …)` for a long list."""
    known = sorted(set(ranks))
    for name in (format_ranks_on_hosts(known, hosts), format_ranks(known)):
        if len(name) <= _MAX_RANKS_CHARS:
            return name
    listed = format_ranges(known)
    return f"{len(known)} ranks ({listed[: listed.rindex(', ', 0, _MAX_RANKS_CHARS)]}, …)"
