"""The verdict on jobs that did not end by a failure alone: what the head decided, time limits, signals, faults."""

import signal
import typing

import pytest
from msgspec.structs import replace
from outcomes import ABORT, GLOO, RUN_AT, culprit_ranks, decide, end, raised, stopped, weigh, where

from jaxrun.analysis.diagnosis.job_end import (
    Completed,
    Diverged,
    EarlyExit,
    End,
    EndedBySignal,
    Grown,
    HostCheckFailed,
    HostsNotBack,
    LostAtStart,
    OutOfStep,
    Preempted,
    RankFailed,
    Refused,
    Stalled,
    TimedOut,
    Unavailable,
    Unsupported,
)
from jaxrun.analysis.diagnosis.job_outcome import InjectedFault
from jaxrun.analysis.lockstep.divergence import CallGroup, Divergence

SIGTERM = EndedBySignal(signal.SIGTERM)
# Each way to end, the exit code, and how the verdict calls it.
EXITS = (
    (Completed(), 0, "ok"),
    (RankFailed(), 1, "failed"),
    (Refused("x"), 65, "refused"),
    (Unsupported("x"), 2, "usage"),
    (Unavailable("x"), 69, "unavailable"),
    (HostCheckFailed("x", failed={1: "sick"}), 69, "unavailable"),
    (HostsNotBack("x", ranks=(1,)), 69, "unavailable"),
    (LostAtStart("x", lost={1: "closed"}), 69, "unavailable"),
    (TimedOut(where({})), 124, "timeout"),
    (Stalled(where({})), 124, "stall"),
    (EarlyExit(where({})), 124, "early-exit"),
    (Diverged(), 1, "diverged"),
    (OutOfStep(), 1, "diverged"),
    (SIGTERM, 143, "interrupted"),
    (Preempted(signal=SIGTERM), 75, "preempted"),
    (Grown("h2 is back"), 75, "grown"),
)


@pytest.mark.parametrize(("why", "code", "outcome"), EXITS, ids=lambda value: type(value).__name__)
def test_each_way_to_end_has_an_exit_code_and_words(why, code, outcome):
    found = (Divergence("0-3", 4, (CallGroup((0,), "jit(step)"), CallGroup((1, 2, 3), "jit(other)"))),)
    verdict = decide([end(rank, 9.0, 0, finished=True) for rank in range(4)], why, divergences=found)
    assert (verdict.exit_code, verdict.outcome, verdict.is_ok) == (code, outcome, code == 0)
    assert bool(verdict.headline) == (code != 0)


def test_no_way_to_end_is_forgotten():
    assert {type(why) for why, _, _ in EXITS} >= {*typing.get_args(End)}


# ---- endings of other kinds


def test_a_job_that_works_ends_with_0():
    ends = [end(rank, 9.0, 0, finished=True) for rank in range(4)]
    found = decide(ends, Completed())
    assert (found.outcome, found.exit_code, found.startup, found.run, found.details) == ("ok", 0, 2.0, 10.0, ())
    late = decide([*ends[:3], end(3, 9.0, -9, finished=True, killed_by_launcher=True)], Completed())
    assert late.details == ("rank 3 had finished the program but did not end, and had to be killed.",)


def test_a_failure_is_weighed():
    assert decide([raised(2, 5.0), *stopped(0, 1, 3)], RankFailed()).culprits == (2,)
    unknown = decide([end(rank, 9.0, 0, finished=True) for rank in range(4)], RankFailed())
    assert (unknown.exit_code, unknown.headline) == (1, "the job failed, but no rank shows why.")


@pytest.mark.parametrize(
    ("why", "code", "before"),
    [(Refused, 65, "refused to start the program: "), (Unsupported, 2, ""), (Unavailable, 69, "")],
)
def test_the_heads_finding_is_shown_unchanged(why, code, before):
    text = "counts differ\n  rank 7  7 devices"
    verdict = decide(stopped(0, 1, 2, 3), why(text))
    assert (verdict.outcome, verdict.exit_code, verdict.headline) == (why.reason, code, before + text)


