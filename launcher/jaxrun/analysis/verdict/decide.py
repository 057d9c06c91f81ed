"""Makes the verdict on a job from its outcome: what jaxrun reports to people and to programs."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace

from jaxrun.analysis.diagnosis.consequences import Fate
from jaxrun.analysis.diagnosis.job_outcome import EndReason, JobOutcome
from jaxrun.analysis.diagnosis.root_cause import Culpability, culpability, find_culprits
from jaxrun.analysis.diagnosis.snapshot import Snapshot
from jaxrun.analysis.diagnosis.stacks import main_stack
from jaxrun.analysis.lockstep import divergence_text
from jaxrun.analysis.lockstep.compare import find_lags
from jaxrun.analysis.lockstep.divergence import Divergence
from jaxrun.analysis.verdict import phrasing
from jaxrun.analysis.verdict.deadlocks import SAME_STEPS, explain_deadlock
from jaxrun.analysis.verdict.error_lookup import explain_unavailable
from jaxrun.analysis.verdict.exit_code import exit_code
from jaxrun.analysis.verdict.failure import describe_job_failure, find_told_fault
from jaxrun.analysis.verdict.stack_text import find_place, format_snapshot, format_straggler
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.protocol.flight_file import DIVERGENCE_ERROR
from jaxrun.protocol.snapshot_messages import ProcessState
from jaxrun.text import agree, format_ranks, format_ranks_on_hosts, format_seconds, format_signal, plural

_LATENESS_MATTERS = (EndReason.OK, EndReason.TIMEOUT, EndReason.INTERRUPTED, EndReason.PREEMPTED)
_WITHOUT_TERMINAL = "tmux or screen keep a job's terminal; nohup jaxrun … & needs none."
_MAX_PLACES = 2  # named in one sentence


def decide(
    outcome: JobOutcome, hosts: Mapping[int, str], *, started: float, ended: float, timeout: float | None = None
) -> Verdict:
    """Return the verdict on a job that ran from `started` to `ended`, in seconds since the epoch.

    `hosts` has every rank of the job; `timeout` is the limit that the user gave, in seconds.
    """
    decided = outcome.decided_at if outcome.decided_at is not None else ended
    verdict = Verdict(
        outcome=outcome.reason.value,
        exit_code=exit_code(outcome),
        hosts=hosts,
        startup=outcome.run_at - started if outcome.run_at is not None else None,
        run=max(0.0, decided - outcome.run_at) if outcome.run_at is not None else None,
        stopping=max(0.0, ended - decided),
    )
    match outcome.reason:
        case EndReason.OK:
            verdict = replace(verdict, details=tuple(_remarks(outcome)))
        case EndReason.FAILED:
            verdict = describe_job_failure(verdict, outcome, started=started, ended=ended)
        case EndReason.DIVERGED:
            verdict = replace(verdict, headline=_describe_divergence(outcome))
        case EndReason.REFUSED:
            verdict = replace(verdict, headline=f"refused to start the program: {outcome.text}")
        case EndReason.USAGE:
            verdict = replace(verdict, headline=outcome.text)
        case EndReason.UNAVAILABLE:
            known = asdict(explain_unavailable(outcome.text, outcome.traceback))
            verdict = replace(verdict, headline=outcome.text, traceback=outcome.traceback, **known)
        case EndReason.TIMEOUT | EndReason.STALL:
            verdict = _describe_stuck(verdict, outcome, decided, timeout)
        case EndReason.EARLY_EXIT:
            verdict = _describe_early_exit(verdict, outcome, decided)
        case EndReason.INTERRUPTED:
            advice = _WITHOUT_TERMINAL if outcome.signum == signal.SIGHUP and not outcome.text else ""
            verdict = replace(verdict, headline=_describe_interruption(outcome, decided, started), advice=advice)
        case EndReason.GROWN:
            verdict = replace(
                verdict, headline=f"the program ended with status 0, as should_stop had asked: {outcome.text}"
            )
        case EndReason.PREEMPTED:
            verdict = replace(verdict, headline=_describe_preemption(outcome))
    verdict = _add_straggler(_add_divergence(verdict, outcome), outcome)
    told = find_told_fault(outcome.workers) if outcome.reason is EndReason.FAILED else None
    faults = phrasing.describe_injected_faults(outcome.workers, hosts, outcome.run_at, but=told)
    return replace(verdict, details=(*faults, *verdict.details, *_describe_unanswered(outcome, hosts)))


def _add_divergence(verdict: Verdict, outcome: JobOutcome) -> Verdict:
    """Add how the ranks diverged, if they did; this is the cause of errors that only followed from it."""
    culprits = [worker for worker in outcome.workers if worker.rank in verdict.culprits]
    if any(worker.disruptive_fault for worker in culprits):
        return verdict
    broken = all(culpability(w) is Culpability.CONSEQUENCE or w.status == -signal.SIGABRT for w in culprits)
    if not outcome.divergences:
        lags = _describe_lags(outcome, verdict.hosts) if broken else ()
        return replace(verdict, details=(*verdict.details, *lags))
    verdict = replace(verdict, divergence=format_divergences(outcome, verdict.hosts))
    if outcome.divergences[0] in _raised_divergences(outcome):
        return verdict
    if outcome.reason is not EndReason.FAILED or not culprits or not broken:
        return verdict
    headline = f"{divergence_text.format_headline(outcome.divergences[0])}; {verdict.headline}"
    return replace(verdict, outcome="diverged", headline=headline, means="", advice="", link="")


def _describe_divergence(outcome: JobOutcome) -> str:
    return f"{divergence_text.format_headline(outcome.divergences[0])}, so --lockstep fail ended the job"


def format_divergences(outcome: JobOutcome, hosts: Mapping[int, str], but: Collection[Divergence] = ()) -> str:
    """Return the divergences of a job, except `but` and those that the traceback of its culprit describes."""
    but = [*but, *_raised_divergences(outcome)]
    return "\n".join(
        divergence_text.format_divergence(found, hosts) for found in outcome.divergences if found not in but
    )


def _raised_divergences(outcome: JobOutcome) -> tuple[Divergence, ...]:
    """The divergences that the culprit's exception already describes."""
    first = find_culprits(outcome.workers)[:1] if outcome.reason is EndReason.FAILED else []
    is_told = any(worker.failure is not None and worker.failure.error == DIVERGENCE_ERROR for worker in first)
    return outcome.raised_divergences if is_told else ()


