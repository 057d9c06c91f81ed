"""An agent, a host or mpirun goes away: which rank is named, which are stopped, and the exit code."""

import signal

import pytest

from jaxrun.head.agent_registry import AgentRegistry, JobSpec
from jaxrun.head.attempt import JobPhase
from jaxrun.head.events import AgentLost
from jaxrun.head.head import Head
from jaxrun.job.job import Job
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentReport,
    AgentSignalled,
    StartFailed,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.worker_messages import Exit, Join, Run
from jaxrun.verdict.decide import decide as decide_verdict

HOSTS = {0: "h1", 1: "h1", 2: "h2", 3: "h2"}
CLOSED = "the connection to its agent was closed"
SILENT = "nothing was heard from its host for 8 s (Connection timed out)"
GLOO = {"error": "JaxRuntimeError", "message": "Gloo all-reduce failed: Connection closed by peer [10.0.0.2]:4711"}


class RemoteJob:
    """A Simulation on two hosts; a lost agent's worker sends nothing any more."""

    def __init__(self, simulate, **more):
        self.job = simulate(4, hosts=dict(HOSTS), **more)

    def __getattr__(self, name):
        return getattr(self.job, name)

    def lose(self, *ranks, text=CLOSED):
        for rank in ranks:
            self.job.exited[rank] = None  # no exit of it is reported, whatever is sent to it
            self.job.handle(AgentLost(rank, text))
        return self

    def failure(self, rank, **more):
        """The failure report of a rank."""
        return self.job.failure(rank, **more)

    @property
    def verdict(self):
        """The verdict."""
        return decide_verdict(self.job.outcome, self.job.head.hosts, started=0.0, ended=self.job.now)


@pytest.fixture
def remote_job(simulate):
    """remote_job(…) makes a RemoteJob."""
    return lambda **more: RemoteJob(simulate, **more)


@pytest.fixture
def job(remote_job):
    """A RemoteJob whose program runs."""
    running = remote_job()
    running.run()
    return running


def test_a_lost_agents_host_is_named_and_the_others_are_stopped(job):
    job.lose(3).wait(1)
    assert job.lines == ["rank 3 (h2) failed; stopping 3 others"]
    assert job.kills() == [(30, (0, 1, 2))]
    assert job.verdict.exit_code == 69 and job.verdict.outcome == "lost" and job.verdict.culprits == (3,)
    assert job.verdict.headline == f"rank 3 of 4 on h2 was lost: {CLOSED}, 0.00 s into the run."
    assert job.verdict.victims == dict.fromkeys(range(3), "was stopped")


def test_all_agents_of_a_host_are_lost_together(job):
    job.lose(2, 3, text=SILENT).wait(1)
    assert job.kills() == [(30, (0, 1))] and job.lines == ["ranks 2-3 (h2) failed; stopping 2 others"]
    assert job.verdict.culprits == (2, 3) and job.verdict.exit_code == 69
    assert "h2" in job.verdict.headline and SILENT in job.verdict.headline and "h1" not in job.verdict.headline


@pytest.mark.parametrize("first", ["the collateral", "the loss"])
def test_ranks_that_report_a_broken_connection_are_not_blamed(job, first):
    steps = [lambda: job.handle(*(job.failure(rank, **GLOO) for rank in (0, 1))), lambda: job.lose(2, 3)]
    for step in steps if first == "the collateral" else reversed(steps):
        step()
        job.wait(0.02)
    job.exit(1, 0, 1).wait(6)
    assert job.verdict.culprits == (2, 3) and job.verdict.outcome == "lost" and job.verdict.exit_code == 69
    assert job.verdict.victims == dict.fromkeys((0, 1), "lost its connection")


def test_a_loss_that_is_noticed_late_still_explains_the_collateral(job):
    job.handle(job.failure(0, **GLOO)).wait(0.3)
    job.lose(3)
    job.exit(1, 0).wait(6)
    assert job.verdict.culprits == (3,) and job.verdict.exit_code == 69


def test_a_rank_with_an_error_of_its_own_before_the_loss_is_the_culprit(job):
    job.handle(job.failure(1)).wait(0.01)
    job.lose(3)
    job.exit(1, 1).wait(1)
    assert job.verdict.culprits == (1,) and job.verdict.exit_code == 1
    assert job.verdict.victims[3] == "was lost too"


def test_a_lost_rank_0_is_named_like_any_other(job):
    job.lose(0).wait(1)
    assert job.verdict.culprits == (0,) and job.kills() == [(30, (1, 2, 3))] and job.verdict.exit_code == 69


def test_a_job_that_lost_all_agents_ends_at_once(job):
    job.lose(0, 1, 2, 3)
    assert job.outcome is not None and job.verdict.exit_code == 69 and job.verdict.culprits == (0, 1, 2, 3)
    assert not job.killed


def test_an_agent_that_is_lost_while_joining_is_named(remote_job):
    job = remote_job()
    job.join()
    job.lose(3).wait(1)
    assert job.ranks_sent(Run) == [] and job.verdict.culprits == (3,) and job.verdict.exit_code == 69
    assert "before the program's first line" in job.verdict.headline


