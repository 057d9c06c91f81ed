"""The verdict on a job: from how it and its workers ended to the value that people and machines are told."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxrun.contract.flight import OUT_OF_STEP
from jaxrun.errors import EXIT_NOT_UNIFORM, EXIT_PREEMPTED, EXIT_SIGNAL_BASE, EXIT_TIMEOUT, EXIT_UNAVAILABLE
from jaxrun.head.events import Ending
from jaxrun.lockstep import report as lockstep
from jaxrun.lockstep.compare import lags
from jaxrun.lockstep.flight import Flight
from jaxrun.lockstep.progress import price
from jaxrun.ranks import spell
from jaxrun.verdict import explanations, faults, sentences
from jaxrun.verdict.blame import Kind, blamed, foremost, kind
from jaxrun.verdict.blame import certain as certain
from jaxrun.verdict.ends import End
from jaxrun.verdict.look import Look
from jaxrun.verdict.outcome import Verdict
from jaxrun.verdict.outcome import to_json as to_json
from jaxrun.wording import plural, seconds, several_hosts, signal_name

_EXIT_UNKNOWN = 1
_STRICT = '"agreed"'  # in the text of a flight
_SAME_STEPS = "every rank must take part in the same steps"


def culprits(ends: Sequence[End]) -> tuple[int, ...]:
    """The ranks to blame, lowest first; empty if none has failed."""
    return tuple(end.rank for end in blamed(ends))


@dataclass(frozen=True, slots=True)
class _Case:
    """What `decide` was given; `decided` is when the job's end was sealed."""

    ending: Ending
    hosts: Mapping[int, str]
    started: float
    decided: float
    timeout: float | None


def decide(
    ending: Ending, hosts: Mapping[int, str], *, started: float, ended: float, timeout: float | None = None
) -> Verdict:
    """The verdict on a job that ran from `started` to `ended`, in seconds since the epoch.

    `hosts` holds every rank of the job; `timeout` is the limit that the user gave, in seconds.
    """
    if ending.reason == "failed":
        weighed = weigh(ending.ends, hosts, started=started, run_at=ending.run_at, ended=ended)
        return _with_orders(_with_divergence(weighed, ending), ending)
    decided = ending.decided_at if ending.decided_at is not None else ended
    about = _ABOUT[ending.reason](_Case(ending, hosts, started, decided, timeout))
    told = Verdict(
        outcome=ending.reason,
        hosts=hosts,
        startup=ending.run_at - started if ending.run_at is not None else None,
        run=max(0.0, decided - ending.run_at) if ending.run_at is not None else None,
        stopping=max(0.0, ended - decided),
        **about,
    )
    return _with_orders(_with_divergence(told, ending), ending)


def _with_orders(told: Verdict, ending: Ending) -> Verdict:
    """The same with the faults that were ordered."""
    orders = faults.told(ending.ends, told.hosts, ending.run_at, but=told.headline)
    return replace(told, details=(*orders, *told.details))


def _with_divergence(told: Verdict, ending: Ending) -> Verdict:
    """The same where the ranks were out of step: of what only broke because of that, it is the cause."""
    guilty = [end for end in ending.ends if end.rank in told.culprits]
    if any(map(faults.harm, guilty)):
        return told
    broken = all(kind(end) is Kind.CONSEQUENCE or end.status == -signal.SIGABRT for end in guilty)
    if ending.divergence is None:
        return replace(told, details=(*told.details, *_uneven(ending, told.hosts))) if broken else told
    text = lockstep.text(ending.divergence, told.hosts)
    if text in told.traceback:
        return told
    told = replace(told, divergence=text)
    if ending.reason != "failed" or not guilty or not broken:
        return told
    cause = lockstep.one_line(ending.divergence)
    return replace(told, outcome="diverged", headline=f"{cause}; {told.headline}", means="", advice="", link="")


def _uneven(ending: Ending, hosts: Mapping[int, str]) -> Iterator[str]:
    """Where nobody's own fault is known: which calls some had begun, and others had not."""
    flights = {rank: Flight.from_json(text) for rank, text in ending.flights.items()}
    for lag in lags(flights) if ending.reason == "failed" else ():
        yield f"{lockstep.lagging(lag, hosts)}."


