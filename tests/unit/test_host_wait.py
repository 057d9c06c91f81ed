"""A job that waits for a lost host (--wait-hosts): what the head does, where the next attempt runs, and what counts."""

import signal
from pathlib import Path

import pytest
from msgspec.structs import replace
from remote_plans import CLOSED, INIT, WAIT, follow, hand_plan, mpirun_plan, with_placement
from simulation import JOB_ID, report, seated

from jaxrun.analysis.diagnosis.job_end import HostsNotBack, LostAtStart, Unavailable
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.verdict.restarts import Restart, Stop, decide_restart, summarize_end
from jaxrun.cli.make_job import make_job
from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.head.consistency import Expected
from jaxrun.controller.head.head import Head
from jaxrun.controller.head.head_state import HeadJob, TimeLimits
from jaxrun.controller.head.host_wait import LOOK_INTERVAL_S
from jaxrun.controller.roster import Roster
from jaxrun.controller.supervisor.attempt_loop import make_head
from jaxrun.controller.supervisor.next_attempt_hosts import plan_next_attempt
from jaxrun.controller.supervisor.quarantine_decision import decide_quarantine
from jaxrun.errors import UsageError
from jaxrun.job_events.actions import AnswerRequest, Finish, LookForHosts, PrintLine, SendToAgents
from jaxrun.job_events.events import AgentLost, HostsFound, LauncherSignalled, Requested, Tick
from jaxrun.protocol.agent_messages import AgentSignalled, StartWorkers
from jaxrun.protocol.job_messages import OverviewRequest
from jaxrun.protocol.job_record import AttemptEnd, JobRecord
from jaxrun.protocol.probe_messages import Machine
from jaxrun.protocol.worker_messages import MpiImported
from jaxrun.spec.engines import by_hand
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.worker_assignment import LauncherSettings


class Starting:
    """The head of an attempt that begins without some agents. Times are seconds since its start."""

    def __init__(self, plan, awaited):
        self.plan = plan = with_placement(plan, awaited=awaited)
        registry = AgentRegistry(self.plan, LauncherSettings({}, "", ""), Roster.of(plan))
        size = len(plan.workers)
        limits, expected = TimeLimits(INIT, None, 5.0, 30.0), Expected(size, "", "cpu", 1)
        self.head = Head(HeadJob(plan.host_of, plan.placement.agents, expected, limits), 0.0, registry)
        self.now, self.actions = 0.0, []

    def handle(self, *events):
        for event in events:
            self.actions += self.head.handle(event, self.now)
        return self

    def wait(self, seconds):
        until = self.now + seconds
        while (alarm := self.head.deadline()) is not None and alarm <= until:
            self.now = max(self.now, alarm)
            self.handle(Tick())
        self.now = until
        return self

    def report(self, *agents, host=""):
        size = len(self.plan.workers)
        return self.handle(*(report(agent, host or f"h{agent + 1}", size) for agent in agents))

    def of(self, kind):
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def lines(self):
        return [action.text for action in self.of(PrintLine) if not action.status]

    @property
    def starts(self):
        return [action.agents for action in self.of(SendToAgents) if isinstance(action.message, StartWorkers)]

    @property
    def outcome(self):
        return next((action.outcome for action in self.of(Finish)), None)


@pytest.fixture
def waiting():
    """One command a host; that of h3 is missing, the others are there."""
    return Starting(hand_plan(), {2: "h3"}).wait(0.5).report(0, 1)


# ---- what the head does


def test_it_is_said_who_is_awaited_and_for_how_long_still(waiting):
    assert waiting.lines == ["waiting for h3 (rank 2), 5 min 0 s more (--wait-hosts)"]
    waiting.wait(99.5)
    shown = [action.text for action in waiting.of(PrintLine) if action.status]
    assert shown[-1] == "waiting for h3 (rank 2), 3 min 20 s more (--wait-hosts)"
    assert waiting.lines[1:] == []
    waiting.handle(Requested("1.1", OverviewRequest()))
    (answer,) = waiting.of(AnswerRequest)
    assert answer.answer.content.awaited == shown[-1]


