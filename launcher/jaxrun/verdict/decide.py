"""The verdict on a job: from how it and its workers ended to the value that people and machines are told."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxrun.diagnosis.root_cause import Culpability, culpability, find_culprits, find_first_failure
from jaxrun.diagnosis.root_cause import is_certain as is_certain
from jaxrun.diagnosis.worker_outcome import WorkerOutcome
from jaxrun.errors import EXIT_NOT_UNIFORM, EXIT_PREEMPTED, EXIT_SIGNAL_BASE, EXIT_TIMEOUT, EXIT_UNAVAILABLE
from jaxrun.head.actions import JobOutcome
from jaxrun.lockstep import report as lockstep
from jaxrun.lockstep.compare import find_lags
from jaxrun.lockstep.progress import format_strict_cost
from jaxrun.protocol.flight_file import DIVERGENCE_ERROR
from jaxrun.text import format_ranks, format_seconds, format_signal, has_several_hosts, plural
from jaxrun.verdict import injected_faults, phrasing
from jaxrun.verdict.known_errors import lookup
from jaxrun.verdict.outcome import Verdict
from jaxrun.verdict.outcome import to_json as to_json
from jaxrun.verdict.snapshot import Snapshot

_EXIT_UNKNOWN = 1
_SAME_STEPS = "every rank must take part in the same steps"


def culprit_ranks(ends: Sequence[WorkerOutcome]) -> tuple[int, ...]:
    """The ranks to blame, lowest first; empty if none has failed."""
    return tuple(end.rank for end in find_culprits(ends))


@dataclass(frozen=True, slots=True)
class _Context:
    """What `decide` was given; `decided` is when the job's end was sealed."""

    ending: JobOutcome
    hosts: Mapping[int, str]
    started: float
    decided: float
    timeout: float | None


def decide(
    ending: JobOutcome, hosts: Mapping[int, str], *, started: float, ended: float, timeout: float | None = None
) -> Verdict:
    """The verdict on a job that ran from `started` to `ended`, in seconds since the epoch.

    `hosts` holds every rank of the job; `timeout` is the limit that the user gave, in seconds.
    """
    if ending.reason == "failed":
        weighed = judge_failure(ending.workers, hosts, started=started, run_at=ending.run_at, ended=ended)
        return _with_orders(_with_divergence(weighed, ending), ending)
    decided = ending.decided_at if ending.decided_at is not None else ended
    about = _ABOUT[ending.reason](_Context(ending, hosts, started, decided, timeout))
    told = Verdict(
        outcome=ending.reason,
        hosts=hosts,
        startup=ending.run_at - started if ending.run_at is not None else None,
        run=max(0.0, decided - ending.run_at) if ending.run_at is not None else None,
        stopping=max(0.0, ended - decided),
        **about,
    )
    return _with_orders(_with_divergence(told, ending), ending)


def _with_orders(told: Verdict, ending: JobOutcome) -> Verdict:
    """The same with the faults that were ordered."""
    orders = injected_faults.describe_injected_faults(ending.workers, told.hosts, ending.run_at, but=told.headline)
    return replace(told, details=(*orders, *told.details))


def _with_divergence(told: Verdict, ending: JobOutcome) -> Verdict:
    """The same where the ranks were out of step: of what only broke because of that, it is the cause."""
    guilty = [end for end in ending.workers if end.rank in told.culprits]
    if any(map(injected_faults.harmful_fault, guilty)):
        return told
    broken = all(culpability(end) is Culpability.CONSEQUENCE or end.status == -signal.SIGABRT for end in guilty)
    if ending.divergence is None:
        return replace(told, details=(*told.details, *_uneven(ending, told.hosts))) if broken else told
    text = lockstep.format_divergence(ending.divergence, told.hosts)
    if text in told.traceback:
        return told
    told = replace(told, divergence=text)
    if ending.reason != "failed" or not guilty or not broken:
        return told
    cause = lockstep.format_headline(ending.divergence)
    return replace(told, outcome="diverged", headline=f"{cause}; {told.headline}", means="", advice="", link="")


def _uneven(ending: JobOutcome, hosts: Mapping[int, str]) -> Iterator[str]:
    """Where nobody's own fault is known: which calls some had begun, and others had not."""
    for lag in find_lags(ending.flights) if ending.reason == "failed" else ():
        yield f"{lockstep.format_lag(lag, hosts)}."