def weigh(
    ends: Sequence[End], hosts: Mapping[int, str], *, started: float, run_at: float | None, ended: float
) -> Verdict:
    """The verdict on a job in which a worker has failed; `hosts` holds every rank of it.

    Times are in seconds since the epoch; `run_at`: when the program was let run, None if it never was.
    """
    guilty = blamed(ends)
    if not guilty:
        return Verdict("failed", _EXIT_UNKNOWN, hosts, headline="the job failed, but no rank shows how.")
    first = foremost(ends)
    harm = faults.harm(guilty[0]) if kind(first) is not Kind.OWN else None
    blamed_ranks = {end.rank for end in guilty}
    intro, traceback = sentences.evidence([first] if harm else guilty, hosts)
    moment = sentences.when(first, started, run_at)
    if harm:
        headline = f"{sentences.who(guilty, hosts)} {faults.was(harm, run_at, many=len(guilty) > 1)}."
    elif kind(first) is Kind.CONSEQUENCE:
        headline = _no_cause(ends, first, hosts, moment)
    else:
        headline = _own_fault(guilty, hosts, moment)
    if (harm or kind(first) is Kind.CONSEQUENCE) and traceback and len(hosts) > 1:
        intro = intro or f"rank {first.rank}'s traceback:"
    return Verdict(
        outcome=_outcome(first),
        exit_code=_exit_code(first),
        hosts=hosts,
        culprits=tuple(end.rank for end in guilty),
        intro=intro,
        traceback=traceback,
        headline=headline,
        details=sentences.thread_notes(ends, traceback),
        victims={
            end.rank: _too_early(end, guilty) or sentences.fate(end) for end in ends if end.rank not in blamed_ranks
        },
        startup=run_at - started if run_at is not None else None,
        run=max(0.0, first.time - run_at) if run_at is not None else None,
        stopping=max(0.0, ended - first.time),
        **({} if harm else _explained(guilty[0], hosts)),
    )


def _own_fault(guilty: Sequence[End], hosts: Mapping[int, str], moment: str) -> str:
    """The headline where ranks have failed of themselves."""
    deed = sentences.did(guilty[0], many=len(guilty) > 1)
    comma = "" if moment.endswith("into the run") and len(deed) < 40 else ","
    memory = f"; {guilty[0].out_of_memory}" if guilty[0].out_of_memory else ""
    return f"{sentences.who(guilty, hosts)} {deed}{comma} {moment}{memory}."


def _too_early(end: End, guilty: Sequence[End]) -> str:
    """Who had finished while the others went on to a call that needs it is not free of fault."""
    errors = {other.words.error for other in guilty if other.words is not None}
    return "had finished before" if OUT_OF_STEP in errors and end.done else ""


def _explained(end: End, hosts: Mapping[int, str]) -> dict[str, str]:
    """What its text means. Of a mere consequence, only what speaks of the network between hosts is believed."""
    if kind(end) is not Kind.CONSEQUENCE:
        return asdict(explanations.of_end(end))
    return asdict(explanations.of_end(end, roots_only=True)) if several_hosts(hosts) else {}


def _outcome(end: End) -> str:
    if end.words is not None:
        return "exited" if end.words.error == "SystemExit" else "failed"
    if end.lost:
        return "lost"
    if not end.status:
        return "early-exit"
    return "killed" if end.status < 0 else "exited"


def _exit_code(end: End) -> int:
    if end.words is None and end.lost:
        return EXIT_UNAVAILABLE
    if end.words is not None and end.words.stage != "program":
        return EXIT_UNAVAILABLE
    status = end.words.status if end.words is not None else end.status
    if not status:
        return _EXIT_UNKNOWN
    return status if status > 0 else EXIT_SIGNAL_BASE - status


def _no_cause(ends: Sequence[End], first: End, hosts: Mapping[int, str], moment: str) -> str:
    """The headline where all that is known are consequences."""
    broken = [end for end in ends if sentences.collateral_fate(end) and kind(end) is Kind.CONSEQUENCE]
    number = "every rank" if 1 < len(broken) == len(hosts) else sentences.who(broken or [first], hosts)
    it = f"the first was {sentences.who([first], hosts)}: it" if len(broken) > 1 else "it"
    why = sentences.collateral_fate(first) or "was stopped"
    return f"{number} saw a broken connection; none reported a cause of its own; {it} {why}, {moment}."


