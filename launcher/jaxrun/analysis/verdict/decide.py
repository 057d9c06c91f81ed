"""Makes the verdict on a job from its outcome: what jaxrun reports to people and to programs."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from msgspec.structs import asdict, replace

from jaxrun.analysis.diagnosis.consequences import Fate
from jaxrun.analysis.diagnosis.error_choice import HandledError, find_handled_errors, find_interrupted_error
from jaxrun.analysis.diagnosis.helpers import failed_saves_of
from jaxrun.analysis.diagnosis.job_end import (
    Completed,
    Diverged,
    EarlyExit,
    EndedBySignal,
    Grown,
    OutOfStep,
    Preempted,
    RankFailed,
    Refused,
    Stalled,
    TimedOut,
    Unavailable,
    Unsupported,
    stacks_at,
)
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome, RankReturn, WorkerOutcome
from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.rank_state import WAITING
from jaxrun.analysis.diagnosis.root_cause import Culpability, culpability, find_culprits, find_failed_endings
from jaxrun.analysis.diagnosis.stacks import main_stack
from jaxrun.analysis.diagnosis.wait_graph import wait_graph_of
from jaxrun.analysis.lockstep import divergence_text
from jaxrun.analysis.lockstep.compare import find_lags
from jaxrun.analysis.lockstep.divergence import CallOrder, Divergence
from jaxrun.analysis.lockstep.told_progress import find_told_step, format_step
from jaxrun.analysis.verdict import phrasing
from jaxrun.analysis.verdict.deadlocks import SAME_STEPS, explain_deadlock
from jaxrun.analysis.verdict.error_lookup import explain_unavailable
from jaxrun.analysis.verdict.error_text import describe_meanwhile, format_error, format_frames, format_with_place
from jaxrun.analysis.verdict.exit_code import exit_code
from jaxrun.analysis.verdict.failure import describe_failed_ending, describe_job_failure, find_told_fault
from jaxrun.analysis.verdict.stack_text import describe_stacks, find_place, format_straggler
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.protocol.flight_file import DIVERGENCE_ERROR
from jaxrun.protocol.query_messages import ProcessState
from jaxrun.text import agree, format_ranks, format_ranks_on_hosts, format_seconds, format_signal, plural

_LATENESS_MATTERS = (Completed, OutOfStep, TimedOut, EndedBySignal, Preempted)
_WITHOUT_TERMINAL = "tmux or screen keep a job's terminal; nohup jaxrun … & needs none."
_ORIGINS: Mapping[int, str] = {
    signal.SIGHUP: ", which comes when the terminal closes,",
    signal.SIGALRM: ", from a timer that jaxrun was started with,",
    signal.SIGXCPU: ", at the limit of jaxrun's CPU time (ulimit -t),",
}
_OF_SIGNALS = ("KeyboardInterrupt", "SystemExit")  # the exceptions by which a signal ends a program
_OUT_OF_STEP = "but its ranks were not in step: what they computed together may be wrong."
_IF_MEANT = "--lockstep record, if the ranks differ on purpose; such a job then ends with 0."
_MAX_PLACES = 2  # named in one sentence


def decide(outcome: JobOutcome, *, started: float, ended: float, timeout: float | None = None) -> Verdict:
    """Return the verdict on a job that ran from `started` to `ended`, in seconds since the epoch.

    `timeout` is the limit that the user gave, in seconds.
    """
    decided = outcome.decided_at if outcome.decided_at is not None else ended
    verdict = Verdict(
        outcome=outcome.end.reason,
        exit_code=exit_code(outcome),
        hosts=outcome.hosts,
        startup=outcome.run_at - started if outcome.run_at is not None else None,
        run=max(0.0, decided - outcome.run_at) if outcome.run_at is not None else None,
        stopping=max(0.0, ended - decided),
    )
    verdict = _add_divergence(_describe_end(verdict, outcome, decided, started, ended, timeout), outcome)
    if outcome.straggler is not None and isinstance(outcome.end, _LATENESS_MATTERS):
        slow = f"{format_straggler(outcome.straggler, outcome.hosts)}."
        verdict = replace(verdict, details=(*verdict.details, slow))
    told = find_told_fault(outcome.workers) if isinstance(outcome.end, RankFailed) else None
    others = [worker for worker in outcome.workers if worker.rank not in outcome.lost or not worker.deadly_fault]
    faults = phrasing.describe_injected_faults(others, outcome.hosts, outcome.run_at, but=told)
    lost = _describe_losses(outcome, verdict.culprits)
    step = find_told_step(outcome.flights)
    reached = f"reached {format_step(step)}" if step is not None else ""
    details = (*lost, *faults, *verdict.details, *_describe_unanswered(outcome))
    return replace(verdict, details=details, reached=reached)


def _describe_end(
    verdict: Verdict, outcome: JobOutcome, decided: float, started: float, ended: float, timeout: float | None
) -> Verdict:
    """Add why the job ended, in words."""
    match outcome.end:
        case Completed():
            return replace(verdict, details=tuple(_remarks(outcome)))
        case RankFailed():
            return describe_job_failure(verdict, outcome, started=started, ended=ended)
        case OutOfStep():
            headline = f"ran to its end in {format_seconds(ended - started)}, {_OUT_OF_STEP}"
            details = tuple(_remarks(outcome))
            return replace(verdict, outcome="diverged", headline=headline, advice=_IF_MEANT, details=details)
        case Diverged(text=why):
            headline = divergence_text.format_headline(outcome.divergences[0])
            return replace(verdict, headline=f"{headline}, {why or 'so --lockstep fail ended the job'}")
        case Refused(text=text):
            return replace(verdict, headline=f"refused to start the program: {text}")
        case Unsupported(text=text):
            return replace(verdict, headline=text)
        case Unavailable(text=text, traceback=traceback):
            known = asdict(explain_unavailable(text, traceback))
            return replace(verdict, headline=text, traceback=traceback, **known)
        case TimedOut() | Stalled() as end:
            return _describe_stuck(verdict, end, outcome, timeout)
        case EarlyExit(stacks=stacks):
            return _describe_early_exit(verdict, stacks, outcome, decided)
        case EndedBySignal() as end:
            return _describe_end_by_signal(verdict, end, outcome, decided, started)
        case Grown(asked=why):
            return replace(verdict, headline=f"the program ended with status 0, as should_stop had asked: {why}")
        case Preempted() as end:
            return replace(verdict, headline=_describe_preemption(end, outcome))


def _describe_losses(outcome: JobOutcome, culprits: Collection[int]) -> Iterator[str]:
    """Yield how ranks failed without which the others went on, except the `culprits`, which the headline names."""
    for together in _group_returns(outcome.returns):
        loss = phrasing.describe_loss([back.worker for back in together], outcome.hosts, outcome.run_at)
        where = f" on {together[0].host}" if together[0].host != together[0].worker.host else ""
        seconds = format_seconds(max(back.seconds for back in together))
        yield f"{loss}, and {agree('was', len(together))} back{where} after {seconds}."
    left = [worker for worker in outcome.workers if worker.rank in outcome.lost and worker.rank not in culprits]
    for _, workers in groupby(left, lambda worker: worker.lost_with):
        yield f"{phrasing.describe_loss(list(workers), outcome.hosts, outcome.run_at)}, and did not come back."


def _group_returns(returns: Iterable[RankReturn]) -> Iterator[list[RankReturn]]:
    """Yield the returns of ranks that were lost with one host, and came back on one, together; each rank once."""
    for _, group in groupby(returns, lambda back: (back.worker.lost_with, back.host)):
        rest = list(group)
        while rest:
            together: dict[int, RankReturn] = {}
            for back in rest:
                together.setdefault(back.worker.rank, back)
            rest = [back for back in rest if together[back.worker.rank] is not back]
            yield [back for _, back in sorted(together.items())]


def _add_divergence(verdict: Verdict, outcome: JobOutcome) -> Verdict:
    """Add how the ranks diverged, if they did; this is the cause of errors that only followed from it.

    If they did not, and no rank has an error of its own, add which calls some ranks had begun and others had not.
    """
    culprits = [worker for worker in outcome.workers if worker.rank in verdict.culprits]
    if any(worker.disruptive_fault for worker in culprits):
        return verdict
    broken = all(culpability(w) is Culpability.CONSEQUENCE or w.status == -signal.SIGABRT for w in culprits)
    if not broken:  # an error of the program itself, as FloatingPointError is, is the cause
        searched = [found for found in outcome.divergences if found.order is CallOrder.NAN_SEARCH]
        outcome = replace(outcome, divergences=tuple(found for found in outcome.divergences if found not in searched))
    if not outcome.divergences:
        lags = find_lags(outcome.flights) if broken and isinstance(outcome.end, RankFailed) else ()
        told = (f"{divergence_text.format_lag(lag, outcome.hosts)}." for lag in lags)
        return replace(verdict, details=(*verdict.details, *told))
    verdict = replace(verdict, divergence=format_divergences(outcome))
    if outcome.divergences[0] in _raised_divergences(outcome):
        return verdict
    if not isinstance(outcome.end, RankFailed) or not culprits or not broken:
        return verdict
    headline = f"{divergence_text.format_headline(outcome.divergences[0])}; {verdict.headline}"
    return replace(verdict, outcome="diverged", headline=headline, means="", advice="", link="")


def format_divergences(outcome: JobOutcome, but: Collection[Divergence] = ()) -> str:
    """Return the divergences of a job, except `but` and those that the traceback of its culprit describes."""
    but = [*but, *_raised_divergences(outcome)]
    return "\n".join(
        divergence_text.format_divergence(found, outcome.hosts) for found in outcome.divergences if found not in but
    )


def _raised_divergences(outcome: JobOutcome) -> tuple[Divergence, ...]:
    """The divergences that the culprit's exception already describes."""
    first = find_culprits(outcome.workers)[:1] if isinstance(outcome.end, RankFailed) else []
    is_told = any(worker.failure is not None and worker.failure.error == DIVERGENCE_ERROR for worker in first)
    return outcome.raised_divergences if is_told else ()


