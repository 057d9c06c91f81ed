"""A job that runs on fewer hosts takes others back: when the head looks and asks, where ranks then are, what counts."""

import signal

import pytest
from msgspec.structs import replace
from simulation import JOB_ID

from jaxrun.analysis.diagnosis.job_end import Grown, Preempted
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.verdict.restarts import Restart, Stop, decide_restart, summarize_end
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.controller.head.scale_up import LOOK_INTERVAL_S
from jaxrun.errors import UsageError
from jaxrun.job_events.events import HostsFound
from jaxrun.protocol.job_record import AttemptEnd
from jaxrun.protocol.probe_messages import Machine
from jaxrun.protocol.stop_messages import PollCount, StopAt, StopPolled, StopReached, StopRequested
from jaxrun.spec.engines import by_hand
from jaxrun.spec.job.job import Job
from jaxrun.text import format_sizes

GROW = 60.0
H2 = HostsFound(("h2",))


def smaller(simulate, *, polls=(0, 1), **options):
    """A running job of two ranks that lacks a host."""
    job = simulate(2, grow=GROW, **options).run()
    return job.handle(*(StopPolled(rank) for rank in polls))


def stopped(job):
    """All ranks stop as they were asked to, and end well."""
    job.handle(PollCount(0, 7), PollCount(1, 6)).handle(StopReached(0, 40), StopReached(1, 40))
    return job.done(0, 1).exit(0, 1).exit(0, 0).wait(2)


# ---- when the head looks, and asks


def test_hosts_are_looked_for_once_the_attempt_has_run_for_a_while_and_then_again_and_again(simulate):
    job = smaller(simulate).wait(GROW - 1)
    assert job.searches == []
    job.wait(1.1)
    assert job.searches == [GROW]
    job.handle(HostsFound(())).wait(LOOK_INTERVAL_S + 0.1)
    assert len(job.searches) == 2 and not job.ranks_sent(StopRequested)
    whole = simulate(2).run().handle(StopPolled(0), StopPolled(1)).wait(10_000)
    assert whole.searches == []


@pytest.mark.parametrize("options", [{}, {"grow": GROW}])
def test_a_host_that_is_in_use_again_when_a_look_for_it_ends_is_no_news(simulate, options):
    job = simulate(2, hosts={0: "h1", 1: "h2"}, **options).run().handle(StopPolled(0), StopPolled(1), H2)
    assert job.lines == [] and not job.ranks_sent(StopRequested)


def test_the_ranks_are_asked_to_stop_at_a_common_step_and_the_job_has_grown(simulate):
    job = smaller(simulate).wait(GROW + 1).handle(H2)
    assert job.ranks_sent(StopRequested) == [0, 1]
    assert job.lines == ["h2 is back: asked ranks 0-1 to stop (should_stop), to start on more hosts"]
    stopped(job)
    assert job.ranks_sent(StopAt) == [0, 1] and not job.killed
    assert job.outcome.end == Grown("h2 is back")
    assert not job.outcome.stop_requested and "h2 is back" in job.verdict.headline


@pytest.mark.parametrize("polls", [(), (0,)], ids=["no rank", "one of two"])
def test_a_program_that_does_not_ask_on_all_ranks_is_left_alone_and_that_is_said_once(simulate, polls):
    job = smaller(simulate, polls=polls).listen()  # to SIGTERM, which is not meant for that
    for _ in range(3):
        job.wait(GROW).handle(H2)
    assert job.lines == ["h2 is back; the job stays smaller, unless its program asks should_stop"]
    assert not job.ranks_sent(StopRequested) and not job.killed
    searches = len(job.searches)
    job.wait(100)
    assert len(job.searches) == searches  # what nothing would come of costs nothing
    job.handle(StopPolled(0), StopPolled(1)).wait(LOOK_INTERVAL_S + 1).handle(H2)
    assert job.ranks_sent(StopRequested) == [0, 1]


def test_that_somebody_wants_the_end_counts_more(simulate):
    job = smaller(simulate).wait(GROW + 1).handle(H2).interrupt(signal.SIGTERM)
    stopped(job)
    assert job.outcome.end == Preempted("SIGTERM")
    late = smaller(simulate).wait(1).interrupt(signal.SIGTERM).wait(GROW)
    assert late.searches == [] or late.outcome is not None