def _ok(case: _Case) -> dict[str, Any]:
    late = [end.rank for end in case.ending.ends if end.stopped]
    note = f"{spell(late)} had finished the program but did not end, and had to be killed."
    strict = {rank: Flight.from_json(text) for rank, text in case.ending.flights.items() if _STRICT in text}
    return {"exit_code": 0, "details": tuple(filter(None, (note if late else "", price(strict))))}


def _refused(case: _Case) -> dict[str, Any]:
    return {"exit_code": EXIT_NOT_UNIFORM, "headline": f"refused to start the program: {case.ending.text}"}


def _unavailable(case: _Case) -> dict[str, Any]:
    text, traceback = case.ending.text, case.ending.traceback
    known = asdict(explanations.of_unavailable(text, traceback))
    return {"exit_code": EXIT_UNAVAILABLE, "headline": text, "traceback": traceback, **known}


def _timeout(case: _Case) -> dict[str, Any]:
    limit = f", --timeout {case.timeout:g} s" if case.timeout is not None else ""
    return _stuck(case, f"not finished within the time limit{limit}.")


def _stall(case: _Case) -> dict[str, Any]:
    return _stuck(
        case, "no progress: no rank has written, called or computed anything for as long as --stall-timeout allows."
    )


def _stuck(case: _Case, headline: str) -> dict[str, Any]:
    """Stopped while ranks were still at work: where they were, and who had finished."""
    where = _look(case, [end.rank for end in case.ending.ends if end.done]).in_words()
    return {
        "exit_code": EXIT_TIMEOUT,
        "headline": headline,
        "details": tuple(filter(None, [where])) + sentences.thread_notes(case.ending.ends, ""),
    }


def _look(case: _Case, finished: Iterable[int]) -> Look:
    """The one at which it was decided to stop the job."""
    ending = case.ending
    return Look(case.decided, case.hosts, ending.dumps, ending.waits, ending.flights, tuple(sorted(finished)))


def _early_exit(case: _Case) -> dict[str, Any]:
    finished = [end for end in case.ending.ends if end.rank not in case.ending.dumps]
    since = case.decided - min((end.time for end in finished), default=case.decided)
    ago = f" {seconds(since)} ago" if since > 0.5 else ""
    waiting = f"{spell(case.ending.dumps)} {'waits' if len(case.ending.dumps) == 1 else 'wait'}"
    names = spell(end.rank for end in finished)
    where = _look(case, [end.rank for end in finished]).in_words()
    return {
        "exit_code": EXIT_TIMEOUT,
        "culprits": tuple(end.rank for end in finished),
        "victims": {rank: "was stopped" for rank in case.ending.dumps},
        "headline": f"{names} finished (status 0){ago}; {waiting} in JAX for what will not come any more:",
        "details": (
            where,
            *([] if _SAME_STEPS in where.replace("\n", " ") else [f"{_SAME_STEPS}."]),
            *sentences.thread_notes(case.ending.ends, ""),
        ),
    }


def _preempted(case: _Case) -> dict[str, Any]:
    name = signal_name(case.ending.signum)
    text = f"preempted: the program ended with status 0 after {name}; the job may be resumed."
    return {"exit_code": EXIT_PREEMPTED, "headline": text}


def _interrupted(case: _Case) -> dict[str, Any]:
    by = "Ctrl-C (SIGINT)" if case.ending.signum == signal.SIGINT else signal_name(case.ending.signum)
    by = case.ending.text or by
    moment = f"{seconds(case.decided - case.started)} after the start, before the program's first line"
    if case.ending.run_at is not None:
        moment = f"{seconds(case.decided - case.ending.run_at)} into the run"
    killed = [end.rank for end in case.ending.ends if end.stopped]
    fate = f"{plural(len(killed), 'rank')} {'was' if len(killed) == 1 else 'were'} killed"
    if not killed:
        fate = "all ranks ended by themselves"
    elif len(killed) < len(case.ending.ends):
        fate = f"{fate} ({spell(killed)}), the others ended by themselves"
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
