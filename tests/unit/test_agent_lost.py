"""An agent, a host or mpirun goes away: which rank is named, which are stopped, and the exit code."""

import signal

import pytest
from remote_plans import hand_plan
from simulation import make_registry, report

from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.head.consistency import Expected
from jaxrun.controller.head.head import Head
from jaxrun.controller.head.head_state import HeadJob, JobPhase, TimeLimits
from jaxrun.controller.roster import Roster
from jaxrun.job_events.events import AgentLost
from jaxrun.protocol.agent_messages import AgentConnected, AgentSignalled, StartFailed, WorkerExited, WorkerSpawned
from jaxrun.protocol.worker_messages import Exit, Join, Run
from jaxrun.spec.job.worker_assignment import LauncherSettings

HOSTS = {0: "h1", 1: "h1", 2: "h2", 3: "h2"}
CLOSED = "the connection to its agent was closed"
SILENT = "nothing was heard from its host for 2 s"
GLOO = {"error": "JaxRuntimeError", "message": "Gloo all-reduce failed: Connection closed by peer [10.0.0.2]:4711"}


@pytest.fixture
def made(simulate):
    """A job on two hosts."""
    return simulate(4, hosts=dict(HOSTS))


@pytest.fixture
def job(made):
    """The same, whose program runs."""
    return made.run()


def lose(job, *ranks, text=CLOSED):
    for rank in ranks:
        job.exited[rank] = None  # no exit of it is reported, whatever is sent to it
        job.handle(AgentLost(rank, text))
    return job


def fail(job, *ranks, **more):
    return job.handle(*(job.failure(rank, **more) for rank in ranks))


def test_a_lost_agents_host_is_named_and_the_others_are_stopped(job):
    lose(job, 3).wait(1)
    assert job.lines == ["rank 3 (h2) failed; stopping 3 others"]
    assert job.kills() == [(30, (0, 1, 2))]
    found = job.verdict
    assert (found.exit_code, found.outcome, found.culprits) == (69, "lost", (3,))
    assert found.headline == f"rank 3 of 4 on h2 was lost: {CLOSED}, 0.00 s into the run."
    assert found.victims == dict.fromkeys(range(3), "was stopped")


def test_all_agents_of_a_host_are_lost_together(job):
    lose(job, 2, 3, text=SILENT).wait(1)
    assert job.kills() == [(30, (0, 1))] and job.lines == ["ranks 2-3 (h2) failed; stopping 2 others"]
    headline = job.verdict.headline
    assert "h2" in headline and SILENT in headline and "h1" not in headline


def collateral_first(job):
    lose(fail(job, 0, 1, **GLOO).wait(0.02), 2, 3).wait(0.02).exit(1, 0, 1)


def loss_first(job):
    fail(lose(job, 2, 3).wait(0.02), 0, 1, **GLOO).wait(0.02).exit(1, 0, 1)


def lost_after_its_end(job):
    job.handle(WorkerExited(3, 7)).wait(0.005).handle(WorkerExited(1, 8)).wait(0.005)
    lose(job, 3)


def lost_while_the_others_are_stopped(job):
    job.handle(WorkerExited(1, 7)).wait(0.0305)
    lose(job, 2, 3)


LOST_THE_CONNECTION = dict.fromkeys((0, 1), "lost its connection")
STOPPED = dict.fromkeys((0, 2, 3), "was stopped")
# What happens, who is blamed, the exit code, and what became of some others.
BLAMED = {
    "a loss": (lambda job: lose(job, 2, 3), (2, 3), 69, {}),
    "a broken connection, then the loss": (collateral_first, (2, 3), 69, LOST_THE_CONNECTION),
    "the loss, then a broken connection": (loss_first, (2, 3), 69, LOST_THE_CONNECTION),
    "a loss that is noticed late": (lambda job: lose(fail(job, 0, **GLOO).wait(0.3), 3).exit(1, 0), (3,), 69, {}),
    "an error before the loss": (lambda job: lose(fail(job, 1).wait(0.01), 3).exit(1, 1), (1,), 1, {3: "was lost too"}),
    "rank 0": (lambda job: lose(job, 0), (0,), 69, {}),
    "all at once": (lambda job: lose(job, 0, 1, 2, 3), (0, 1, 2, 3), 69, {}),
    "a rank that is done while the others work": (lambda job: lose(job.done(3), 3), (3,), 69, {}),
    "while all exit": (lambda job: lose(job.done(0, 1, 2, 3), 3).exit(0, 1, 2).exit(0, 0), (3,), 69, {}),
    "after its worker's end": (lost_after_its_end, (3,), 7, {}),
    "while the others are stopped": (lost_while_the_others_are_stopped, (1,), 7, STOPPED),
    "after its report of a failure": (lambda job: lose(fail(job, 3), 3), (3,), 1, {}),
    "the launch command ends because of it": (
        lambda job: lose(job, 2, 3).wait(0.01).handle(StartFailed("srun was killed")),
        (2, 3),
        69,
        {},
    ),
}