def _describe_unanswered(outcome: JobOutcome) -> Iterator[str]:
    """Yield why killed ranks have not ended. One in state D ends only once the kernel has what it waits for."""
    stacks, end = stacks_at(outcome.end), outcome.end
    waits = {**(stacks.waits if stacks is not None else {})}
    if isinstance(end, EndedBySignal):
        waits |= end.late_waits
    in_kernel = [rank for rank in outcome.unanswered if waits.get(rank) == ProcessState.DISK]
    others = [rank for rank in outcome.unanswered if rank not in in_kernel]
    reasons = {worker.rank: worker.lost_reason for worker in outcome.workers}
    if in_kernel:
        who, is_one = format_ranks_on_hosts(in_kernel, outcome.hosts), len(in_kernel) == 1
        process = "its process waits" if is_one else "their processes wait"
        ends = "it ends" if is_one else "they end"
        why = f"{process} in the kernel for a disk, a file server or a driver (state D), and {ends} only after that"
        yield f"{who} did not answer: {reasons[in_kernel[0]]}; {why}."
    if others:
        who = format_ranks_on_hosts(others, outcome.hosts)
        yield f"{who} did not answer: {reasons[others[0]]}; an agent is stopped there, or the host hangs."


def _remarks(outcome: JobOutcome) -> Iterator[str]:
    late = [worker.rank for worker in outcome.workers if worker.killed_by_launcher]
    if late:
        yield f"{format_ranks(late)} had finished the program but did not end, and had to be killed."