@pytest.mark.parametrize(
    ("host", "line"),
    [
        ("h3", "h3 (rank 2) is back after 4 min 59 s"),
        ("h9", "h9 takes the place of h3 (rank 2) after 4 min 59 s"),
    ],
)
def test_the_workers_start_once_the_host_or_another_in_its_place_is_there(waiting, host, line):
    waiting.wait(WAIT - 1.5)
    assert not waiting.starts
    waiting.report(2, host=host)
    assert waiting.lines[1:] == [line] and waiting.starts == [(0,), (1,), (2,)]


def test_sigquit_shows_who_is_awaited(waiting):
    waiting.handle(LauncherSignalled(signal.SIGQUIT))
    assert waiting.lines[-1] == "agents: rank 2 (h3) awaited"


def test_the_time_for_the_start_counts_from_when_the_host_is_there(waiting):
    waiting.wait(INIT * 2).report(2).wait(INIT - 1)
    assert waiting.outcome is None
    waiting.wait(2)
    assert type(waiting.outcome.end) is Unavailable


def test_when_the_time_is_over_the_attempt_ends_and_names_the_host(waiting):
    waiting.wait(WAIT - 0.6)
    assert waiting.outcome is None
    waiting.wait(0.2)
    text = "h3 (rank 2) was not back within 5 min 0 s (--wait-hosts)"
    assert waiting.outcome.end == HostsNotBack(text, ranks=(2,))


def test_a_host_lost_while_the_job_waits_is_waited_for_as_well(waiting):
    waiting.wait(200).handle(AgentLost(1, CLOSED)).wait(0.5)
    assert waiting.lines[-1].startswith("waiting for h3 (rank 2), h2 (rank 1), ") and waiting.outcome is None
    waiting.report(2).wait(WAIT - 1)
    assert waiting.outcome is None
    waiting.report(1)
    assert waiting.starts == [(0,), (1,), (2,)]


def test_a_host_whose_own_time_is_not_over_is_not_said_to_be_late(waiting):
    waiting.wait(WAIT - 10).handle(AgentLost(1, CLOSED)).wait(20)
    text = "h3 (rank 2) was not back within 5 min 0 s (--wait-hosts)"
    assert waiting.outcome.end == HostsNotBack(text, ranks=(2,))


def test_a_host_that_is_there_again_and_lost_again_has_all_the_time_anew(waiting):
    waiting.wait(200).handle(AgentLost(1, CLOSED)).report(1, 2)
    assert waiting.starts
    again = Starting(hand_plan(), {2: "h3"}).wait(0.5).report(0).wait(250).report(2)
    again.handle(AgentLost(2, CLOSED)).wait(250)
    assert again.outcome is None
    again.wait(60)
    assert again.outcome.end.ranks == (2,)


def test_the_first_attempt_waits_too_and_nobody_waits_for_the_agent_of_the_heads_own_host():
    first = Starting(hand_plan(), {}).report(0, 1).handle(AgentLost(1, CLOSED)).report(1, 2)
    assert first.starts == [(0,), (1,), (2,)]
    lost = Starting(hand_plan(), {}).report(0, 1).handle(AgentLost(0, CLOSED))
    assert isinstance(lost.outcome.end, Unavailable)
    never = Starting(hand_plan(wait_hosts=None), {}).report(0, 1).handle(AgentLost(1, CLOSED))
    assert isinstance(never.outcome.end, Unavailable)


def test_an_engine_looks_for_the_host_again_and_again_and_has_time_to_start_its_agent():
    job = Starting(mpirun_plan(), {2: "h2"}).wait(0)
    assert job.of(LookForHosts) == [LookForHosts((2,))]
    job.wait(100)
    assert len(job.of(LookForHosts)) == 1  # until the look is over
    job.handle(HostsFound(())).wait(LOOK_INTERVAL_S + 0.1)
    assert len(job.of(LookForHosts)) == 2
    job.handle(HostsFound(("h2",))).wait(LOOK_INTERVAL_S + 0.1)
    assert len(job.of(LookForHosts)) == 2
    by_people = Starting(hand_plan(), {2: "h3"}).wait(100)
    assert not by_people.of(LookForHosts)


