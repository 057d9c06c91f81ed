"""One report of pytest's for a phase of a test, from those of all its ranks.

Reports are handled in the form in which they travel, made of builtin types only (pytest_report_to_serializable), so
that they can go on to the controller of pytest-xdist.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrun.protocol.pytest_messages import PEER_LOST, PHASES
from jaxrun.pytest_plugin.outcome import PhaseOutcome, decide_outcome
from jaxrun.pytest_plugin.rank_results import PhaseState, RankResult
from jaxrun.pytest_plugin.summary import ReportContext, format_one_line, format_table, group_ranks
from jaxrun.text import format_ranks

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ItemInfo:
    """What pytest knows of the test itself; `everything`: failures of all ranks are shown, not the first one's only."""

    nodeid: str
    location: tuple[str, int | None, str]
    keywords: tuple[str, ...]
    show_all: bool = False


def build_reports(
    test: ItemInfo,
    parts: Mapping[int, RankResult],
    dies: frozenset[int],
    scene: ReportContext,
    span: tuple[float, float],
) -> list[Report]:
    """The reports of a test that has been run, one for each phase; it began and ended at `span`, since the epoch."""
    began, ended = span
    found: list[Report] = []
    for phase in PHASES:
        outcome = decide_outcome(phase, parts, dies, in_step=not scene.divergence)
        if phase == "call" and found[0]["outcome"] != "passed":
            continue  # some ranks may have come further, but the test has not
        if outcome is not None:
            found.append(build_report(test, outcome, parts, scene, found[-1]["stop"] if found else began, ended))
        elif phase != "call":
            found.append(passed_report(test, phase, ended))
        # As a test collects them; some reports are made of the last phase only.
        noted = [pair for report in found for pair in report["user_properties"]]
        found[-1]["user_properties"] = list(dict.fromkeys(noted))
    return found


def build_report(
    test: ItemInfo,
    outcome: PhaseOutcome,
    parts: Mapping[int, RankResult],
    scene: ReportContext,
    began: float,
    ended: float,
) -> Report:
    """The report for one phase; a rank that was cut off in it was so from `began` to `ended` (since the epoch)."""
    reports = {rank: part.reports[outcome.phase] for rank, part in parts.items() if outcome.phase in part.reports}
    report = copy.deepcopy(reports.get(outcome.lead)) or _blank(test, outcome.phase)
    spans = [(one["start"], one["stop"], one["duration"]) for one in reports.values()]
    if any(part.cut_off_in == outcome.phase for part in parts.values()):
        spans.append((began, ended, ended - began))
    report |= {
        "nodeid": test.nodeid,
        "location": test.location,
        "outcome": outcome.outcome,
        "start": min(start for start, _, _ in spans),
        "stop": max(stop for _, stop, _ in spans),
        "duration": max(duration for _, _, duration in spans),
        "sections": list(_sections(outcome, parts, reports, test.show_all)),
        "user_properties": _properties(outcome, reports, scene),
    }
    report.pop(PEER_LOST, None)
    if outcome.outcome == "failed":
        report.pop("wasxfail", None)
        _add_failure(report, outcome, parts, scene, test)
    elif outcome.outcome == "passed":
        report["longrepr"] = None
    return report


def passed_report(test: ItemInfo, phase: str, now: float) -> Report:
    """Of a phase that no rank came to, and that pytest waits for."""
    return _blank(test, phase) | {"start": now, "stop": now}


def skipped_report(test: ItemInfo, reason: str, now: float) -> Report:
    """Of a test that is not to be run."""
    file, line, _ = test.location
    return passed_report(test, "setup", now) | {"outcome": "skipped", "longrepr": (file, (line or 0) + 1, reason)}


def failed_report(test: ItemInfo, text: str, now: float) -> Report:
    """Of a test that could not even be begun."""
    report = passed_report(test, "setup", now) | {"outcome": "failed"}
    first, _, rest = text.partition("\n")
    # In the summary, pytest shows one line.
    _set_longrepr(report, [text], f"{first} {rest}".partition("\n")[0] if first.endswith(":") else first, test)
    return report


def _blank(test: ItemInfo, phase: str) -> Report:
    return {
        "$report_type": "TestReport",
        "nodeid": test.nodeid,
        "location": test.location,
        "keywords": dict.fromkeys(test.keywords, 1),
        "outcome": "passed",
        "longrepr": None,
        "when": phase,
        "user_properties": [],
        "sections": [],
        "duration": 0.0,
        "start": 0.0,
        "stop": 0.0,
    }