def _describe_stuck(verdict: Verdict, end: TimedOut | Stalled, outcome: JobOutcome, timeout: float | None) -> Verdict:
    """Add where the ranks were when the job was stopped, and which ranks had finished."""
    stacks = _complete_stacks(end, outcome)
    if isinstance(end, TimedOut):
        limit = f", --timeout {timeout:g} s" if timeout is not None else ""
        headline, where = f"not finished within the time limit{limit}.", describe_stacks(stacks)
    else:
        causes = explain_deadlock(stacks)
        finding = f": {causes[0].what}" if causes else "."
        headline = f"{_stall_reason(end)}{finding}"
        where = describe_stacks(stacks, is_told=True)
    threads = phrasing.describe_thread_failures(outcome.workers, "", _ranks_with_told_threads(stacks))
    verdict = replace(verdict, headline=headline, details=(*filter(None, [where]), *threads))
    is_told = isinstance(end, Stalled)  # an error that a rank handles is the first cause
    return _add_unseen_error(verdict, stacks, is_told=is_told)


def _stall_reason(end: Stalled) -> str:
    return end.text.removesuffix(".") or "no progress for as long as --stall-timeout allows"


def leave_out_told(verdict: Verdict, outcome: JobOutcome) -> Verdict:
    """Return what the screen shows of a verdict: who waits for whom only once, if a notice has told it already."""
    end = outcome.end
    if not isinstance(end, TimedOut | Stalled | EndedBySignal) or not end.is_explained:
        return verdict
    stacks = _complete_stacks(end, outcome)
    causes = explain_deadlock(stacks)
    brief = f": {causes[0].brief}; more above" if causes and causes[0].brief else "; who waits for whom is above"
    if isinstance(end, Stalled):
        return replace(verdict, headline=f"{_stall_reason(end)}{brief}")
    if isinstance(end, TimedOut) and causes and not verdict.traceback:  # which has its error in the headline
        verdict = replace(verdict, headline=f"{verdict.headline.rstrip('.')}{brief}")
    full, brief_places = describe_stacks(stacks), describe_stacks(stacks, is_told=True)
    told = [str(cause) for cause in causes] if isinstance(end, EndedBySignal) else []
    shown = [brief_places if text == full else text for text in verdict.details]
    return replace(verdict, details=tuple(text for text in shown if text not in told))