@pytest.mark.parametrize(("happen", "culprits", "code", "victims"), BLAMED.values(), ids=BLAMED)
def test_who_is_blamed(job, happen, culprits, code, victims):
    happen(job)
    job.wait(6)
    found = job.verdict
    assert (found.culprits, found.exit_code) == (culprits, code)
    assert (found.outcome == "lost") == (code == 69)
    assert victims.items() <= found.victims.items()


@pytest.mark.parametrize("happen", [lost_while_the_others_are_stopped, lambda job: lose(fail(job, 3), 3)])
def test_a_loss_that_changes_nothing_is_not_waited_for(job, happen):
    happen(job)
    assert job.wait(1).finished_at < 0.1


def test_an_agent_that_is_lost_while_joining_is_named(made):
    lose(made.join(), 3).wait(1)
    assert made.ranks_sent(Run) == [] and (made.verdict.culprits, made.verdict.exit_code) == ((3,), 69)
    assert "before the program's first line" in made.verdict.headline


def test_an_agent_that_is_lost_before_its_worker_was_started_is_named(made):
    lose(made.spawn(0, 1, 2), 3).wait(1)
    assert made.outcome.end.reason == "unavailable" and made.verdict.exit_code == 69
    assert made.verdict.headline == f"the agent of rank 3 (h2) was lost before it started its worker: {CLOSED}"
    assert made.kills() == [(0, (0, 1, 2))]


def test_a_job_that_is_being_stopped_sends_no_join(made):
    lose(made.say_hello(), 0).wait(1)
    assert made.ranks_sent(Join) == [] and made.verdict.exit_code == 69


def test_an_agent_whose_worker_has_succeeded_may_end(job):
    lose(job.done(0, 1, 2, 3).exit(0, 3), 3).exit(0, 1, 2).exit(0, 0).wait(1)
    assert (job.outcome.end.reason, job.verdict.exit_code) == ("ok", 0)


def test_a_rank_that_the_job_does_not_have_cannot_be_lost(job):
    job.handle(AgentLost(9, CLOSED)).wait(1)
    assert job.verdict.exit_code == 65 and "it is rank 9, but the job has ranks 0 to 3" in job.verdict.headline


# ---- the launch command


def test_a_launch_command_that_ends_early_ends_the_job_with_its_output(job):
    text = "Open MPI 5 ended with status 1 before the job was over; it said:\n  no such host"
    job.handle(StartFailed(text)).wait(1)
    assert job.outcome.end.reason == "unavailable" and job.verdict.exit_code == 69 and job.verdict.headline == text
    assert job.kills() == [(0, (0, 1, 2, 3))]


def test_collateral_is_explained_by_the_end_of_the_launch_command(job):
    fail(job, 0, **GLOO).wait(0.01).handle(StartFailed("srun was killed by SIGKILL (9)")).wait(6)
    assert (job.outcome.end.reason, job.verdict.exit_code) == ("unavailable", 69)


def test_a_launch_command_that_ends_while_the_ranks_exit_changes_nothing(job):
    job.done(0, 1, 2, 3).handle(StartFailed("srun ended with status 1")).exit(0, 1, 2, 3).exit(0, 0).wait(1)
    assert (job.outcome.end.reason, job.verdict.exit_code) == ("ok", 0)


# ---- signals to agents


def signal_agents(job, *ranks):
    return job.handle(*(AgentSignalled(rank, signal.SIGTERM) for rank in ranks or range(4)))


@pytest.mark.parametrize("senders", [(0,), (3, 0, 1, 2), (0, 0, 1, 1, 2, 3)], ids=["one", "all", "all, some twice"])
def test_a_scheduler_that_signals_all_agents_interrupts_once(job, senders):
    job.listen()
    for rank in senders:
        signal_agents(job, rank).wait(0.01)
    assert job.kills(signal.SIGTERM) == [(0, (0, 1, 2, 3))] and job.kills() == []
    assert len(job.lines) == 1 and job.lines[0].startswith("SIGTERM: asked ranks 0-3 to end")
    assert job.head.phase is JobPhase.TERMINATING


def test_ranks_that_end_well_after_the_schedulers_sigterm_were_preempted(job):
    signal_agents(job.listen()).done(0, 1, 2, 3)
    assert job.ranks_sent(Exit) == [1, 2, 3]
    job.exit(0, 1, 2, 3).exit(0, 0)
    assert (job.verdict.outcome, job.verdict.exit_code) == ("preempted", 75)


