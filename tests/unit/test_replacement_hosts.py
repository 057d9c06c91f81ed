"""--keep-survivors with --max-restarts: a spare host, or one that is awaited, starts the ranks of a lost one again."""

import signal

import pytest
from live_devices_by_hand import answer, asks, sent, start_again
from msgspec.structs import replace
from remote_plans import hand_plan
from simulation import report

from jaxrun.controller.seat import SeatState
from jaxrun.job_events.events import AgentLost
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentSignalled,
    NextAttempt,
    Shutdown,
    StartAgain,
    StartWorkers,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.stop_messages import StopRequested
from jaxrun.protocol.worker_messages import MpiImported, SignalHandlers
from jaxrun.text import UNKNOWN_HOST

HOSTS = {0: "h1", 1: "h1", 2: "h2", 3: "h2"}


def lose(job, *agents):
    """The agents of one host are lost, in this order; if the one on the spare host gets their ranks, it reports."""
    for agent in agents:
        job.roster.go(agent, "its host is gone")
        job.roster.explain(agent)
    job.handle(*(AgentLost(AgentId(agent), "its host is gone") for agent in agents))
    return job.handle(report(4, "h3", 4)) if job.roster.ranks_of(4) and 4 not in agents else job


@pytest.fixture
def spared(simulate):
    return simulate(4, hosts=HOSTS, spares=("h3",), keep_survivors=True, returns=4).run()


def test_the_ranks_of_a_lost_host_are_started_again_together_on_a_spare_one(spared):
    job = lose(spared.wait(1.0), 3, 2)
    assert job.lines == ["ranks 2-3 are lost, (0, 1) go on, starts on h3"]
    assert sent(job, NextAttempt, 2) == [NextAttempt(1, (2, 3))]
    (order,) = sent(job, StartWorkers, 2)
    workers = [
        (one.worker.rank, one.worker.local_rank, one.worker.local_size, one.worker.host) for one in order.workers
    ]
    assert workers == [(2, 0, 2, "h3"), (3, 1, 2, "h3")] and not sent(job, StartAgain, 2)
    assert job.roster.ranks_of(4) == (2, 3) and job.head.hosts == {0: "h1", 1: "h1", 2: "h3", 3: "h3"}
    job.wait(0.5)
    for rank in (2, 3):
        start_again(job, rank)
    asks(job, 2, 3, 0, 1)
    assert answer(job)[1] == {0: 1, 1: 1, 2: 2, 3: 2}
    assert job.lines[1:] == ["ranks 2-3 (h3) are back, 0.50 s after they were lost: ranks 0-3 go on"]
    job.exit(-9, 3)
    assert len(sent(job, StartAgain, 3)) == 1, "now where it is"
    job.wait(0.1).done(0, 1, 2).exit(0, 1, 2)
    job.exit(0, 0)
    assert job.outcome.end.reason == "ok" and {back.host for back in job.outcome.returns} == {"h3"}
    wanted = "ranks 2-3 of 4 on h2 were lost: its host is gone, 1.0 s into the run, and were back on h3 after 0.50 s."
    assert wanted in job.verdict.details, job.verdict.details


def test_a_spare_host_takes_only_the_place_of_a_host_whose_ranks_have_all_been_lost(spared):
    job = spared.handle(AgentLost(AgentId(2), "its agent was killed"))  # the host has another, which is there
    job.wait(1)
    assert job.outcome.end.reason == "failed" and not sent(job, StartWorkers, 2)
    assert "rank 2 (h2) failed; its agent is lost; stopping" in job.lines[-1]


def test_if_all_end_before_the_ranks_are_back_the_outcome_tells_their_lost_host_from_the_spare_one(spared):
    job = lose(spared, 2, 3).wait(0.1).exit(-9, 0).wait(1)
    lost = [worker for worker in job.outcome.workers if worker.lost_reason]
    assert [(worker.rank, worker.host, job.outcome.hosts[worker.rank]) for worker in lost] == [
        (2, "h2", "h3"),
        (3, "h2", "h3"),
    ]
    assert all(map(job.outcome.is_host_replaced, lost)) and set(job.verdict.culprits) == {2, 3}


def test_a_lost_host_without_a_spare_one_is_named_beside_the_host_that_was_replaced_just_before(simulate):
    hosts = {0: "h1", 1: "h2", 2: "h3"}
    job = simulate(3, hosts=hosts, spares=("h4",), keep_survivors=True, returns=4).run()
    for agent in (1, 2):
        job.roster.go(agent, "its host is gone")
        job.roster.explain(agent)
        job.handle(AgentLost(AgentId(agent), "its host is gone"))
    job.wait(1)
    why = "h3 is lost, and no spare host is ready"
    assert job.lines[-1] == f"ranks 1-2 (h2, h3) failed; {why}; stopping 1 other", job.lines