def _complete_stacks(
    end: TimedOut | Stalled | EndedBySignal, outcome: JobOutcome, but: Collection[int] = ()
) -> JobStacks:
    """Return where the ranks were when the end was decided, with those that had finished then; without ranks `but`."""
    if not isinstance(end, EndedBySignal):
        return _at_end(end.stacks, outcome, (worker.rank for worker in outcome.workers if worker.finished))
    asked = end.stacks or JobStacks(0.0, outcome.hosts, {}, {})
    # The stack of a rank that was asked a moment too late shows its failure again, on the way out.
    dumps = {rank: dump for rank, dump in asked.dumps.items() if rank not in but}
    stacks = _at_end(asked, outcome, (worker.rank for worker in outcome.workers if worker.rank not in dumps))
    return replace(stacks, dumps=dumps, by_signal=_OF_SIGNALS)


def _at_end(stacks: JobStacks, outcome: JobOutcome, finished: Iterable[int]) -> JobStacks:
    """Return the stacks as a verdict shows them, which has the straggler in a line of its own."""
    time = outcome.decided_at if outcome.decided_at is not None else stacks.time
    finished = tuple(sorted(finished))
    return replace(stacks, time=time, flights=outcome.flights, finished=finished, straggler=None)


def _add_unseen_error(verdict: Verdict, stacks: JobStacks, *, is_told: bool) -> Verdict:
    """Name the exception that a rank handled when the job was stopped, which nobody has seen, as the likely cause.

    is_told:  whether the headline names it already
    """
    errors = wait_graph_of(stacks).unseen_errors
    if not errors:
        return verdict
    verdict, alike = _show_unseen_error(verdict, errors)
    raised = f"{format_ranks_on_hosts(alike, verdict.hosts)} had raised {format_error(errors[alike[0]].choice.chosen)}"
    headline = verdict.headline if is_told else f"{verdict.headline.rstrip('.:')}, after {raised}."
    return replace(verdict, culprits=alike, headline=headline)