# ---- what failed


def _add_failure(
    report: Report, outcome: PhaseOutcome, parts: Mapping[int, RankResult], scene: ReportContext, test: ItemInfo
) -> None:
    """Put the table before the lead's traceback, and with `everything` those of other groups behind it."""
    own = report["longrepr"] if outcome.states[outcome.lead] in (PhaseState.FAILED, PhaseState.XPASSED_STRICT) else None
    before = [format_table(outcome, parts, scene)]
    for ranks in group_ranks(outcome, parts)[1:] if test.show_all else []:
        other = parts[ranks[0]].reports.get(outcome.phase, {})
        if other.get("outcome") == "failed":
            before += [f"--- {format_ranks(ranks)} ---", *_entries(other["longrepr"])]
    if own is not None and len(parts) > 1:
        before.append(f"--- {format_ranks(group_ranks(outcome, parts)[0])} ---")
    if isinstance(own, dict) and own.get("chain"):
        own["chain"] = [*_as_chain(before), *own["chain"]]
        crash = own["chain"][-1][1]
        for one in (crash, own.get("reprcrash")):
            if one is not None:
                one["message"] = _prefixed(outcome, parts, one["message"])
        return
    before += _entries(own) if own is not None else []
    _set_longrepr(report, before, format_one_line(outcome, parts), test)


def _set_longrepr(report: Report, texts: list[Any], message: str, test: ItemInfo) -> None:
    """A failure without a traceback."""
    file, line, _ = test.location
    crash = {"path": file, "lineno": (line or 0) + 1, "message": message}
    chain = _as_chain(texts)
    last, _, description = chain[-1]
    chain[-1] = (last, crash, description)
    # Each once: what reads it writes into it.
    report["longrepr"] = {"reprcrash": crash, "reprtraceback": copy.deepcopy(last), "sections": [], "chain": chain}


def _as_chain(texts: list[Any]) -> list[Any]:
    """Texts, and tracebacks as they travel, in the form of a chain of exceptions."""
    return [(text if isinstance(text, dict) else _native(text), None, None) for text in texts]


def _native(text: str) -> dict[str, Any]:
    entry = {"type": "ReprEntryNative", "data": {"lines": [f"{text}\n"]}}
    return {"reprentries": [entry], "extraline": None, "style": "native"}


def _entries(longrepr: Any) -> Iterator[Any]:
    if isinstance(longrepr, dict):
        chain = longrepr.get("chain") or [(longrepr["reprtraceback"], None, None)]
        yield from (copy.deepcopy(traceback) for traceback, _, _ in chain)
    else:
        yield str(longrepr)


def _prefixed(outcome: PhaseOutcome, parts: Mapping[int, RankResult], message: str) -> str:
    _, newline, rest = message.partition("\n")
    return format_one_line(outcome, parts) + newline + rest


# ---- what was printed, and what was noted


def _sections(
    outcome: PhaseOutcome, parts: Mapping[int, RankResult], reports: Mapping[int, Report], everything: bool
) -> Iterator[tuple[str, str]]:
    """What was captured, each text once with its ranks: of a failure the lead's only, unless `everything` is wanted."""
    chosen = [rank for rank in parts if everything or outcome.outcome != "failed" or rank == outcome.lead]
    found: dict[tuple[str, str], list[int]] = {}
    for rank in chosen:
        for name, text in reports.get(rank, {}).get("sections", ()):
            found.setdefault((name, text), []).append(rank)
        if parts[rank].cut_off_in == outcome.phase:
            for stream, text in parts[rank].captured.items():
                found.setdefault((f"Captured std{stream} {outcome.phase}", text), []).append(rank)
    for (name, text), ranks in found.items():
        yield (name if len(parts) == 1 else f"{name} ({format_ranks(ranks)})"), text


def _properties(outcome: PhaseOutcome, reports: Mapping[int, Report], scene: ReportContext) -> list[tuple[str, Any]]:
    """What the test has noted with record_property, once where ranks noted the same; and the gang, and who failed."""
    found: list[tuple[str, Any]] = []
    for report in reports.values():
        found += [tuple(pair) for pair in report["user_properties"] if tuple(pair) not in found]
    found.append(("gang", scene.shape))
    if outcome.outcome == "failed":
        found.append(("rank", outcome.lead))
    return found