def test_ranks_that_do_not_end_after_the_schedulers_sigterm_are_killed_after_the_grace(simulate):
    job = signal_agents(simulate(4, hosts=dict(HOSTS), grace=2.0).run().listen()).wait(3)
    assert job.kills() == [(2100, (0, 1, 2, 3))]
    assert (job.verdict.outcome, job.verdict.exit_code) == ("interrupted", 143)


def test_agents_that_end_by_the_schedulers_sigterm_are_no_failures(job):
    """A scheduler may kill everything right after its signal."""
    lose(signal_agents(job), 0, 1, 2, 3)
    assert (job.verdict.outcome, job.verdict.exit_code) == ("interrupted", 143)


def test_the_launchers_own_second_signal_kills_at_once_also_after_the_agents(job):
    signal_agents(job.listen(), 2).wait(0.5).interrupt(signal.SIGINT).wait(1)
    assert job.kills() == [(500, (0, 1, 2, 3))]


def test_lost_after_a_signal_does_not_hold_up_the_end(job):
    lose(job.interrupt(signal.SIGTERM).wait(0.1), 2, 3).done(0, 1).wait(0.1).exit(0, 0, 1).wait(6)
    assert (job.outcome.end.reason, job.verdict.exit_code) == ("interrupted", 143) and job.finished_at < 6


def test_a_signal_to_an_agent_before_the_program_runs_ends_the_job_at_once(made):
    signal_agents(made.join()).wait(1)
    assert made.kills() == [(0, (0, 1, 2, 3))] and made.kills(signal.SIGTERM) == []
    assert (made.verdict.outcome, made.verdict.exit_code) == ("interrupted", 143)


# ---- before all agents have reported


@pytest.fixture
def awaiting(simulate):
    """A job of two whose hosts are not known before the reports come."""
    job = simulate(2, hosts={0: "?", 1: "?"})
    expected = Expected(2, "ab" * 16, "cpu", 1)
    registry = make_registry(2)
    limits = TimeLimits(60.0, None, 5.0, 30.0)
    job.head = Head(HeadJob(job.hosts, registry.agents, expected, limits), 0.0, registry)
    return job


def test_the_hosts_are_known_once_all_reports_are_in(awaiting):
    awaiting.head.handle(report(1, "h2", 2), 0.0)
    actions = awaiting.head.handle(report(0, "h1", 2), 0.0)
    assert [start.worker.rank for action in actions for start in action.message.workers] == [0, 1]
    assert dict(awaiting.head.hosts) == {0: "h1", 1: "h2"}
    awaiting.handle(WorkerSpawned(0, 1), WorkerSpawned(1, 2), AgentLost(1, CLOSED)).wait(1)
    assert [end.host for end in awaiting.outcome.workers] == ["h1", "h2"]
    assert awaiting.lines == ["rank 1 (h2) failed; stopping 1 other"]


@pytest.mark.parametrize("failed", [(), (0,)])
def test_an_agent_that_is_lost_when_it_has_started_some_of_its_workers_leaves_none_to_wait_for(simulate, failed):
    hosts = {0: "h1", 1: "h1", 2: "h2", 3: "h2", 4: "h3", 5: "h3"}
    job, plan = simulate(6, hosts=hosts), hand_plan(2, wait_hosts=None)
    registry = AgentRegistry(plan, LauncherSettings({}, "", ""), Roster.of(plan))
    limits = TimeLimits(60.0, None, 5.0, 30.0)
    job.head = Head(HeadJob(hosts, registry.agents, Expected(6, "ab" * 16, "cpu", 1), limits), 0.0, registry)
    job.handle(*(report(agent, hosts[agent], 6) for agent in registry.agents)).spawn(0, 1, 2, 4, 5).exit(-9, *failed)
    job.stuck = {2, 3}
    job.handle(AgentLost(2, CLOSED)).wait(20)
    assert job.finished_at < 1 and job.outcome.unanswered == ()
    assert job.outcome.end.reason == ("failed" if failed else "unavailable")


def test_agents_that_do_not_report_are_named_with_the_listen_address(awaiting):
    awaiting.handle(report(0, "h1", 2)).wait(121)
    assert awaiting.outcome.end.reason == "unavailable"
    assert awaiting.outcome.end.text.startswith("1 of 2 agents reported within 60 s; missing: rank 1")
    assert "It listens at eth0 10.0.0.9:40; --interface chooses another." in awaiting.outcome.end.text
    assert awaiting.statuses_shown[0][1].startswith("starting agents: 1 of 2 ranks after 2 s, waiting for rank 1")


def test_an_agent_that_goes_away_before_it_has_reported_is_named_with_its_host(awaiting):
    awaiting.handle(report(0, "h1", 2), AgentConnected(1, "h2"), AgentConnected(7, "h9"), AgentLost(1, CLOSED)).wait(1)
    assert awaiting.outcome.end.reason == "unavailable"
    assert awaiting.outcome.end.text == f"the agent of rank 1 (h2) was lost before it started its worker: {CLOSED}"
