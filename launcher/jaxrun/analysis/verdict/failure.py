"""Describes the failure of a job: which rank failed, how and when, and what became of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from jaxrun.analysis.diagnosis.consequences import Fate, shows_lost_coordinator
from jaxrun.analysis.diagnosis.job_outcome import InjectedFault, JobOutcome, WorkerOutcome
from jaxrun.analysis.diagnosis.root_cause import Culpability, collateral, culpability, find_culprits, find_first_failure
from jaxrun.analysis.verdict import phrasing
from jaxrun.analysis.verdict.error_lookup import explain_consequence, explain_worker
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.protocol.flight_file import DIVERGENCE_ERROR
from jaxrun.text import agree, format_ranks, has_several_hosts

_SHORT_CHARS = 40  # a longer description of what a rank did needs a comma before "41.3 s into the run"


def describe_job_failure(verdict: Verdict, outcome: JobOutcome, *, started: float, ended: float) -> Verdict:
    """Complete the verdict on a job in which a worker failed; times are seconds since the epoch."""
    workers, hosts, run_at = outcome.workers, verdict.hosts, outcome.run_at
    culprits = find_culprits(workers)
    if not culprits:
        return Verdict("failed", verdict.exit_code, hosts, headline="the job failed, but no rank shows why.")
    first = find_first_failure(workers)
    kind = culpability(first)
    fault = culprits[0].disruptive_fault if kind is not Culpability.OWN else None
    intro, traceback = phrasing.find_evidence([first] if fault else culprits, hosts)
    moment = phrasing.describe_time(first, started, run_at)
    if fault:
        happened = phrasing.describe_injected_fault(fault, run_at, many=len(culprits) > 1)
        headline = f"{phrasing.describe_ranks(culprits, hosts)} {happened}."
    elif kind is Culpability.CONSEQUENCE:
        headline = _describe_unknown_cause(workers, first, hosts, moment)
    else:
        is_short = phrasing.was_running(first, run_at)
        headline = _describe_own_failure(culprits, hosts, moment, is_short=is_short, uses_mpi=outcome.uses_mpi)
    if (fault or kind is Culpability.CONSEQUENCE) and traceback and len(hosts) > 1:
        intro = intro or f"rank {first.rank}'s traceback:"
    culprit_ranks = tuple(worker.rank for worker in culprits)
    verdict = verdict if fault else _explain(verdict, culprits[0])
    return replace(
        verdict,
        outcome=_outcome_name(first),
        culprits=culprit_ranks,
        intro=intro,
        traceback=traceback,
        headline=headline,
        details=phrasing.describe_thread_failures(workers, traceback),
        victims={w.rank: _describe_victim(w, culprits) for w in workers if w.rank not in culprit_ranks},
        run=max(0.0, first.time - run_at) if run_at is not None else None,
        stopping=max(0.0, ended - first.time),
    )


def describe_failed_ending(
    verdict: Verdict, outcome: JobOutcome, failed: Sequence[WorkerOutcome], by: str, *, started: float
) -> Verdict:
    """Complete the verdict on a job that was asked to end, when these workers failed for reasons of their own.

    by:  the signal that asked
    """
    culprits, first = find_culprits(failed), find_first_failure(failed)
    intro, traceback = phrasing.find_evidence(culprits, verdict.hosts)
    did = phrasing.describe_failure(culprits[0], many=len(culprits) > 1, uses_mpi=outcome.uses_mpi)
    while_ = f"while {'it' if len(culprits) == 1 else 'they'} ended after {by}"
    who, moment = (
        phrasing.describe_ranks(culprits, verdict.hosts),
        phrasing.describe_time(first, started, outcome.run_at),
    )
    return replace(
        _explain(verdict, culprits[0]),
        outcome=_outcome_name(first),
        culprits=tuple(worker.rank for worker in culprits),
        intro=intro,
        traceback=traceback,
        headline=f"{who} {did} {while_}, {moment}.",
    )


def find_told_fault(workers: Sequence[WorkerOutcome]) -> InjectedFault | None:
    """Return the injected fault that the headline mentions: it killed the culprit, or broke others' connections."""
    culprits = find_culprits(workers)[:1]
    if not culprits:
        return None
    if culpability(find_first_failure(workers)) is not Culpability.OWN:
        return culprits[0].disruptive_fault
    return culprits[0].deadly_fault if culprits[0].failure is None and not culprits[0].lost_reason else None


def _describe_own_failure(
    culprits: Sequence[WorkerOutcome], hosts: Mapping[int, str], moment: str, *, is_short: bool, uses_mpi: bool
) -> str:
    did = phrasing.describe_failure(culprits[0], many=len(culprits) > 1, uses_mpi=uses_mpi)
    comma = "" if is_short and len(did) < _SHORT_CHARS else ","
    memory = f"; {culprits[0].out_of_memory}" if culprits[0].out_of_memory else ""
    return f"{phrasing.describe_ranks(culprits, hosts)} {did}{comma} {moment}{memory}."


def _describe_unknown_cause(
    workers: Sequence[WorkerOutcome], first: WorkerOutcome, hosts: Mapping[int, str], moment: str
) -> str:
    """Describe a failure of which only consequences are known."""
    broken = [w for w in workers if collateral(w) and culpability(w) is Culpability.CONSEQUENCE]
    number = "every rank" if 1 < len(broken) == len(hosts) else phrasing.describe_ranks(broken or [first], hosts)
    if collateral(first) is Fate.WAITED:
        missing = [worker.rank for worker in workers if worker not in broken and not worker.ended_well]
        whom = format_ranks(missing) if missing else "others"
        had = agree("had", len(missing))
        return f"{number} waited for {whom}, which {had} not come when JAX gave up, {moment}; no connection was broken."
    if shows_lost_coordinator(first.stderr_tail):
        its, it = ("their", "them") if len(broken) > 1 else ("its", "it")
        coordinator = f"{its if number != 'every rank' else 'its'} connection to JAX's coordinator, which is in rank 0"
        return f"{number} lost {coordinator}, {moment}; JAX then ended {it}, and no rank reported a cause of its own."
    it = f"the first was {phrasing.describe_ranks([first], hosts)}: it" if len(broken) > 1 else "it"
    why = collateral(first) or Fate.STOPPED
    return f"{number} saw a broken connection; none reported a cause of its own; {it} {why}, {moment}."


def _describe_victim(worker: WorkerOutcome, culprits: Sequence[WorkerOutcome]) -> str:
    errors = {culprit.failure.error for culprit in culprits if culprit.failure is not None}
    if DIVERGENCE_ERROR in errors and worker.finished:  # not innocent: the others have entered a call that needs it
        return "had finished before"
    return phrasing.describe_victim(worker)


def _explain(verdict: Verdict, worker: WorkerOutcome) -> Verdict:
    """Add what a known error means."""
    if culpability(worker) is Culpability.CONSEQUENCE:
        known = explain_consequence(worker, several_hosts=has_several_hosts(verdict.hosts))
    else:
        known = explain_worker(worker)
    return replace(verdict, means=known.means, advice=known.advice, link=known.link)


def _outcome_name(worker: WorkerOutcome) -> str:
    if worker.failure is not None:
        return "exited" if worker.failure.error == "SystemExit" else "failed"
    if worker.lost_reason:
        return "lost"
    if not worker.status:
        return "early-exit"
    return "killed" if worker.status < 0 else "exited"