def _add_straggler(verdict: Verdict, outcome: JobOutcome) -> Verdict:
    """Add who slowed the others down, unless there is something worse to report."""
    if outcome.straggler is None or outcome.reason not in _LATENESS_MATTERS:
        return verdict
    return replace(verdict, details=(*verdict.details, f"{format_straggler(outcome.straggler, verdict.hosts)}."))


def _describe_lags(outcome: JobOutcome, hosts: Mapping[int, str]) -> Iterator[str]:
    """Yield which calls some ranks had begun and others had not, if no rank has an error of its own."""
    for lag in find_lags(outcome.flights) if outcome.reason is EndReason.FAILED else ():
        yield f"{divergence_text.format_lag(lag, hosts)}."


def _describe_unanswered(outcome: JobOutcome, hosts: Mapping[int, str]) -> Iterator[str]:
    """Yield why killed ranks have not ended. One in state D ends only once the kernel has what it waits for."""
    in_kernel = [rank for rank in outcome.unanswered if outcome.kernel_waits.get(rank) == ProcessState.DISK]
    others = [rank for rank in outcome.unanswered if rank not in in_kernel]
    reasons = {worker.rank: worker.lost_reason for worker in outcome.workers}
    if in_kernel:
        who, is_one = format_ranks_on_hosts(in_kernel, hosts), len(in_kernel) == 1
        process = "its process waits" if is_one else "their processes wait"
        ends = "it ends" if is_one else "they end"
        why = f"{process} in the kernel for a disk, a file server or a driver (state D), and {ends} only after that"
        yield f"{who} did not answer: {reasons[in_kernel[0]]}; {why}."
    if others:
        who = format_ranks_on_hosts(others, hosts)
        yield f"{who} did not answer: {reasons[others[0]]}; an agent is stopped there, or the host hangs."


def _remarks(outcome: JobOutcome) -> Iterator[str]:
    late = [worker.rank for worker in outcome.workers if worker.killed_by_launcher]
    if late:
        yield f"{format_ranks(late)} had finished the program but did not end, and had to be killed."


def _describe_stuck(verdict: Verdict, outcome: JobOutcome, decided: float, timeout: float | None) -> Verdict:
    """Add where the ranks were when the job was stopped, and which ranks had finished."""
    if outcome.reason is EndReason.TIMEOUT:
        limit = f", --timeout {timeout:g} s" if timeout is not None else ""
        headline = f"not finished within the time limit{limit}."
    else:
        headline = "no progress for as long as --stall-timeout allows."
    finished = [worker.rank for worker in outcome.workers if worker.finished]
    where = format_snapshot(_snapshot(outcome, verdict.hosts, decided, finished))
    threads = phrasing.describe_thread_failures(outcome.workers, "")
    return replace(verdict, headline=headline, details=(*filter(None, [where]), *threads))