def test_the_output_of_the_launch_command_is_explained():
    ssh_output = "  ssh: Could not resolve hostname h9: Name or service not known"
    text = f"mpirun ended with status 255 before the job was over; it said:\n{ssh_output}"
    verdict = decide([], Unavailable(text))
    assert verdict.headline.endswith(ssh_output)
    assert verdict.advice.startswith("`getent hosts h9`")
    assert decide([], Refused(ssh_output)).advice == ""


DUMP = 'Current thread 0x1f (most recent call first):\n  File "/job/train.py", line 8 in step\n'


def test_a_time_limit_shows_where_the_ranks_are():
    ends = [end(0, 3.0, 0, finished=True), *stopped(1, 2, 3)]
    verdict = decide(ends, TimedOut(where(dict.fromkeys((1, 2, 3), DUMP))))
    assert (verdict.exit_code, verdict.headline) == (124, "not finished within the time limit, --timeout 10 s.")
    assert "3 ranks  1-3  train.py:8 step" in verdict.details[0]
    assert "rank 0 (h0) has finished." in verdict.details[0]


def test_an_early_exit_names_the_rank_and_where_the_others_wait():
    ends = [end(1, 3.0, 0, finished=True), *stopped(0, 2, 3)]
    verdict = decide(ends, EarlyExit(where(dict.fromkeys((0, 2, 3), DUMP))))
    assert verdict.headline.startswith("rank 1 finished (status 0) 7.0 s ago; ranks 0, 2-3 wait in JAX")
    assert (verdict.exit_code, verdict.culprits, set(verdict.victims)) == (124, (1,), {0, 2, 3})
    assert "3 ranks  0, 2-3  train.py:8 step" in verdict.details[0]


TWO_KILLED = [end(0, 10.0, 0), end(1, 10.0, 0), *stopped(2, 3)]
BY_THEMSELVES = [end(rank, 10.0, 1) for rank in range(4)]
LATE = [end(0, 10.0, 130), end(1, 10.0, 130), end(3, 10.0, 130), *stopped(2)]
STUCK = "rank 2 did not end in time (stuck at train.py:8 step), and was killed, the others ended by themselves."
AT_ONCE = "no rank listens to SIGTERM, so 4 ranks were killed at once."
UNHEARD = {"signum": signal.SIGTERM, "unheard": True}
CLOSED = "SIGHUP (1), which comes when the terminal closes,"
TIMER = "SIGALRM (14), from a timer that jaxrun was started with,"
PARENT = {"signum": signal.SIGHUP, "text": "the process that started it"}
# How the ranks ended and what is known besides, the exit code, by what the job was interrupted, and what became of it.
INTERRUPTED = {
    "Ctrl-C": (TWO_KILLED, {}, 130, "Ctrl-C (SIGINT)", "ranks 2-3 were killed, the others ended by themselves."),
    "SIGTERM": (BY_THEMSELVES, {"signum": signal.SIGTERM}, 143, "SIGTERM (15)", "all ranks ended by themselves."),
    "SIGHUP": (BY_THEMSELVES, {"signum": signal.SIGHUP}, 129, CLOSED, "all ranks ended by themselves."),
    "SIGALRM": (stopped(0, 1, 2, 3), {"signum": signal.SIGALRM}, 142, TIMER, "4 ranks were killed."),
    "no rank yet": ([end(0, 10.0), end(1, 10.0)], {}, 130, "Ctrl-C (SIGINT)", "no rank had been started."),
    "a late rank": (LATE, {"late_stacks": {2: DUMP}}, 130, "Ctrl-C (SIGINT)", STUCK),
    "SIGTERM to which nobody listens": (stopped(0, 1, 2, 3), UNHEARD, 143, "SIGTERM (15)", AT_ONCE),
    "the launcher's parent": (stopped(0, 1, 2, 3), PARENT, 129, PARENT["text"], "4 ranks were killed."),
}