def judge_failure(
    ends: Sequence[WorkerOutcome], hosts: Mapping[int, str], *, started: float, run_at: float | None, ended: float
) -> Verdict:
    """The verdict on a job in which a worker has failed; `hosts` holds every rank of it.

    Times are in seconds since the epoch; `run_at`: when the program was let run, None if it never was.
    """
    guilty = find_culprits(ends)
    if not guilty:
        return Verdict("failed", _EXIT_UNKNOWN, hosts, headline="the job failed, but no rank shows how.")
    first = find_first_failure(ends)
    harm = injected_faults.harmful_fault(guilty[0]) if culpability(first) is not Culpability.OWN else None
    blamed_ranks = {end.rank for end in guilty}
    intro, traceback = phrasing.find_evidence([first] if harm else guilty, hosts)
    moment = phrasing.describe_time(first, started, run_at)
    if harm:
        what = injected_faults.describe_with_time(harm, run_at, many=len(guilty) > 1)
        headline = f"{phrasing.describe_ranks(guilty, hosts)} {what}."
    elif culpability(first) is Culpability.CONSEQUENCE:
        headline = _no_cause(ends, first, hosts, moment)
    else:
        headline = _own_fault(guilty, hosts, moment)
    if (harm or culpability(first) is Culpability.CONSEQUENCE) and traceback and len(hosts) > 1:
        intro = intro or f"rank {first.rank}'s traceback:"
    return Verdict(
        outcome=_outcome(first),
        exit_code=_exit_code(first),
        hosts=hosts,
        culprits=tuple(end.rank for end in guilty),
        intro=intro,
        traceback=traceback,
        headline=headline,
        details=phrasing.describe_thread_failures(ends, traceback),
        victims={
            end.rank: _too_early(end, guilty) or phrasing.describe_victim(end)
            for end in ends
            if end.rank not in blamed_ranks
        },
        startup=run_at - started if run_at is not None else None,
        run=max(0.0, first.time - run_at) if run_at is not None else None,
        stopping=max(0.0, ended - first.time),
        **({} if harm else _explained(guilty[0], hosts)),
    )


def _own_fault(guilty: Sequence[WorkerOutcome], hosts: Mapping[int, str], moment: str) -> str:
    """The headline where ranks have failed of themselves."""
    deed = phrasing.describe_failure(guilty[0], many=len(guilty) > 1)
    comma = "" if moment.endswith("into the run") and len(deed) < 40 else ","
    memory = f"; {guilty[0].out_of_memory}" if guilty[0].out_of_memory else ""
    return f"{phrasing.describe_ranks(guilty, hosts)} {deed}{comma} {moment}{memory}."


def _too_early(end: WorkerOutcome, guilty: Sequence[WorkerOutcome]) -> str:
    """Who had finished while the others went on to a call that needs it is not free of fault."""
    errors = {other.failure.error for other in guilty if other.failure is not None}
    return "had finished before" if DIVERGENCE_ERROR in errors and end.finished else ""


def _explained(end: WorkerOutcome, hosts: Mapping[int, str]) -> dict[str, str]:
    """What its text means. Of a mere consequence, only what speaks of the network between hosts is believed."""
    if culpability(end) is not Culpability.CONSEQUENCE:
        return asdict(lookup.explain_worker(end))
    return asdict(lookup.explain_worker(end, roots_only=True)) if has_several_hosts(hosts) else {}


def _outcome(end: WorkerOutcome) -> str:
    if end.failure is not None:
        return "exited" if end.failure.error == "SystemExit" else "failed"
    if end.lost_reason:
        return "lost"
    if not end.status:
        return "early-exit"
    return "killed" if end.status < 0 else "exited"


def _exit_code(end: WorkerOutcome) -> int:
    if end.failure is None and end.lost_reason:
        return EXIT_UNAVAILABLE
    if end.failure is not None and end.failure.stage != "program":
        return EXIT_UNAVAILABLE
    status = end.failure.status if end.failure is not None else end.status
    if not status:
        return _EXIT_UNKNOWN
    return status if status > 0 else EXIT_SIGNAL_BASE - status


def _no_cause(ends: Sequence[WorkerOutcome], first: WorkerOutcome, hosts: Mapping[int, str], moment: str) -> str:
    """The headline where all that is known are consequences."""
    broken = [end for end in ends if phrasing.describe_collateral(end) and culpability(end) is Culpability.CONSEQUENCE]
    number = "every rank" if 1 < len(broken) == len(hosts) else phrasing.describe_ranks(broken or [first], hosts)
    it = f"the first was {phrasing.describe_ranks([first], hosts)}: it" if len(broken) > 1 else "it"
    why = phrasing.describe_collateral(first) or "was stopped"
    return f"{number} saw a broken connection; none reported a cause of its own; {it} {why}, {moment}."


