"""One pytest report for each phase of a test, from the results of all its ranks.

Reports are dicts of builtin types, as pytest_report_to_serializable makes them, so that pytest-xdist's workers can send
them to the controller.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from jaxrun.frontends.pytest_plugin.phase_outcome import (
    PhaseOutcome,
    decide_outcome,
    format_one_line,
    format_table,
    group_ranks,
)
from jaxrun.frontends.pytest_plugin.rank_results import PhaseState, RunResult
from jaxrun.protocol.pytest_messages import PEER_LOST, PHASES
from jaxrun.text import format_ranks

Report = dict[str, Any]


class ItemInfo(Struct, frozen=True):
    """The known facts about a test before it is run.

    dies:      the ranks that it expects to die
    gang:      what it runs on: "4 processes x 1 device, local"
    rerun:     the command that runs it alone
    """

    nodeid: str
    location: tuple[str, int | None, str]
    keywords: tuple[str, ...]
    dies: frozenset[int] = frozenset()
    gang: str = ""
    rerun: str = ""


def build_reports(item: ItemInfo, run: RunResult) -> list[Report]:
    """The reports of a test that was run: one for each phase."""
    reports: list[Report] = []
    for phase in PHASES:
        outcome = decide_outcome(phase, run.ranks, item.dies, in_step=not run.divergence)
        if phase == "call" and reports[0]["outcome"] != "passed":
            continue  # some ranks may have reached the call, but the test as a whole has not
        if outcome is not None:
            reports.append(_build_report(item, run, outcome, reports[-1]["stop"] if reports else run.span[0]))
        elif phase != "call":
            reports.append(_empty_report(item, phase, run.span[1]))
        # pytest's reports repeat the properties of earlier phases, and JUnit's use the last report's.
        properties = [pair for report in reports for pair in report["user_properties"]]
        reports[-1]["user_properties"] = list(dict.fromkeys(properties))
    return reports


def not_run_reports(item: ItemInfo, text: str) -> list[Report]:
    """The reports of a test that could not be started; `text` says why."""
    now = time.time()
    report = _empty_report(item, "setup", now) | {"outcome": "failed"}
    # pytest's short summary has one line, which is to hold more than a heading.
    _set_longrepr(report, item, [text], " ".join(text.split("\n")[:2]))
    return [report, _empty_report(item, "teardown", now)]


def _build_report(item: ItemInfo, run: RunResult, outcome: PhaseOutcome, began: float) -> Report:
    """The report of one phase, which began at `began` for a rank that was cut off in it."""
    phase = outcome.phase
    of_ranks = {rank: result.reports[phase] for rank, result in run.ranks.items() if phase in result.reports}
    report = copy.deepcopy(of_ranks.get(outcome.lead)) or _empty_report(item, phase, 0.0)
    spans = [(one["start"], one["stop"], one["duration"]) for one in of_ranks.values()]
    if any(result.cut_off_in == phase for result in run.ranks.values()):
        spans.append((began, run.span[1], run.span[1] - began))
    report |= {
        "nodeid": item.nodeid,
        "location": item.location,
        "outcome": outcome.outcome,
        "start": min(start for start, _, _ in spans),
        "stop": max(stop for _, stop, _ in spans),
        "duration": max(duration for _, _, duration in spans),
        "sections": list(_captured_sections(run, outcome)),
        "user_properties": _properties(of_ranks),
    }
    report.pop(PEER_LOST, None)
    if outcome.outcome == "failed":
        report.pop("wasxfail", None)
        _add_failure(report, item, run, outcome)
    elif outcome.outcome == "passed":
        report["longrepr"] = None
    return report


def _empty_report(item: ItemInfo, phase: str, now: float) -> Report:
    """The report of a phase that passed, or in which nothing was done."""
    return {
        "$report_type": "TestReport",
        "nodeid": item.nodeid,
        "location": item.location,
        "keywords": dict.fromkeys(item.keywords, 1),
        "outcome": "passed",
        "longrepr": None,
        "when": phase,
        "user_properties": [],
        "sections": [],
        "duration": 0.0,
        "start": now,
        "stop": now,
    }


# ---- failures


def _add_failure(report: Report, item: ItemInfo, run: RunResult, outcome: PhaseOutcome) -> None:
    """Make the report show the table, and the lead's own traceback."""
    of_lead = group_ranks(outcome, run.ranks)[0]
    shown: list[Any] = [format_table(outcome, run, item.gang, item.rerun)]
    own_failure = outcome.states[outcome.lead] in (PhaseState.FAILED, PhaseState.XPASSED_STRICT)
    if own_failure and report["longrepr"] is not None:
        shown += [f"--- {format_ranks(of_lead)} ---"] if len(run.ranks) > 1 else []
        shown.append(report["longrepr"])
    _set_longrepr(report, item, shown, format_one_line(outcome, run.ranks))


def _set_longrepr(report: Report, item: ItemInfo, shown: Sequence[Any], message: str) -> None:
    """Make the report show these texts and serialized `longrepr`s as one chain of tracebacks, of which the last failed.

    message: for pytest's short summary, in place of the first line of the last one's own message
    """
    chain = [entry for one in shown for entry in _as_chain(one)]
    traceback, crash, description = chain[-1]
    file, line, _ = item.location
    crash = crash or {"path": file, "lineno": (line or 0) + 1, "message": ""}
    _, newline, rest = crash["message"].partition("\n")
    crash = {**crash, "message": message + newline + rest}
    chain[-1] = (traceback, crash, description)
    sections = shown[-1].get("sections", []) if isinstance(shown[-1], dict) else []
    # pytest modifies what it reads, so nothing may be in there twice.
    report["longrepr"] = {
        "reprcrash": dict(crash),
        "reprtraceback": copy.deepcopy(traceback),
        "sections": sections,
        "chain": chain,
    }


def _as_chain(longrepr: Any) -> list[tuple[Any, Any, Any]]:
    """Copies of the (traceback, crash, description) of a serialized `longrepr`, which may be a text."""
    if not isinstance(longrepr, dict):
        entry = {"type": "ReprEntryNative", "data": {"lines": [f"{longrepr}\n"]}}
        return [({"reprentries": [entry], "extraline": None, "style": "native"}, None, None)]
    own = (longrepr["reprtraceback"], longrepr["reprcrash"], None)
    return [(one[0], one[1], one[2]) for one in copy.deepcopy(longrepr.get("chain") or [own])]


# ---- captured output and properties


def _captured_sections(run: RunResult, outcome: PhaseOutcome) -> Iterator[tuple[str, str]]:
    """Captured output, each text once with its ranks; of a failure only the lead's."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank in [outcome.lead] if outcome.outcome == "failed" else run.ranks:
        result = run.ranks[rank]
        for name, text in result.reports.get(outcome.phase, {}).get("sections", ()):
            found.setdefault((name, text), []).append(rank)
        if result.cut_off_in == outcome.phase:
            for stream, text in result.captured.items():
                found.setdefault((f"Captured std{stream} {outcome.phase}", text), []).append(rank)
    for (name, text), ranks in found.items():
        yield (name if len(run.ranks) == 1 else f"{name} ({format_ranks(ranks)})"), text


def _properties(of_ranks: Mapping[int, Report]) -> list[tuple[str, Any]]:
    """Return the values of record_property, once if ranks agree."""
    found: list[tuple[str, Any]] = []
    for report in of_ranks.values():
        found += [tuple(pair) for pair in report["user_properties"] if tuple(pair) not in found]
    return found