def test_an_agent_that_is_lost_before_its_worker_was_started_is_named(remote_job):
    job = remote_job()
    job.spawn(0, 1, 2)
    job.lose(3).wait(1)
    assert job.outcome.reason == "unavailable" and job.verdict.exit_code == 69
    assert job.verdict.headline == f"the agent of rank 3 (h2) went away before its worker was started: {CLOSED}"
    assert job.kills() == [(0, (0, 1, 2))]


def test_an_agent_that_is_lost_before_anything_was_started_ends_the_job(remote_job):
    job = remote_job()
    job.lose(3)
    assert job.outcome.reason == "unavailable" and job.statuses == [None] * 4


def test_lost_while_the_others_are_being_stopped_is_no_second_failure(job):
    job.handle(WorkerExited(1, 7)).wait(0.0305)
    job.lose(2, 3).wait(1)
    assert job.verdict.culprits == (1,) and job.verdict.exit_code == 7
    assert job.verdict.victims == {0: "was stopped", 2: "was stopped", 3: "was stopped"}
    assert job.finished_at < 0.1


def test_lost_after_a_signal_does_not_hold_up_the_end(job):
    job.interrupt(signal.SIGTERM).wait(0.1)
    job.lose(2, 3)
    job.done(0, 1).wait(0.1)
    job.exit(0, 0, 1).wait(6)
    assert job.outcome.reason == "interrupted" and job.verdict.exit_code == 143 and job.finished_at < 6


def test_a_rank_that_is_done_and_lost_while_the_others_work_is_named(job):
    job.done(3)
    job.lose(3).wait(1)
    assert job.verdict.culprits == (3,) and job.verdict.exit_code == 69 and CLOSED in job.verdict.headline


def test_a_rank_that_is_lost_while_all_exit_is_named(job):
    job.done(0, 1, 2, 3)
    job.lose(3)
    job.exit(0, 1, 2).exit(0, 0).wait(1)
    assert job.verdict.culprits == (3,) and job.verdict.exit_code == 69


def test_an_agent_whose_worker_has_succeeded_may_end(job):
    job.done(0, 1, 2, 3)
    job.exit(0, 3)
    job.lose(3)
    job.exit(0, 1, 2).exit(0, 0).wait(1)
    assert job.outcome.reason == "ok" and job.verdict.exit_code == 0


def test_an_agent_that_is_lost_after_its_workers_end_leaves_that_end_the_first(job):
    job.handle(WorkerExited(3, 7)).wait(0.005)
    job.handle(WorkerExited(1, 8)).wait(0.005)
    job.lose(3).wait(1)
    assert job.verdict.culprits == (3,) and job.verdict.exit_code == 7


def test_a_launch_command_that_ends_early_ends_the_job_with_its_output(job):
    text = "Open MPI 5 ended with status 1 before the job was over; it said:\n  no such host"
    job.handle(StartFailed(text)).wait(1)
    assert job.outcome.reason == "unavailable" and job.verdict.exit_code == 69 and job.verdict.headline == text
    assert job.kills() == [(0, (0, 1, 2, 3))]


def test_a_launch_command_that_ends_because_a_host_was_lost_is_not_the_cause(job):
    job.lose(2, 3).wait(0.01)
    job.handle(StartFailed("srun was killed")).wait(1)
    assert job.verdict.culprits == (2, 3) and job.verdict.outcome == "lost"


def test_collateral_is_explained_by_the_end_of_the_launch_command(job):
    job.handle(job.failure(0, **GLOO)).wait(0.01)
    job.handle(StartFailed("srun was killed by SIGKILL (9)")).wait(6)
    assert job.outcome.reason == "unavailable" and job.verdict.exit_code == 69


def test_a_launch_command_that_ends_while_the_ranks_exit_changes_nothing(job):
    job.done(0, 1, 2, 3)
    job.handle(StartFailed("srun ended with status 1"))
    job.exit(0, 1, 2, 3).exit(0, 0).wait(1)
    assert job.outcome.reason == "ok" and job.verdict.exit_code == 0


@pytest.mark.parametrize("senders", [(0,), (3, 0, 1, 2), (0, 0, 1, 1, 2, 3)], ids=["one", "all", "all, some twice"])
def test_a_scheduler_that_signals_all_agents_interrupts_once(job, senders):
    job.listen()
    for rank in senders:
        job.handle(AgentSignalled(rank, signal.SIGTERM)).wait(0.01)
    assert job.kills(signal.SIGTERM) == [(0, (0, 1, 2, 3))] and job.kills() == []
    assert len(job.lines) == 1 and job.lines[0].startswith("SIGTERM: asked ranks 0-3 to end")
    assert job.head.phase is JobPhase.TERMINATING


def test_ranks_that_end_well_after_the_schedulers_sigterm_were_preempted(job):
    job.listen()
    for rank in range(4):
        job.handle(AgentSignalled(rank, signal.SIGTERM))
    job.done(0, 1, 2, 3)
    assert job.ranks_sent(Exit) == [1, 2, 3]
    job.exit(0, 1, 2, 3).exit(0, 0)
    assert job.verdict.outcome == "preempted" and job.verdict.exit_code == 75