@pytest.mark.parametrize(("ends", "known", "code", "by", "then"), INTERRUPTED.values(), ids=INTERRUPTED)
def test_an_interrupt_names_what_caused_it_and_the_ranks_that_had_to_be_killed(ends, known, code, by, then):
    verdict = decide(ends, EndedBySignal(**{"signum": signal.SIGINT, **known}))
    assert (verdict.exit_code, verdict.headline) == (code, f"interrupted by {by} 10.0 s into the run; {then}")
    assert verdict.advice.startswith("tmux or screen keep" if by == CLOSED else "") and bool(verdict.advice) == (
        by == CLOSED
    )


SAVE = {"error": "OSError", "message": "No space left on device"}
CRASHED = end(1, 10.0, -signal.SIGSEGV)
OUT_OF_MEMORY = end(1, 10.0, -signal.SIGKILL, out_of_memory="out of memory")
# What a rank did when it was to end, and what the headline says of it.
FAILED_ENDINGS = {
    "its save fails": (raised(1, 10.0, **SAVE), "rank 1 of 4 on h0 raised OSError while it ended after"),
    "it crashes": (CRASHED, "rank 1 of 4 on h0 crashed with SIGSEGV (11) while it ended after"),
    "it takes all memory": (OUT_OF_MEMORY, "rank 1 of 4 on h0 was killed by SIGKILL (9) while it ended after"),
}
# The same, where nothing has failed.
ENDINGS = {
    "interrupted": raised(1, 10.0, "", error="KeyboardInterrupt", status=130),
    "interrupted in a callback of JAX": raised(
        1, 10.0, "CpuCallback error: KeyboardInterrupt", error="JaxRuntimeError"
    ),
    "interrupted in a task group": raised(1, 10.0, "unhandled errors", error="BaseExceptionGroup"),
    "by a status of its choice": raised(1, 10.0, "", error="SystemExit", status=3),
    "as another rank has ended": raised(1, 10.0, GLOO, error="JaxRuntimeError"),
    "by the signal": end(1, 10.0, -signal.SIGTERM),
    "killed by a scheduler": end(1, 10.0, -signal.SIGKILL),
    "killed by jaxrun": stopped(1)[0],
}


@pytest.mark.parametrize(("ending", "headline"), FAILED_ENDINGS.values(), ids=FAILED_ENDINGS)
@pytest.mark.parametrize(("signum", "name"), [(signal.SIGINT, "Ctrl-C (SIGINT)"), (signal.SIGTERM, "SIGTERM (15)")])
def test_a_rank_that_fails_while_it_ends_is_the_culprit(ending, headline, signum, name):
    ends = [end(0, 10.0, 0, finished=True), ending, end(2, 10.0, 0, finished=True), *stopped(3)]
    verdict = decide(ends, EndedBySignal(signum))
    assert (verdict.headline, verdict.culprits) == (f"{headline} {name}, 10.0 s into the run.", (1,))
    assert verdict.exit_code == (1 if ending.failure else 128 - ending.status)
    assert verdict.traceback == (ending.failure.traceback.rstrip("\n") if ending.failure else "")


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_a_rank_that_ends_as_it_was_asked_has_not_failed(ending):
    ends = [end(0, 10.0, 0, finished=True), ending, *stopped(2, 3)]
    verdict = decide(ends, EndedBySignal(signal.SIGTERM))
    assert (verdict.outcome, verdict.exit_code, verdict.culprits) == ("interrupted", 143, ())


def test_a_preempted_job_may_be_resumed():
    ends = [end(rank, 10.0, 0, finished=True) for rank in range(4)]
    verdict = decide(ends, Preempted(signal=EndedBySignal(signal.SIGTERM)))
    assert (verdict.exit_code, "SIGTERM (15)" in verdict.headline, "resumed" in verdict.headline) == (75, True, True)


def test_a_program_that_stops_as_it_was_asked_is_preempted_though_a_rank_was_lost_before():
    ends = [end(0, 10.0, 0, finished=True), end(1, 5.0, -signal.SIGKILL)]
    verdict = decide(ends, Preempted("SIGTERM"), lost=(1,), saved_step=40)
    asked = "as should_stop had asked (SIGTERM); the job may be resumed from step 40."
    assert verdict.headline == f"preempted: the program ended with status 0 {asked}"
    assert "rank 1" in verdict.details[0] and "did not come back" in verdict.details[0]