def test_a_rank_that_has_ended_well_is_not_started_on_the_spare_host(spared):
    job = spared.done(3).exit(0, 3)
    lose(job, 2, 3)
    (order,) = sent(job, StartWorkers, 2)
    assert [one.worker.rank for one in order.workers] == [2] and job.roster.ranks_of(4) == (2, 3)
    assert job.head.hosts == {0: "h1", 1: "h1", 2: "h3", 3: "h2"}


def test_a_rank_that_was_on_its_way_back_when_its_host_is_lost_starts_on_the_spare_one(spared):
    job = spared.exit(-9, 2).handle(WorkerSpawned(2, 2002))
    lose(job, 2, 3)
    assert [one.worker.rank for one in sent(job, StartWorkers, 2)[0].workers] == [2, 3]


@pytest.mark.parametrize("why", ["the spare host is lost as well", "too few restarts", "the program uses MPI"])
def test_without_a_spare_host_or_restarts_for_all_of_its_ranks_all_end(simulate, why):
    returns = 1 if why == "too few restarts" else 4
    job = simulate(4, hosts=HOSTS, spares=("h3",), keep_survivors=True, returns=returns).run()
    if why == "the spare host is lost as well":
        job.roster.go(4, "its host is gone")
    if why == "the program uses MPI":
        job.handle(MpiImported(0))
    lose(job, 2, 3).wait(1)
    assert job.outcome.end.reason == "failed" and not sent(job, StartWorkers, 2)
    wanted = "the one restart of a lost rank is used up" if returns == 1 else "h2 is lost, and no spare host is ready"
    assert wanted in job.lines[-1], job.lines


def test_a_spare_host_that_is_lost_before_it_starts_anything_counts_as_the_loss_of_its_ranks(spared):
    for agent in (2, 3):
        spared.roster.go(agent, "its host is gone")
    job = spared.handle(*(AgentLost(AgentId(agent), "its host is gone") for agent in (2, 3)))
    assert not sent(job, StartWorkers, 2), "it has not reported"
    job.roster.go(4, "it failed --host-check: no GPU")
    job.handle(AgentLost(AgentId(4), "it failed --host-check: no GPU")).wait(1)
    assert job.outcome.end.reason == "failed" and "ranks 2-3 of 4 on h3" in job.verdict.headline, job.verdict
    assert "it failed --host-check: no GPU" in job.verdict.headline


def test_the_end_of_a_rank_that_is_heard_after_the_loss_of_its_agent_does_not_start_it_there(spared):
    for agent in (2, 3):
        spared.roster.go(agent, "its host is gone")
        spared.roster.explain(agent)
    job = spared.handle(AgentLost(AgentId(2), "its host is gone"), WorkerExited(2, -9))
    job.handle(AgentLost(AgentId(3), "its host is gone"), report(4, "h3", 4))
    assert not sent(job, StartAgain, 2)
    assert [one.worker.rank for one in sent(job, StartWorkers, 2)[0].workers] == [2, 3]


def test_the_time_in_which_a_spare_host_checks_itself_is_not_taken_from_its_ranks(simulate):
    job = simulate(4, hosts=HOSTS, spares=("h3",), keep_survivors=True, returns=4, init=20.0).run()
    for agent in (2, 3):
        job.roster.go(agent, "its host is gone")
    job.handle(*(AgentLost(AgentId(agent), "its host is gone") for agent in (2, 3))).wait(15)
    job.handle(report(4, "h3", 4), WorkerSpawned(2, 2002), WorkerSpawned(3, 2003)).wait(15)
    assert not job.kills()
    job.wait(6)
    assert job.kills()[0][0] == 35_000


def test_with_staged_copies_which_the_spare_host_lacks_all_end(simulate):
    job = simulate(4, hosts=HOSTS, spares=("h3",), keep_survivors=True, returns=4, stage=("venv",)).run()
    lose(job, 2, 3).wait(1)
    assert job.outcome.end.reason == "failed" and not sent(job, StartWorkers, 2)


def test_a_rank_that_had_raised_before_its_host_was_lost_is_given_up_without_a_host_and_a_line_says_why(simulate):
    job = simulate(
        3, hosts={0: "h1", 1: "h2", 2: "h3"}, plan=hand_plan(wait_hosts=None), keep_survivors=True, returns=2
    )
    job.run().handle(job.failure(2))
    lose_agent(job, 2)
    assert job.lines[-1] == "rank 2 (h3) cannot be started again: h3 is lost"
    assert not job.head._returns.is_any_on_its_way(but=())