def test_a_host_lost_after_all_have_reported_and_before_the_workers_are_there_is_waited_for_in_the_first_attempt_too():
    plan = hand_plan(min_hosts=2)
    first = Starting(plan, {}).report(0, 1, 2).handle(AgentLost(2, CLOSED))
    assert first.starts and first.outcome.end.text.startswith("the agent of rank 2 (h3) was lost before it started")
    assert first.outcome.end.lost == {2: CLOSED}
    assert summarize_end(first.outcome, has_run_before=False) == AttemptEnd("lost")
    following = follow(plan, first.outcome, {0, 1}, reported={0, 1, 2}).placement
    assert following.awaited == {2: "h3"} and not following.is_smaller
    nobody_waits = replace(plan, job=replace(plan.job, wait_hosts=None))
    assert follow(nobody_waits, first.outcome, {0, 1}, reported={0, 1, 2}).placement.is_smaller


def test_an_engines_host_lost_before_its_workers_are_there_is_one_to_avoid():
    outcome = JobOutcome(LostAtStart("x", lost={1: CLOSED}))
    plan = mpirun_plan(("h1", "h2", "h3"), min_hosts=2, wait_hosts=None)
    roster = seated(plan, {0, 1, 2}, reported={0, 1, 2})
    roster.lose(1, CLOSED, is_silent=True)
    assert decide_quarantine(plan, roster, outcome).hosts == {"h2": f"lost: {CLOSED}"}
    end = plan_next_attempt(plan, roster, outcome, (), {"PATH": ""})
    assert end.why.startswith("the job cannot be placed on other hosts")


def test_it_is_said_once_that_a_program_with_mpi_is_not_waited_for():
    job = Starting(mpirun_plan(), {})
    job.handle(MpiImported(0), MpiImported(1))
    assert len(job.lines) == 1 and "imports mpi4py.MPI, so a lost host is not waited for" in job.lines[0]
    later = replace(mpirun_plan(), attempt=2)
    for silent in (Starting(mpirun_plan(wait_hosts=None), {}), Starting(hand_plan(), {}), Starting(later, {})):
        assert not silent.handle(MpiImported(0)).lines


# ---- pods that go away


def drained(simulate, *signals, between=0.21):
    """A job of three pods, none of whose ranks listens, after signals: (agent, or None for the launcher, signal)."""
    job = simulate(3, hosts={0: "h1", 1: "h2", 2: "h3"}, drains=True).run()
    for agent, signum in signals:
        job.handle(LauncherSignalled(signum) if agent is None else AgentSignalled(agent, signum))
        job.now += between
    return job.wait(40)


@pytest.mark.parametrize(
    ("signals", "leaving"),
    [
        ([(1, 15)], {1}),
        ([(1, 15), (2, 15)], {1, 2}),  # a second pod does not hurry the first
        ([(None, 15)], {0}),
        ([(2, 15), (None, 15)], {0, 2}),
        ([(1, 15), (1, 15)], set()),  # told twice, somebody wants the end
        ([(1, 2)], set()),
        ([(1, 15), (None, 2)], set()),
    ],
)
def test_sigterm_in_a_pod_says_that_this_pod_goes_away(simulate, signals, leaving):
    job = drained(simulate, *signals)
    assert job.outcome.drained == leaving
    assert (job.outcome.waits_for_pods, job.outcome.head_leaves) == (bool(leaving) and 0 not in leaving, 0 in leaving)


def test_one_signal_to_all_processes_of_a_pod_counts_once(simulate):
    assert drained(simulate, (None, 15), (0, 15), between=0).outcome.head_leaves
    assert drained(simulate, (1, 15), (1, 15), between=0).outcome.drained == {1}