# ---- injected faults


def dealt(kind, at=2.0, by="--chaos"):
    return (InjectedFault(kind, RUN_AT + at, by),)


def test_an_injected_death_is_named_as_such_and_ends_as_any_other():
    verdict = weigh(end(1, 2.0, -signal.SIGKILL, injected_faults=dealt("kill")), raised(0, 2.1, GLOO), *stopped(2, 3))
    assert verdict.headline == "rank 1 of 4 on h0 was killed by SIGKILL (9), as --chaos asked, 2.0 s into the run."
    assert (verdict.exit_code, verdict.outcome, verdict.culprits) == (137, "killed", (1,))


def test_other_deaths_and_faults_that_came_too_late_are_kept_apart():
    died = end(1, 2.0, -signal.SIGKILL, injected_faults=dealt("kill"))
    assert culprit_ranks([died, end(2, 2.1, -signal.SIGKILL), *stopped(0, 3)]) == (1,)
    late = replace(died, time=RUN_AT + 10.0, killed_by_launcher=True)
    assert culprit_ranks([raised(0, 2.1), late, *stopped(2, 3)]) == (0,)


HARMED = {
    "its own connection broke": [raised(1, 2.1, GLOO, error="JaxRuntimeError"), raised(0, 2.2, GLOO), *stopped(2, 3)],
    "its peers' connections broke": [raised(0, 2.1, GLOO), end(1, 10.0, -9, killed_by_launcher=True), *stopped(2, 3)],
    "JAX ended it": [end(1, 2.1, -signal.SIGABRT, stderr_tail=ABORT), *stopped(0, 2, 3)],
    "something ended it": [end(1, 2.1, -signal.SIGABRT), *stopped(0, 2, 3)],
}


@pytest.mark.parametrize("ends", HARMED.values(), ids=HARMED)
def test_an_injected_fault_is_the_cause_if_nothing_else_failed(ends):
    ends = [replace(one, injected_faults=dealt("pause", 1.5)) if one.rank == 1 else one for one in ends]
    verdict = decide(ends, RankFailed())
    assert verdict.headline == "rank 1 of 4 on h0 was stopped by SIGSTOP (19), as --chaos asked, 1.5 s into the run."
    assert verdict.culprits == (1,) and verdict.details == () and not verdict.means
    assert verdict.exit_code == (1 if ends[0].failure else 134)


def test_an_injected_fault_is_named_but_outweighs_no_failure_of_another():
    verdict = decide(
        [raised(0, 3.0), replace(stopped(1)[0], injected_faults=dealt("pause", 1.5)), *stopped(2, 3)], RankFailed()
    )
    assert verdict.culprits == (0,) and verdict.headline.startswith("rank 0 of 4 on h0 raised ValueError")
    assert verdict.details == ("rank 1 (h0) was stopped by SIGSTOP (19), as --chaos asked, 1.5 s into the run.",)


@pytest.mark.parametrize("why", [Completed(), TimedOut(where({})), Stalled(where({})), EndedBySignal(15)])
def test_injected_faults_are_named_however_the_job_ends(why):
    ends = [end(rank, 5.0, 0, finished=True, injected_faults=dealt("pause", by="its gang")) for rank in range(4)]
    verdict = decide(ends, why)
    assert verdict.details[0] == (
        "ranks 0-3 (h0, h1) were stopped by SIGSTOP (19), as its gang asked, 2.0 s into the run."
    )


def test_an_injected_fault_does_not_count_as_a_divergence():
    ahead = Divergence("0-3", 4, (CallGroup((0,), "jit(step)"), CallGroup((1, 2, 3), "jit(other)")))
    ends = [raised(1, 2.1, GLOO, error="JaxRuntimeError"), *stopped(0, 2, 3)]
    assert decide(ends, RankFailed(), divergences=(ahead,)).outcome == "diverged"
    ends[0] = replace(ends[0], injected_faults=dealt("pause"))
    assert decide(ends, RankFailed(), divergences=(ahead,)).headline.startswith(
        "rank 1 of 4 on h0 was stopped by SIGSTOP"
    )