def test_the_next_lost_host_has_no_spare_one_any_more(spared):
    job = lose(spared, 2, 3)
    for rank in (2, 3):
        start_again(job, rank)
    lose(job, 4)
    job.wait(1)
    assert job.outcome.end.reason == "failed" and set(job.verdict.culprits) == {2, 3}, job.verdict


# ---- hosts whose command is started again by people or a cluster (--wait-hosts)


@pytest.fixture
def pods(simulate):
    hosts = {0: "h1", 1: "h2", 2: "h3"}
    return simulate(3, hosts=hosts, plan=hand_plan(), in_pods=True, keep_survivors=True, returns=2).run()


def handle_sigterm(job, *ranks):
    """The programs of these ranks handle SIGTERM themselves."""
    return job.handle(*(SignalHandlers(rank, False, True, own_termination=True) for rank in ranks))


def drain(job, agent):
    return job.handle(AgentSignalled(AgentId(agent), signal.SIGTERM))


def lose_agent(job, agent, why="its host is gone"):
    job.roster.lose(AgentId(agent), why)
    job.roster.explain(agent)
    return job.handle(AgentLost(AgentId(agent), why))


@pytest.mark.parametrize("host", ["h3", "h9"])
def test_a_host_that_is_back_or_another_in_its_place_starts_its_rank_while_the_others_go_on(pods, host):
    job = lose_agent(pods.wait(1), 2)
    assert job.lines == ["rank 2 is lost, (0, 1) go on"] and not sent(job, StartWorkers, 2)
    job.wait(1000).handle(report(2, host, 3))
    (order,) = sent(job, StartWorkers, 2)
    assert [(one.worker.rank, one.worker.host) for one in order.workers] == [(2, host)]
    start_again(job, 2)
    asks(job, 2, 0, 1, about=(0, 1, 2))
    assert job.lines[1:] == [f"rank 2 ({host}) is back, 16 min 40 s after it was lost: ranks 0-2 go on"]
    lose_agent(job, 2)
    assert job.lines[-1] == "rank 2 is lost, (0, 1) go on"
    job.done(0, 1).exit(0, 1)
    job.exit(0, 0)
    assert job.outcome.end.reason == "ok" and job.outcome.lost == (2,)


@pytest.mark.parametrize("is_other_there", [True, False])
def test_of_two_agents_on_a_host_one_or_both_are_lost_and_started_again(simulate, is_other_there):
    """As one of an `srun jaxrun attach`."""
    plan = hand_plan()
    plan = replace(plan, workers=tuple(replace(worker, host=UNKNOWN_HOST) for worker in plan.workers))
    job = simulate(3, hosts={0: "h1", 1: "h2", 2: "h2"}, plan=plan, keep_survivors=True, returns=2).run()
    if is_other_there:
        job.roster.arrive(1, 1)
        job.roster.say(1, AgentConnected(1, "h2"))
    else:
        lose_agent(job, 1)
    lose_agent(job, 2).handle(report(2, "h2", 3))
    assert len(sent(job, StartWorkers, 2)) == 1
    if not is_other_there:
        job.handle(report(1, "h2", 3))
        assert len(sent(job, StartWorkers, 1)) == 1


def test_a_host_without_the_devices_of_the_others_takes_no_place_and_nobody_waits_for_it(simulate):
    hosts = {0: "h1", 1: "h2", 2: "h3"}
    plan = hand_plan()
    plan = replace(plan, job=replace(plan.job, platform="cuda", devices_per_process=2))
    job = simulate(3, hosts=hosts, plan=plan, platform="gpu", local_devices=2, keep_survivors=True, returns=2).run()
    lose_agent(job, 2).handle(report(2, "h9", 3, gpus=(0,)))
    assert job.lines[-1].startswith("rank 2 cannot be started again: h9"), job.lines
    assert not sent(job, StartWorkers, 2)
    job.done(0, 1).exit(0, 1)
    job.exit(0, 0)
    assert job.outcome.end.reason == "ok" and job.outcome.lost == (2,)


def test_an_agent_that_is_lost_before_it_has_reported_is_awaited_again(pods):
    job = lose_agent(lose_agent(pods, 2), 2)
    assert job.roster.seats[2].state is SeatState.AWAITED
    job.handle(report(2, "h3", 3))
    assert len(sent(job, StartWorkers, 2)) == 1


