"""The agents in the launcher's own process: what they report, and what they do with the orders of the head."""

from types import MappingProxyType

import pytest

from jaxrun.controller.supervisor.local_job import LocalAgents
from jaxrun.protocol.agent_messages import AgentReport, ClockProbe, ClockReply, StartWorkers
from jaxrun.protocol.probe_messages import Gpus, Machine, PeerResults, ProbePeers
from jaxrun.protocol.staging_messages import CopyStaged, StagedCopied
from jaxrun.spec.backends.local import plan
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.worker_assignment import LauncherSettings, assign_workers

JOB_ID = "ab" * 16
BOX = Machine("box", (0, 1, 2, 3), {"cuda": Gpus()}, all_cores=4)
ENVIRON = MappingProxyType({"HOME": "/home/me"})


class PreparedError(Exception):
    """The workers were about to start."""


class Workers:
    """LocalWorkers that only note what they were to start."""

    def prepare(self, starts, *, restarts):
        self.starts, self.restarts = starts, restarts
        raise PreparedError


class Head:
    """An AttemptHead that notes its events."""

    def __init__(self):
        self.events = []
        self.handle = self.events.append


class Attempt:
    """The agents of a job of four ranks on two simulated hosts."""

    def __init__(self, **wanted):
        job = Job(program=("train.py",), processes=4, simulated_hosts=2, platform="cpu", **wanted)
        self.plan = plan(job, ENVIRON, JOB_ID, BOX)
        self.head, self.workers = Head(), Workers()
        self.agents = LocalAgents(None, self.head, self.plan, self.workers, "127.0.0.1")
        self.agents.report({})

    def orders(self):
        """What the head orders each agent to start."""
        reports = {rank: self.plan.reports[agent] for agent in (0, 1) for rank in self.plan.placement.agents[agent]}
        starts = assign_workers(self.plan, reports, LauncherSettings(ENVIRON)).starts
        return StartWorkers(starts[:2]), StartWorkers(starts[2:])


def test_each_simulated_host_reports_at_once_and_both_are_one_machine():
    reports = Attempt().head.events
    assert [type(report) for report in reports] == [AgentReport] * 2
    assert [(report.agent, report.host, report.size, report.attempt) for report in reports] == [
        (0, "h1", 4, 1),
        (1, "h2", 4, 1),
    ]
    assert reports[0].machine == reports[1].machine and reports[0].boot_id == reports[1].boot_id
    assert len({report.simulated_boot_id for report in reports} - {""}) == 2


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_the_workers_of_all_hosts_start_together_once_the_last_agent_has_its_orders(max_restarts):
    attempt = Attempt(max_restarts=max_restarts)
    first, second = attempt.orders()
    attempt.agents.send_to_agents((1,), second)
    with pytest.raises(PreparedError):
        attempt.agents.send_to_agents((0,), first)
    assert [start.worker.rank for start in attempt.workers.starts] == [0, 1, 2, 3]
    assert attempt.workers.restarts is bool(max_restarts)


def test_simulated_hosts_share_the_cores_and_count_their_ranks_by_themselves():
    starts = [start for order in Attempt(bind="cores").orders() for start in order.workers]
    assert [start.worker.cpus for start in starts] == [(0,), (1,), (2,), (3,)]
    assert [(start.worker.local_rank, start.worker.local_size) for start in starts] == [(0, 2), (1, 2)] * 2
    assert {start.environment["OMP_NUM_THREADS"] for start in starts} == {"1"}


@pytest.mark.parametrize(
    ("order", "answer"),
    [(CopyStaged("", 0), StagedCopied), (ClockProbe(7.0), ClockReply), (ProbePeers({}, {}), PeerResults)],
)
def test_questions_about_a_host_are_answered_at_once(order, answer):
    attempt = Attempt()
    attempt.agents.send_to_agents((0, 1), order)
    said = attempt.head.events[2:]
    assert [type(one) for one in said] == [answer] * 2 and [one.agent for one in said] == [0, 1]
    assert not getattr(said[0], "error", "") and not getattr(said[0], "errors", {})


def test_orders_for_ranks_that_have_not_started_are_nobodys():
    attempt = Attempt()
    attempt.agents.send((0, 1, 2, 3), ClockProbe(1.0))
    attempt.agents.look_for_hosts((0,))
    assert len(attempt.head.events) == 2
