"""Formats a verdict: the last screen of a job, which says what happened, where, and what to do."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxrun.text import format_ranks, format_seconds, plural
from jaxrun.verdict.verdict import Verdict

_WIDTH = 100
_NO_FAULT = {"was stopped", "had finished"}  # what became of victims, in the words of phrasing.py


def format_report(verdict: Verdict, run_dir: Path | None) -> str:
    """The report without a final newline; `run_dir` as it is to be shown, None where there is none."""
    if verdict.outcome == "ok":
        return "\n".join([f"jaxrun: {_done(verdict)}", *verdict.details, *_divergence(verdict)])
    lines = [f"jaxrun: {verdict.headline}"]
    if verdict.intro or verdict.traceback:
        lines = ["", *filter(None, [verdict.intro]), verdict.traceback.rstrip("\n"), "", verdict.headline]
    lines += _divergence(verdict)
    lines += _explanation(verdict)
    lines += verdict.details
    if verdict.victims:
        lines.append(_victims(verdict.victims, verdict.stopping))
    if run_dir is not None:
        log = run_dir / verdict.log if verdict.log else run_dir
        lines.append(f"logs: {log} · again: jaxrun explain {run_dir}")
    return "\n".join([*lines, f"exit {verdict.exit_code}"])


def _divergence(verdict: Verdict) -> Iterator[str]:
    if verdict.divergence:
        if verdict.outcome == "ok":
            yield "but its ranks were not in step, so what they computed together may be wrong:"
        yield verdict.divergence


def _explanation(verdict: Verdict) -> Iterator[str]:
    """What a known error means; the error itself is shown as well."""
    for name, text in (("what this means", verdict.means), ("try", verdict.advice)):
        if text:
            yield textwrap.fill(f"{name}: {text}", _WIDTH, break_long_words=False, break_on_hyphens=False)
    if verdict.link:
        yield f"see: {verdict.link}"


def _victims(fates: Mapping[int, str], stopping: float | None) -> str:
    """What became of the other ranks, in one line."""
    by_fate: dict[str, list[int]] = defaultdict(list)
    for rank, fate in fates.items():
        by_fate[fate].append(rank)
    others = plural(len(fates), "other")
    later = f" {format_seconds(stopping)} later" if stopping is not None else ""
    none = "it had no fault of its own" if len(fates) == 1 else "none of them had a fault of its own"
    if len(by_fate) == 1:
        (fate,) = by_fate
        text = f"{others} {_to_plural(fate, len(fates))}"
        if fate in _NO_FAULT:
            return f"{text}{later if fate == 'was stopped' else ''}; {none}."
    else:
        groups = sorted(by_fate.items(), key=lambda item: (-len(item[1]), item[1]))
        parts = (f"{format_ranks(ranks)} {_to_plural(fate, len(ranks))}" for fate, ranks in groups)
        text = f"{others}: {', '.join(parts)}"
    return f"{text}; all gone{later}." if later else f"{text}."


def _to_plural(fate: str, count: int) -> str:
    """`was stopped` for one rank, `were stopped` for several."""
    if count == 1:
        return fate
    return fate.replace("was ", "were ", 1).replace(" its ", " their ", 1)


def _done(verdict: Verdict) -> str:
    if verdict.startup is None or verdict.run is None:
        return "done"
    total = verdict.startup + verdict.run + (verdict.stopping or 0.0)
    return f"done in {format_seconds(total)} (start-up {format_seconds(verdict.startup)})"
