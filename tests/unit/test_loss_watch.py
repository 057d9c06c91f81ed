"""The supervisor finds out why agents end: of many losses the cause is passed on first."""

from types import SimpleNamespace

import pytest

from jaxrun.controller.supervisor.loss_watch import Evidence, LossWatch, explain_losses
from jaxrun.protocol.agent_messages import AgentSignalled, StartFailed, WorkerExited
from jaxrun.records.event_log.events import AgentLost
from jaxrun.spec.job.plan import LaunchCommand

ENDED = StartFailed("mpirun ended with status 1 before the job was over")
CLOSED = "the connection to its agent was closed"


def evidence(**changes):
    values = {"unanswered": (), "failure_reported": frozenset(), "launch_end": None, "all_reported": True}
    return Evidence(**{**values, "launch_failed": False, "launch_killed": False, **changes})


def make_losses(launch_status=None, *, agents_stay=False):
    """A LossWatch of a job of one rank; `told` are the events that reach its head, `probes` counts those of hosts."""
    launch = SimpleNamespace(
        status=launch_status, failed=True, was_killed=False, describe_failure=lambda *known: ENDED.text
    )
    launch.command = LaunchCommand("", "mpirun", (), agents_stay=agents_stay)
    watch = LossWatch(
        SimpleNamespace(dispatcher=SimpleNamespace(hosts={0: "h1"}), clock=lambda: watch.now),
        launch,
        SimpleNamespace(
            probe=lambda: watch.probes.append(watch.now), unanswered_agents=list, agents={0: (0,)}, waiting=frozenset()
        ),
        lambda event: watch.told.append(event),
        attached=False,
    )
    watch.now, watch.told, watch.probes, watch.reported, watch.launch = 100.0, [], [], {0}, launch
    return watch


@pytest.fixture
def losses():
    return make_losses()


def test_a_lost_agent_is_passed_on_after_a_moment(losses):
    losses.hold(AgentLost(3, CLOSED), probe=False)
    assert 100.0 < losses.deadline < 100.1
    losses.tell()
    losses.tell()
    assert losses.told == [AgentLost(3, CLOSED)] and losses.deadline is None
    losses.reported = set()
    losses.hold(AgentLost(3, CLOSED), probe=False)
    assert losses.deadline == 100.5


def test_a_launch_command_that_ends_one_agent_after_the_other_is_given_the_time_to_end(losses):
    for lost in LOST[:2]:
        losses.hold(lost, probe=False)
    assert losses.deadline == 100.5
    losses.launch.status = 9
    losses.hold(probe=True)
    losses.tell()
    assert losses.told == [LOST[0], AgentLost(1, CLOSED, ended_by_launch_command=True)]


def test_hosts_are_probed_once_and_given_the_time_to_answer(losses):
    for losses.now in (100.0, 100.2):
        losses.hold(AgentSignalled(0, 15), probe=True)
    assert losses.probes == [100.0] and losses.deadline == 101.0


def test_the_end_of_a_launch_command_is_the_end_of_a_job_whose_agents_do_not_stay(losses):
    losses.launch.status = 1
    losses.hold(probe=True)
    losses.tell()
    assert losses.told == [ENDED]


@pytest.mark.parametrize("ended_before", [True, False], ids=["in an earlier attempt", "in this one"])
def test_a_launch_command_that_agents_outlive_is_no_cause_of_what_is_lost_later(ended_before):
    losses = make_losses(1 if ended_before else None, agents_stay=True)
    if not ended_before:
        losses.launch.status = 1
        losses.hold(probe=True)
        losses.tell()
    losses.hold(*LOST[:2], probe=False)
    losses.tell()
    assert losses.told == LOST[:2]


def test_agents_that_are_lost_with_the_launch_command_went_with_it():
    losses = make_losses(agents_stay=True)
    losses.launch.status = 1
    losses.hold(*LOST[:2], probe=True)
    losses.tell()
    assert losses.told == [LOST[0], AgentLost(1, CLOSED, ended_by_launch_command=True)]


LOST = [AgentLost(rank, CLOSED) for rank in range(4)]
TERM = [AgentSignalled(rank, 15) for rank in range(2)]
FAILED = {"launch_end": ENDED, "launch_failed": True}
# What was held, the evidence, and what is passed on, the cause first.
CAUSES = {
    "a host that does not answer": (
        [TERM[0], LOST[1]],
        {"unanswered": (4, 5), "launch_end": ENDED},
        [*(AgentLost(rank, "its host has not answered for 1 s") for rank in (4, 5)), TERM[0], LOST[1]],
    ),
    "a launch command that was killed": ([LOST[2]], {"launch_end": ENDED}, [ENDED, LOST[2]]),
    "the first agent that was lost, of a launch command that fails": (
        [WorkerExited(0, 1), LOST[3], LOST[2]],
        FAILED,
        [LOST[3], WorkerExited(0, 1), AgentLost(2, CLOSED, ended_by_launch_command=True)],
    ),
    "an agent that was not signalled, and whose worker had not failed": (
        [TERM[1], LOST[1], LOST[0], LOST[2]],
        {**FAILED, "failure_reported": frozenset({0})},
        [LOST[2], TERM[1], *(AgentLost(rank, CLOSED, ended_by_launch_command=True) for rank in (1, 0))],
    ),
    "a launch command that could not start all agents": (
        [LOST[0]],
        {**FAILED, "all_reported": False},
        [ENDED, LOST[0]],
    ),
    "a scheduler that signals all": (TERM, {"launch_end": ENDED}, TERM),
    "a launch command that was killed, whose daemons signal all": (
        TERM,
        {"launch_end": ENDED, "launch_killed": True},
        [ENDED, *TERM],
    ),
}


@pytest.mark.parametrize(("held", "known", "explained"), CAUSES.values(), ids=CAUSES)
def test_the_cause_of_losses_is_passed_on_first(held, known, explained):
    assert explain_losses(held, evidence(**known), "its host has not answered for 1 s") == explained