def test_a_pod_that_goes_away_ends_alone_and_its_rank_is_awaited(pods):
    job = drain(pods.wait(1), 2)
    assert job.lines == ["the pod of h3 goes away; ranks 0-1 go on (--keep-survivors)"]
    assert [(agents, message.leaves) for _, agents, message in job.sent if isinstance(message, Shutdown)] == [
        ((2,), True)
    ]
    lose_agent(job, 2, "the connection to its agent was closed")
    job.handle(report(2, "h3", 3))
    assert len(sent(job, StartWorkers, 2)) == 1 and not sent(job, StopRequested, 0)
    job.done(0, 1).exit(0, 1)
    job.exit(0, 0)
    assert any("rank 2 of 3 on h3 was lost: its pod went away" in line for line in job.verdict.details)
    assert job.outcome.started_again == 0


def test_pods_that_go_away_do_not_count_as_restarts(simulate):
    hosts = {0: "h1", 1: "h2", 2: "h3"}
    job = simulate(3, hosts=hosts, plan=hand_plan(), in_pods=True, keep_survivors=True, returns=1).run()
    for _ in range(3):
        lose_agent(drain(job, 2), 2).handle(report(2, "h3", 3))
        start_again(job, 2)
        asks(job, 2, 0, 1, about=(0, 1, 2))
    job.exit(-9, 2)
    assert len(sent(job, StartAgain, 2)) == 1 and len(sent(job, StartWorkers, 2)) == 3


@pytest.mark.parametrize("how", ["by itself", "late", "at the second signal"])
def test_a_rank_that_handles_sigterm_may_end_before_its_pod_does(pods, how):
    job = drain(handle_sigterm(pods, 0, 1, 2).wait(1), 2)
    assert job.kills(signal.SIGTERM) == [(1000, (2,))] and "asked rank 2 to end (SIGTERM)" in job.lines[-1]
    job.wait(0.1)
    assert not sent(job, Shutdown, 2)
    drain(job, 2)
    assert not sent(job, Shutdown, 2), "a signal that comes twice"
    if how == "by itself":
        job.exit(3, 2)
        assert job.losses[-1].waits, "it is not started again before its host is back"
    elif how == "late":
        job.wait(31)
    else:
        drain(job.wait(0.2), 2)
    assert len(sent(job, Shutdown, 2)) == 1
    lose_agent(job, 2)
    assert not sent(job, StartAgain, 2), "its host goes away"
    job.wait(40).handle(report(2, "h3", 3))
    assert len(sent(job, StartWorkers, 2)) == 1 and len(sent(job, Shutdown, 2)) == 1


def test_a_rank_in_which_jax_handles_sigterm_ends_at_once_as_the_notice_of_preemption_would_stop_all(pods):
    job = drain(pods.listen(), 2)
    assert not job.kills(signal.SIGTERM) and len(sent(job, Shutdown, 2)) == 1


def test_a_pod_that_goes_away_without_return_ends_the_attempt(simulate):
    hosts = {0: "h1", 1: "h2", 2: "h3"}
    job = simulate(3, hosts=hosts, plan=hand_plan(), in_pods=True, drains=True, keep_survivors=True, returns=1).run()
    for _ in range(5):  # each return takes one of the six orders of three ranks
        lose_agent(drain(job, 2), 2).handle(report(2, "h3", 3))
        start_again(job, 2)
        asks(job, 2, 0, 1, about=(0, 1, 2))
        assert answer(job)[0] == (0, 1, 2)
    drain(job, 2).wait(1)
    assert job.outcome.waits_for_pods and job.outcome.drained == {2}, job.lines
    assert sum("goes away; ranks 0-1 go on" in line for line in job.lines) == 5


def test_a_pod_that_goes_away_has_no_place_in_the_next_attempt(pods):
    drain(handle_sigterm(pods, 2), 2).exit(-9, 0).wait(1)
    assert pods.outcome.end.reason == "failed" and pods.outcome.leaving == {2}
    assert pods.outcome.drained == set(), "which would mean that the attempt has ended because of it"


def test_a_pod_may_go_away_when_the_programs_of_all_others_have_ended(pods):
    job = drain(pods.done(0, 1), 2)
    assert job.lines == ["the pod of h3 goes away; the programs of the others have ended (--keep-survivors)"]
    lose_agent(job.exit(0, 1), 2).exit(0, 0)
    assert [loss.worker.rank for loss in job.losses[-1].losses] == [2]
    assert job.outcome.end.reason == "ok" and job.outcome.lost == (2,)


def test_the_pod_of_rank_0_cannot_go_away_alone(pods):
    job = drain(pods, 0).wait(1)
    assert job.outcome.end.reason == "interrupted" and not sent(job, Shutdown, 0)