def _show_unseen_error(verdict: Verdict, errors: Mapping[int, HandledError]) -> tuple[Verdict, tuple[int, ...]]:
    """Add the frames of the first rank's exception; returns also the ranks that have the same."""
    first = min(errors)
    alike = tuple(sorted(rank for rank, found in errors.items() if found.choice == errors[first].choice))
    intro = f"{format_ranks_on_hosts([first], verdict.hosts)} raised this, and had not ended:"
    return replace(verdict, intro=intro, traceback=format_frames(errors[first].choice.chosen)), alike


def _ranks_with_told_threads(stacks: JobStacks) -> set[int]:
    """Return the ranks of which the explanation of a hang names the threads, or the background saves, that failed."""
    graph = wait_graph_of(stacks)
    saves = {rank for rank, handled in graph.unseen_errors.items() if handled.save is not None}
    return saves | {rank for rank, state in graph.states.items() if state.waits_for_the_dead}


def _describe_early_exit(verdict: Verdict, asked: JobStacks, outcome: JobOutcome, decided: float) -> Verdict:
    finished = [worker for worker in outcome.workers if worker.rank not in asked.dumps]
    ranks = tuple(worker.rank for worker in finished)
    since = decided - min((worker.time for worker in finished), default=decided)
    ago = f" {format_seconds(since)} ago" if since > 0.5 else ""
    waiting = f"{format_ranks(asked.dumps)} {agree('waits', len(asked.dumps))}"
    stacks = _at_end(asked, outcome, ranks)
    functions = {main_stack(dump).joint_function for dump in stacks.dumps.values()}
    function = functions.pop() if len(functions) == 1 else ""
    waiting = f"{waiting} in {function or 'JAX'} for ranks that will never come"
    causes, errors = explain_deadlock(stacks), wait_graph_of(stacks).unseen_errors
    is_advised = bool(errors) or any(cause.advises_same_steps for cause in causes)
    is_told = not errors and is_advised and causes[0].advises_same_steps and bool(causes[0].advice)  # by the headline
    verdict = replace(
        verdict,
        culprits=ranks,
        victims=dict.fromkeys(stacks.dumps, Fate.STOPPED),
        headline=f"{format_ranks(ranks)} finished (status 0){ago}; {waiting}:",
        details=(
            describe_stacks(stacks, is_told=is_told),
            *([] if is_advised else [f"{SAME_STEPS}."]),
            *phrasing.describe_thread_failures(outcome.workers, "", _ranks_with_told_threads(stacks)),
        ),
    )
    if not errors:
        return verdict
    fates = dict.fromkeys(ranks, Fate.FINISHED) | dict.fromkeys(stacks.dumps, Fate.STOPPED)
    verdict = _add_unseen_error(verdict, stacks, is_told=False)
    return replace(verdict, victims={rank: fate for rank, fate in fates.items() if rank not in verdict.culprits})


def _describe_end_by_signal(
    verdict: Verdict, end: EndedBySignal, outcome: JobOutcome, decided: float, started: float
) -> Verdict:
    """Add what ended the job: the signal, a rank that failed meanwhile, or what a rank handled when the signal came."""
    failed = find_failed_endings(outcome.workers, end.signum)
    stacks = _complete_stacks(end, outcome, but={worker.rank for worker in failed})
    graph = wait_graph_of(stacks)
    causes = tuple(str(cause) for cause in explain_deadlock(stacks) if cause.is_error)
    if failed:
        verdict = describe_failed_ending(verdict, outcome, failed, _name_signal(end.signum), started=started)
        return replace(verdict, details=(*verdict.details, *causes))
    errors = graph.unseen_errors or _interrupted_errors(outcome.workers)
    meanwhile, alike = "", tuple[int, ...]()
    if errors:
        verdict, alike = _show_unseen_error(verdict, errors)
        who = format_ranks_on_hosts(alike, verdict.hosts)
        meanwhile = f", {describe_meanwhile(errors[alike[0]], who)}"
    threads = phrasing.describe_thread_failures(outcome.workers, "", {*errors, *_ranks_with_told_threads(stacks)})
    others = [state for rank, state in graph.busy_states.items() if rank not in errors]
    by = end.text or f"{_name_signal(end.signum)}{_ORIGINS.get(end.signum, '')}"
    moment = f"{format_seconds(decided - started)} after the start, before the program's first line"
    if outcome.run_at is not None:
        moment = f"{format_seconds(decided - outcome.run_at)} into the run"
    fates = _describe_fates(end, outcome.workers, names_errors=not meanwhile)
    is_hung = bool(graph.unseen_errors) and all(state.activity in WAITING for state in others)
    return replace(
        verdict,
        culprits=alike if is_hung else (),
        headline=f"interrupted by {by} {moment}{meanwhile}; {fates}.",
        advice=_WITHOUT_TERMINAL if end.signum == signal.SIGHUP and not end.text else "",
        details=(*verdict.details, *causes, *threads),
    )