def test_ranks_that_do_not_end_after_the_schedulers_sigterm_are_killed_after_the_grace(remote_job):
    job = remote_job(grace=2.0)
    job.run()
    job.listen()
    for rank in range(4):
        job.handle(AgentSignalled(rank, signal.SIGTERM))
    job.wait(3)
    assert job.kills() == [(2100, (0, 1, 2, 3))]
    assert job.verdict.outcome == "interrupted" and job.verdict.exit_code == 143


def test_agents_that_end_by_the_schedulers_sigterm_are_no_failures(job):
    """A scheduler may kill everything right after its signal."""
    for rank in range(4):
        job.handle(AgentSignalled(rank, signal.SIGTERM))
    job.lose(0, 1, 2, 3)
    assert job.verdict.outcome == "interrupted" and job.verdict.exit_code == 143


def test_the_launchers_own_second_signal_kills_at_once_also_after_the_agents(job):
    job.listen()
    job.handle(AgentSignalled(2, signal.SIGTERM)).wait(0.5)
    job.interrupt(signal.SIGINT).wait(1)
    assert job.kills() == [(500, (0, 1, 2, 3))]


def test_a_signal_to_an_agent_before_the_program_runs_ends_the_job_at_once(remote_job):
    job = remote_job()
    job.join()
    for rank in range(4):
        job.handle(AgentSignalled(rank, signal.SIGTERM))
    job.wait(1)
    assert job.kills() == [(0, (0, 1, 2, 3))] and job.kills(signal.SIGTERM) == []
    assert job.verdict.outcome == "interrupted" and job.verdict.exit_code == 143


def test_a_rank_that_the_job_does_not_have_cannot_be_lost(job):
    job.handle(AgentLost(9, CLOSED)).wait(1)
    assert job.verdict.exit_code == 65 and "it is rank 9, but the job has ranks 0 to 3" in job.verdict.headline


def test_a_failure_report_outlives_its_agent(job):
    """The failure report arrived before its host was lost: the report is the cause, and nothing is waited for."""
    job.handle(job.failure(3))
    job.lose(3).wait(1)
    assert job.verdict.culprits == (3,) and "raised ValueError" in job.verdict.headline and job.verdict.exit_code == 1
    assert job.finished_at < 0.1


def agent_report(rank, host):
    values = {
        name: "" for name in ("boot_id", "jaxrun_version", "address", "head_address", "directory", "gpu_platform")
    }
    values |= {"cpus": (0,), "gpu_names": (), "gpu_ids": (), "gpu_limit": "", "tpu": False, "cuda_plugin": False}
    return AgentReport(rank=rank, size=2, host=host, pid=1, time=0.0, can_write_run_dir=True, **values)


def awaiting_reports(simulate):
    """A job whose hosts are not known before the reports come."""
    job = simulate(2, hosts={0: "?", 1: "?"})
    spec = JobSpec(Job(program=("p",), platform="cpu"), "ab" * 16, 2, "", "", ("p",), {}, "", "", "eth0 10.0.0.9:40")
    limits = job.head._attempt.limits
    job.head = Head(job.hosts, job.head._startup._expected, limits, "", 0.0, AgentRegistry(spec))
    return job


def test_the_hosts_are_known_once_all_reports_are_in(simulate):
    job = awaiting_reports(simulate)
    job.head.handle(agent_report(1, "h2"), 0.0)
    actions = job.head.handle(agent_report(0, "h1"), 0.0)
    assert [action.message.rank for action in actions] == [0, 1]
    assert dict(job.head.hosts) == {0: "h1", 1: "h2"}
    job.handle(WorkerSpawned(0, 1), WorkerSpawned(1, 2), AgentLost(1, CLOSED)).wait(1)
    assert [end.host for end in job.outcome.workers] == ["h1", "h2"]
    assert job.lines == ["rank 1 (h2) failed; stopping 1 other"]


def test_agents_that_do_not_report_are_named_with_the_listen_address(simulate):
    job = awaiting_reports(simulate)
    job.handle(agent_report(0, "h1")).wait(121)
    assert job.outcome.reason == "unavailable"
    assert job.outcome.text.startswith("1 of 2 agents reported within 60 s; missing: rank 1")
    assert "It listens at eth0 10.0.0.9:40; --interface chooses another." in job.outcome.text
    assert job.statuses_shown[0][1].startswith("starting agents: 1 of 2 ranks after 2 s, waiting for rank 1")


def test_an_agent_that_goes_away_before_it_has_reported_is_named_with_its_host(simulate):
    job = awaiting_reports(simulate)
    job.handle(agent_report(0, "h1"), AgentConnected(1, "h2"), AgentConnected(7, "h9"), AgentLost(1, CLOSED)).wait(1)
    assert job.outcome.reason == "unavailable"
    assert job.outcome.text == f"the agent of rank 1 (h2) went away before its worker was started: {CLOSED}"


def test_a_job_that_is_being_stopped_sends_no_join(remote_job):
    job = remote_job()
    job.say_hello()
    job.lose(0).wait(1)
    assert job.ranks_sent(Join) == [] and job.verdict.exit_code == 69
