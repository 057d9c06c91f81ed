"""Why agents end: events are held until their cause is known, and passed on after that cause."""

from jaxrun.head.events import AgentLost
from jaxrun.protocol.agent_messages import AgentSignalled, StartFailed, WorkerExited
from jaxrun.supervisor.loss_attribution import Evidence, LossAttribution

ENDED = StartFailed("mpirun ended with status 1 before the job was over")
CLOSED = "the connection to its agent was closed"


def evidence(**changes):
    values = {"unanswered": (), "failure_reported": frozenset(), "launch_end": None, "launch_failed": False}
    return Evidence(**{**values, "all_reported": True, **changes})


def attribution(*events, probed=False, all_reported=True):
    losses = LossAttribution(probe_timeout_s=1.0)
    losses.hold(events, 100.0, all_reported=all_reported, probe=(lambda: None) if probed else None)
    return losses


def test_a_lost_agent_is_passed_on_after_a_moment():
    losses = attribution(AgentLost(3, CLOSED))
    assert 100.0 < losses.deadline < 100.1
    assert losses.explain(evidence()) == [AgentLost(3, CLOSED)]
    assert losses.deadline is None and losses.explain(evidence()) == []


def test_hosts_are_probed_once_and_given_the_time_to_answer():
    probes = []
    losses = attribution()
    for now in (100.0, 100.2):
        losses.hold([AgentSignalled(0, 15)], now, all_reported=True, probe=lambda: probes.append("all"))
    assert probes == ["all"] and losses.probed and losses.deadline == 101.0


def test_a_host_that_does_not_answer_comes_before_what_its_loss_brought_about():
    explained = attribution(AgentSignalled(0, 15), AgentLost(1, CLOSED), probed=True).explain(
        evidence(unanswered=(4, 5), launch_end=ENDED)
    )
    assert [event.rank for event in explained] == [4, 5, 0, 1]
    assert explained[0] == AgentLost(4, "its host has not answered for 1 s")


def test_a_launch_command_that_was_killed_is_the_cause():
    assert attribution(AgentLost(2, CLOSED), probed=True).explain(evidence(launch_end=ENDED)) == [
        ENDED,
        AgentLost(2, CLOSED),
    ]


def test_a_launch_command_that_fails_did_so_for_the_first_agent_that_was_lost():
    explained = attribution(WorkerExited(0, 1), AgentLost(3, CLOSED), AgentLost(2, CLOSED), probed=True).explain(
        evidence(launch_end=ENDED, launch_failed=True)
    )
    assert explained == [AgentLost(3, CLOSED), WorkerExited(0, 1), AgentLost(2, CLOSED, ended_by_launch_command=True)]


def test_an_agent_whose_worker_had_failed_or_that_was_signalled_is_not_the_cause():
    events = (AgentSignalled(1, 15), AgentLost(1, CLOSED), AgentLost(0, CLOSED), AgentLost(2, CLOSED))
    explained = attribution(*events, probed=True).explain(
        evidence(launch_end=ENDED, launch_failed=True, failure_reported=frozenset({0}))
    )
    assert explained[0] == AgentLost(2, CLOSED) and ENDED not in explained


def test_a_launch_command_that_could_not_start_all_agents_is_the_cause_of_the_loss_of_others():
    losses = attribution(AgentLost(0, CLOSED), probed=True, all_reported=False)
    explained = losses.explain(evidence(launch_end=ENDED, launch_failed=True, all_reported=False))
    assert explained == [ENDED, AgentLost(0, CLOSED)]


def test_a_scheduler_that_signals_all_is_not_taken_for_a_launch_command_that_failed():
    explained = attribution(AgentSignalled(0, 15), AgentSignalled(1, 15), probed=True).explain(
        evidence(launch_end=ENDED)
    )
    assert explained == [AgentSignalled(0, 15), AgentSignalled(1, 15)]