def _interrupted_errors(workers: Sequence[WorkerOutcome]) -> dict[int, HandledError]:
    """By rank, the exception that it handled when an interrupt ended it; empty if no rank is without one."""
    found = {
        worker.rank: error
        for worker in workers
        if (error := find_interrupted_error(worker.failure, failed_saves_of(worker.thread_failures))) is not None
    }
    return found if len(found) < len(workers) else {}


def _describe_handled(dump: str) -> str:
    """Write `, while it handled ValueError: bad record (data.py:31 load)`; empty unless it is an error of its own."""
    chosen = [handled.choice.chosen for handled in find_handled_errors(dump)]
    own = [error for error in chosen if error.error not in _OF_SIGNALS]
    return f", while it handled {format_with_place(own[0])}" if own else ""


def _name_signal(signum: int) -> str:
    return "Ctrl-C (SIGINT)" if signum == signal.SIGINT else format_signal(signum)


def _describe_preemption(end: Preempted, outcome: JobOutcome) -> str:
    resumed = f"from step {outcome.saved_step}" if outcome.saved_step is not None else "from its last checkpoint"
    if end.signal is not None and not all(worker.ended_well for worker in outcome.workers):
        by, fates = format_signal(end.signal.signum), _describe_fates(end.signal, outcome.workers)
        return f"preempted by {by}; {fates}; the job may be resumed {resumed}."
    if end.signal is None or end.asked:
        told = f"as should_stop had asked ({end.asked})"
        return f"preempted: the program ended with status 0 {told}; the job may be resumed {resumed}."
    by = format_signal(end.signal.signum)
    return f"preempted: the program ended with status 0 after {by}; the job may be resumed."


def _describe_fates(end: EndedBySignal, workers: Sequence[WorkerOutcome], *, names_errors: bool = True) -> str:
    """Write `all ranks ended by themselves`, `rank 2 did not end in time (in JAX: …), and was killed; the others …`.

    names_errors:  add what the late ranks handled
    """
    killed = [worker.rank for worker in workers if worker.killed_by_launcher]
    if not killed:
        started = any(worker.status is not None or worker.lost_reason for worker in workers)
        return "all ranks ended by themselves" if started else "no rank had been started"
    was = agree("was", len(killed))
    if end.unheard:
        return f"no rank listens to SIGTERM, so {plural(len(killed), 'rank')} {was} killed at once"
    who = plural(len(killed), "rank") if len(killed) == len(workers) else format_ranks(killed)
    late = [rank for rank in killed if rank in end.late_stacks]
    fate = f"{who} {was} killed"
    if late == killed:
        places = dict.fromkeys(find_place(main_stack(end.late_stacks[rank])) for rank in late)
        where = ", or at ".join(place.format(", ") for place in places)
        stuck = f"stuck at {where}" if len(places) <= _MAX_PLACES else "stuck at several places"
        if names_errors:
            stuck += next(filter(None, (_describe_handled(end.late_stacks[rank]) for rank in late)), "")
        fate = f"{who} did not end in time ({stuck}), and {was} killed"
    return fate if len(killed) == len(workers) else f"{fate}, the others ended by themselves"