def test_a_rank_that_fails_while_it_saves_has_failed(simulate):
    job = smaller(simulate).wait(GROW + 1).handle(H2).handle(PollCount(0, 7), PollCount(1, 6), StopReached(0, 40))
    job.handle(job.failure(1)).wait(1).exit(1, 1).wait(1)
    assert job.outcome.end.reason == "failed" and not job.outcome.stop_requested


# ---- what counts as a restart

KILLED = AttemptEnd("lost", saved_step=10)
GROWN = AttemptEnd(Grown.reason, saved_step=10)


def test_growing_counts_neither_as_a_restart_nor_as_a_failure():
    assert decide_restart((GROWN,), 1, "stall") == Restart(2 + 1 - 0)
    assert isinstance(decide_restart((KILLED, GROWN, GROWN, GROWN), 1, "failure"), Restart)
    assert isinstance(decide_restart((KILLED, GROWN, KILLED), 1, "failure"), Stop)
    end = summarize_end(JobOutcome(Grown("h2 is back"), saved_step=12), has_run_before=True)
    assert end == AttemptEnd(Grown.reason, saved_step=12)


# ---- one command on each host


def hand_plan(**wanted):
    job = Job(
        program=("train.py",), backend="hosts", platform="cpu", hosts=3, host_rank=0, head="h1:7", processes_per_host=2,
        max_restarts=1, **wanted,
    )  # fmt: skip
    return by_hand.plan(job, {}, JOB_ID, Machine("h1", (0, 1), {}, False, False))


def test_a_job_started_by_hand_goes_on_with_the_agents_that_are_there_and_takes_others_back():
    plan = hand_plan(min_hosts=2)
    fewer = by_hand.replan_manual(plan, {0, 4})
    assert fewer.placement.agents == {0: (0, 1), 2: (), 4: (2, 3)} and fewer.placement.is_smaller
    assert [worker.host for worker in fewer.workers] == ["--host-rank 0"] * 2 + ["--host-rank 2"] * 2
    assert [worker.local_rank for worker in fewer.workers] == [0, 1, 0, 1]
    again = by_hand.replan_manual(fewer, {0, 2, 4})
    assert (again.placement, again.workers) == (plan.placement, plan.workers)


@pytest.mark.parametrize(
    ("wanted", "there"),
    [({"min_hosts": 2}, {0}), ({"min_hosts": 2}, {2, 4}), ({}, {0, 2})],
    ids=["fewer than --min-hosts", "not host 0", "not all, without --min-hosts"],
)
def test_with_too_few_agents_the_job_does_not_continue(wanted, there):
    assert by_hand.replan_manual(hand_plan(**wanted), there) is None


# ---- words


def test_the_size_over_time_is_said_where_it_has_changed():
    assert format_sizes([(3, 130.0), (2, 10.0), (2, 830.0), (3, 5.0)], is_over=False) == (
        "size: 3 hosts 2 min 10 s, 2 hosts 14 min 0 s, 3 hosts since"
    )
    assert format_sizes([(3, 130.0), (1, 10.0)]) == "size: 3 hosts 2 min 10 s, 1 host 10.0 s"
    assert format_sizes([(3, 130.0), (3, 10.0)]) == format_sizes([]) == ""


def test_a_verdict_knows_the_size_of_each_attempt():
    first = Verdict("lost", 69, {0: "h1", 1: "h2"}, startup=1.0, run=4.0, stopping=0.0)
    last = Verdict("ok", 0, {0: "h1"}, startup=1.0, run=2.0, stopping=0.0, before=6.0, earlier=(first,))
    assert last.sizes == [(2, 6.0), (1, 3.0)]
    assert replace(last, earlier=()).sizes == [(1, 3.0)]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [({"grow": 5.0}, "--grow 5 needs --min-hosts"), ({"grow": -1.0, "min_hosts": 1}, "--grow must be")],
)
def test_a_wrong_grow_is_refused(wanted, words):
    with pytest.raises(UsageError, match=words):
        Job(program=("t.py",), backend="slurm", max_restarts=1, **wanted)


def test_how_long_an_attempt_runs_at_least():
    job = Job(program=("t.py",), backend="slurm", min_hosts=1, max_restarts=1)
    assert job.grow_after == 600.0 and replace(job, grow=5.0).grow_after == 5.0
    assert replace(job, grow=0.0).grow_after is None  # never
