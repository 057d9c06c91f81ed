"""The tables and the figure of `bench lockstep`; the summaries are those of _price.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _price import EACH_CALL, GOALS, ONCE, Summary
from _report import table

from jaxrun.protocol.flight_file import LOCKSTEP_OFF, LOCKSTEP_RECORD, LOCKSTEP_STRICT

TITLES = {
    "local": "local jit, 8x8",
    "global": "global jit, no collective",
    "psum": "psum",
    "state": "step of 100 arrays",
    "first": "first call, 100 arguments",
    "start": "start-up",
}
_NUMBERS = ("ranks", "mode", "least", "median", "+ least", "+ median", "ratio", "adds", "min..max", "noise")

_RATIOS = (0.5, 1, 2, 5, 10, 100, 1000)


def render(summaries: Sequence[Summary]) -> str:
    """Two tables: what each call takes, in microseconds, and what is paid once, in milliseconds."""
    each = [_cells(one) + _goal(one) for one in summaries if one.kind in EACH_CALL]
    once = [_cells(one) for one in summaries if one.kind in ONCE]
    tables = [
        table(("each call, us", *_NUMBERS, "goal", "reached"), each, left=1),
        table(("once, ms", *_NUMBERS), once, left=1),
    ]
    return "\n\n".join(tables)


def _cells(one: Summary) -> tuple[str, ...]:
    start = (TITLES[one.kind], str(one.size), one.mode, number(one.kind, one.least), number(one.kind, one.median))
    if one.more_least is None or one.more_median is None or one.adds is None:
        return (*start, *[""] * 6)
    more = [number(one.kind, seconds, "+") for seconds in (one.more_least, one.more_median)]
    adds, least, most = (number(one.kind, seconds, "+") for seconds in (one.adds.median, one.adds.least, one.adds.most))
    noise = "-" if one.noise is None else number(one.kind, one.noise)
    return (*start, *more, f"{one.ratio:.2f}", adds, f"{least}..{most}", noise)


def _goal(one: Summary) -> tuple[str, str]:
    if one.goal is None:
        return "", ""
    return f"<= {number(one.kind, one.goal)}" if one.goal else "<= noise", one.reached


def number(kind: str, seconds: float, sign: str = "") -> str:
    """In the unit of this kind of call, with three digits or so."""
    value = seconds * (1e3 if kind in ONCE else 1e6)
    return f"{value:{sign}.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def draw(summaries: Sequence[Summary], pyplot: Any) -> Any:
    """What record adds to a call, with the noise as a grey band; and the ratio of both modes to off."""
    figure, (added, ratios) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    _draw_added(added, [one for one in summaries if one.mode == LOCKSTEP_RECORD and one.kind in EACH_CALL and one.adds])
    priced = [one for one in summaries if one.ratio is not None]
    labels = list(dict.fromkeys(map(_label, priced)))
    for offset, mode in ((-0.15, LOCKSTEP_RECORD), (0.15, LOCKSTEP_STRICT)):
        points = [one for one in priced if one.mode == mode]
        places = [labels.index(_label(one)) + offset for one in points]
        ratios.plot(places, [one.ratio for one in points], "o", label=mode if points else None)
    ratios.axhline(1, color="black", linewidth=1, label=LOCKSTEP_OFF)
    ratios.set(title="time against off, medians", yscale="log")
    ratios.set_yticks(_RATIOS, [f"{ratio:g}" for ratio in _RATIOS])
    ratios.yaxis.set_minor_formatter("")
    ratios.set_xticks(range(len(labels)), labels, rotation=45, ha="right", fontsize="small")
    for axes in (added, ratios):
        axes.grid(alpha=0.3, axis="y")
        axes.legend(fontsize="small")
    return figure


def _draw_added(axes: Any, record: Sequence[Summary]) -> None:
    places = range(len(record))
    adds = [
        [1e6 * seconds for seconds in (one.adds.median, one.adds.least, one.adds.most)] for one in record if one.adds
    ]
    spread = [[median - least for median, least, _ in adds], [most - median for median, _, most in adds]]
    noises = [1e6 * (one.noise or 0.0) for one in record]
    axes.bar(places, [2 * one for one in noises], bottom=[-one for one in noises], color="lightgrey", label="noise")
    axes.errorbar(places, [median for median, _, _ in adds], spread, label="adds, of all rounds", fmt="o", capsize=3)
    axes.axhline(0, color="black", linewidth=1)
    axes.axhline(1e6 * max(GOALS.values()), color="black", linestyle="--", linewidth=1, label="goal, cross-process")
    axes.set_yscale("symlog", linthresh=10, linscale=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(title="what record adds to a call", ylabel="microseconds")
    axes.set_xticks(places, map(_label, record), rotation=45, ha="right", fontsize="small")


def _label(one: Summary) -> str:
    return f"{TITLES[one.kind]}, {one.size} ranks"