def test_a_drained_pod_is_named_and_its_host_awaited_without_counting_a_restart(simulate):
    outcome = drained(simulate, (1, 15)).outcome
    plan = hand_plan()
    end = summarize_end(outcome, has_run_before=False)
    assert isinstance(decide_restart((end, end, end), 1, "lost"), Restart)
    following = follow(plan, outcome, {0, 2}).placement
    assert following.awaited == {1: "h2"} and not following.is_smaller


def test_the_head_that_goes_away_leaves_the_job_to_the_one_that_takes_its_place(simulate):
    job = drained(simulate, (None, 15))
    decision = decide_restart((summarize_end(job.outcome, has_run_before=False),), 1, "failure")
    assert isinstance(decision, Stop) and "the other pods keep the job" in decision.why
    assert job.lines[0] == "the pod of h1 goes away; the others stay until another takes its place (--wait-hosts)"


def test_pods_know_their_job_by_its_token_where_their_run_directory_may_outlive_them():
    def known(environ, **wanted):
        job = Job(program=("train.py",), backend="hosts", platform="cpu", hosts=1, host_rank=0, head="h1:7", **wanted)
        return by_hand.plan(job, environ, JOB_ID, Machine("h1", (0, 1), {}, False, False)).requeue_id

    kept, pod = {"run_dir": Path("/jaxrun-runs/1")}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    one, other = (known(pod | {"JAXRUN_TOKEN": token * 32}, **kept) for token in "ab")
    assert one != other and "a" * 32 not in one and one == known(pod | {"JAXRUN_TOKEN": "a" * 32}, **kept)
    assert known({"JAXRUN_TOKEN": "a" * 32}, **kept) == known(pod | {"JAXRUN_TOKEN": "a" * 32}) == known(pod) == ""


# ---- what counts


def test_waiting_in_vain_for_a_host_does_not_count_as_a_restart():
    in_vain = summarize_end(JobOutcome(HostsNotBack("x", ranks=(1,))), has_run_before=True)
    assert isinstance(decide_restart((AttemptEnd("lost"), in_vain), 1, "lost"), Restart)
    assert isinstance(decide_restart((AttemptEnd("lost"), in_vain, AttemptEnd("lost")), 1, "failure"), Stop)
    asked = JobOutcome(HostsNotBack("x", ranks=(1,)), stop_requested=True)
    assert isinstance(decide_restart((summarize_end(asked, has_run_before=True),), 1, "failure"), Stop)


def test_it_needs_restarts():
    with pytest.raises(UsageError, match="--wait-hosts 300 needs --max-restarts"):
        hand_plan(max_restarts=0)
    with pytest.raises(UsageError, match=r"--wait-hosts is for .*not for --backend local"):
        make_job({"program": ("t.py",), "max_restarts": 1, "wait_hosts": 5.0}, {})


@pytest.mark.parametrize(
    ("given", "wait"),
    [({}, 0.0), ({"max_restarts": 2}, 600.0), ({"max_restarts": 2, "wait_hosts": 0.0}, 0.0)],
    ids=["off without restarts", "on", "off if so asked"],
)
def test_in_a_pod_it_is_on_where_there_are_restarts(given, wait):
    of_host = {"program": ("t.py",), "hosts": 2, "host_rank": 1, "head": "h1:7", "processes": 2, **given}
    assert make_job(of_host, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).host_wait == wait
    assert make_job({**of_host, **given}, {}).host_wait == given.get("wait_hosts", 0.0)


def test_an_awaited_host_has_its_name_from_the_start():
    class Shared:
        started, environ = 0.0, {}

    plan, began = with_placement(hand_plan(), awaited={2: "h3"}), JobRecord("", "", 1, 0.0, 0.0)
    registry = AgentRegistry(plan, LauncherSettings({}, "", ""), Roster.of(plan))
    assert make_head(plan, Shared(), began, registry).hosts[2] == "h3"