def _ok(case: _Context) -> dict[str, Any]:
    late = [end.rank for end in case.ending.workers if end.killed_by_launcher]
    note = f"{format_ranks(late)} had finished the program but did not end, and had to be killed."
    strict = {rank: flight for rank, flight in case.ending.flights.items() if flight.agreement_cost[0]}
    return {"exit_code": 0, "details": tuple(filter(None, (note if late else "", format_strict_cost(strict))))}


def _refused(case: _Context) -> dict[str, Any]:
    return {"exit_code": EXIT_NOT_UNIFORM, "headline": f"refused to start the program: {case.ending.text}"}


def _unavailable(case: _Context) -> dict[str, Any]:
    text, traceback = case.ending.text, case.ending.traceback
    known = asdict(lookup.explain_unavailable(text, traceback))
    return {"exit_code": EXIT_UNAVAILABLE, "headline": text, "traceback": traceback, **known}


def _timeout(case: _Context) -> dict[str, Any]:
    limit = f", --timeout {case.timeout:g} s" if case.timeout is not None else ""
    return _stuck(case, f"not finished within the time limit{limit}.")


def _stall(case: _Context) -> dict[str, Any]:
    return _stuck(
        case, "no progress: no rank has written, called or computed anything for as long as --stall-timeout allows."
    )


def _stuck(case: _Context, headline: str) -> dict[str, Any]:
    """Stopped while ranks were still at work: where they were, and who had finished."""
    where = _look(case, [end.rank for end in case.ending.workers if end.finished]).format()
    return {
        "exit_code": EXIT_TIMEOUT,
        "headline": headline,
        "details": tuple(filter(None, [where])) + phrasing.describe_thread_failures(case.ending.workers, ""),
    }


def _look(case: _Context, finished: Iterable[int]) -> Snapshot:
    """The one at which it was decided to stop the job."""
    ending = case.ending
    return Snapshot(
        case.decided, case.hosts, ending.stacks, ending.kernel_waits, ending.flights, tuple(sorted(finished))
    )


def _early_exit(case: _Context) -> dict[str, Any]:
    finished = [end for end in case.ending.workers if end.rank not in case.ending.stacks]
    since = case.decided - min((end.time for end in finished), default=case.decided)
    ago = f" {format_seconds(since)} ago" if since > 0.5 else ""
    waiting = f"{format_ranks(case.ending.stacks)} {'waits' if len(case.ending.stacks) == 1 else 'wait'}"
    names = format_ranks(end.rank for end in finished)
    where = _look(case, [end.rank for end in finished]).format()
    return {
        "exit_code": EXIT_TIMEOUT,
        "culprits": tuple(end.rank for end in finished),
        "victims": {rank: "was stopped" for rank in case.ending.stacks},
        "headline": f"{names} finished (status 0){ago}; {waiting} in JAX for what will not come any more:",
        "details": (
            where,
            *([] if _SAME_STEPS in where.replace("\n", " ") else [f"{_SAME_STEPS}."]),
            *phrasing.describe_thread_failures(case.ending.workers, ""),
        ),
    }


def _preempted(case: _Context) -> dict[str, Any]:
    name = format_signal(case.ending.signum)
    text = f"preempted: the program ended with status 0 after {name}; the job may be resumed."
    return {"exit_code": EXIT_PREEMPTED, "headline": text}


def _interrupted(case: _Context) -> dict[str, Any]:
    by = "Ctrl-C (SIGINT)" if case.ending.signum == signal.SIGINT else format_signal(case.ending.signum)
    by = case.ending.text or by
    moment = f"{format_seconds(case.decided - case.started)} after the start, before the program's first line"
    if case.ending.run_at is not None:
        moment = f"{format_seconds(case.decided - case.ending.run_at)} into the run"
    killed = [end.rank for end in case.ending.workers if end.killed_by_launcher]
    fate = f"{plural(len(killed), 'rank')} {'was' if len(killed) == 1 else 'were'} killed"
    if not killed:
        fate = "all ranks ended by themselves"
    elif len(killed) < len(case.ending.workers):
        fate = f"{fate} ({format_ranks(killed)}), the others ended by themselves"
    code = EXIT_SIGNAL_BASE + case.ending.signum
    return {"exit_code": code, "headline": f"interrupted by {by} {moment}; {fate}."}


_ABOUT: Mapping[str, Any] = {
    "ok": _ok,
    "refused": _refused,
    "unavailable": _unavailable,
    "timeout": _timeout,
    "stall": _stall,
    "early-exit": _early_exit,
    "preempted": _preempted,
    "interrupted": _interrupted,
}