def _describe_early_exit(verdict: Verdict, outcome: JobOutcome, decided: float) -> Verdict:
    finished = [worker for worker in outcome.workers if worker.rank not in outcome.stacks]
    ranks = tuple(worker.rank for worker in finished)
    since = decided - min((worker.time for worker in finished), default=decided)
    ago = f" {format_seconds(since)} ago" if since > 0.5 else ""
    waiting = f"{format_ranks(outcome.stacks)} {agree('waits', len(outcome.stacks))}"
    snapshot = _snapshot(outcome, verdict.hosts, decided, ranks)
    functions = {main_stack(dump).joint_function for dump in outcome.stacks.values()}
    function = functions.pop() if len(functions) == 1 else ""
    waiting = f"{waiting} in {function or 'JAX'} for ranks that will never come"
    is_advised = any(cause.advises_same_steps for cause in explain_deadlock(snapshot))
    return replace(
        verdict,
        culprits=ranks,
        victims=dict.fromkeys(outcome.stacks, Fate.STOPPED),
        headline=f"{format_ranks(ranks)} finished (status 0){ago}; {waiting}:",
        details=(
            format_snapshot(snapshot),
            *([] if is_advised else [f"{SAME_STEPS}."]),
            *phrasing.describe_thread_failures(outcome.workers, ""),
        ),
    )


def _snapshot(outcome: JobOutcome, hosts: Mapping[int, str], decided: float, finished: Iterable[int]) -> Snapshot:
    """Return where the ranks were when the head decided to stop the job."""
    return Snapshot(
        decided,
        hosts,
        dumps=outcome.stacks,
        waits=outcome.kernel_waits,
        flights=outcome.flights,
        platform=outcome.platform,
        helpers=outcome.helpers,
        finished=tuple(sorted(finished)),
        nccl=outcome.nccl,
    )


def _describe_interruption(outcome: JobOutcome, decided: float, started: float) -> str:
    by = "Ctrl-C (SIGINT)" if outcome.signum == signal.SIGINT else format_signal(outcome.signum)
    by = outcome.text or (f"{by}, which comes when the terminal closes," if outcome.signum == signal.SIGHUP else by)
    moment = f"{format_seconds(decided - started)} after the start, before the program's first line"
    if outcome.run_at is not None:
        moment = f"{format_seconds(decided - outcome.run_at)} into the run"
    return f"interrupted by {by} {moment}; {_describe_fates(outcome)}."


def _describe_preemption(outcome: JobOutcome) -> str:
    by = format_signal(outcome.signum)
    resumed = f"from step {outcome.saved_step}" if outcome.saved_step is not None else "from its last checkpoint"
    if not all(worker.ended_well for worker in outcome.workers):
        return f"preempted by {by}; {_describe_fates(outcome)}; the job may be resumed {resumed}."
    if outcome.text:
        told = f"as should_stop had asked ({outcome.text})"
        return f"preempted: the program ended with status 0 {told}; the job may be resumed {resumed}."
    return f"preempted: the program ended with status 0 after {by}; the job may be resumed."


def _describe_fates(outcome: JobOutcome) -> str:
    """Write `all ranks ended by themselves`, `rank 2 did not end in time (in JAX: …), and was killed; the others …`."""
    killed = [worker.rank for worker in outcome.workers if worker.killed_by_launcher]
    if not killed:
        return "all ranks ended by themselves"
    was = agree("was", len(killed))
    if outcome.unheard:
        return f"no rank listens to SIGTERM, so {plural(len(killed), 'rank')} {was} killed at once"
    who = plural(len(killed), "rank") if len(killed) == len(outcome.workers) else format_ranks(killed)
    late = [rank for rank in killed if rank in outcome.stacks]
    fate = f"{who} {was} killed"
    if late == killed:
        places = dict.fromkeys(find_place(main_stack(outcome.stacks[rank])) for rank in late)
        where = ", or at ".join(place.format(", ") for place in places)
        stuck = f"stuck at {where}" if len(places) <= _MAX_PLACES else "stuck at several places"
        fate = f"{who} did not end in time ({stuck}), and {was} killed"
    return fate if len(killed) == len(outcome.workers) else f"{fate}, the others ended by themselves"
