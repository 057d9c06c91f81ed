"""Why agents end: what is held until it is known, and what is told then, the cause first."""

from jaxrun.head.events import AgentLost
from jaxrun.protocol.agent_messages import AgentSignalled, StartFailed, WorkerExited
from jaxrun.supervisor.loss_attribution import Evidence, LossAttribution

ENDED = StartFailed("mpirun ended with status 1 before the job was over")
CLOSED = "the connection to its agent was closed"


def known(**changes):
    values = {"silent": (), "spoke": frozenset(), "ended": None, "by_itself": False, "all_came": True}
    return Evidence(**{**values, **changes})


def held(*events, asked=False, all_came=True):
    suspicion = LossAttribution(answer=1.0)
    suspicion.hold(events, 100.0, all_came=all_came, ask=(lambda: None) if asked else None)
    return suspicion


def test_a_lost_agent_is_told_of_after_a_moment():
    suspicion = held(AgentLost(3, CLOSED))
    assert 100.0 < suspicion.deadline < 100.1
    assert suspicion.explain(known()) == [AgentLost(3, CLOSED)]
    assert suspicion.deadline is None and suspicion.explain(known()) == []


def test_hosts_are_asked_once_and_given_the_time_to_answer():
    asked = []
    suspicion = held()
    for now in (100.0, 100.2):
        suspicion.hold([AgentSignalled(0, 15)], now, all_came=True, ask=lambda: asked.append("all"))
    assert asked == ["all"] and suspicion.probed and suspicion.deadline == 101.0


def test_a_host_that_does_not_answer_comes_before_what_its_loss_brought_about():
    told = held(AgentSignalled(0, 15), AgentLost(1, CLOSED), asked=True).explain(known(silent=(4, 5), ended=ENDED))
    assert [event.rank for event in told] == [4, 5, 0, 1]
    assert told[0] == AgentLost(4, "its host has not answered for 1 s")


def test_an_engine_that_was_killed_is_the_cause():
    assert held(AgentLost(2, CLOSED), asked=True).explain(known(ended=ENDED)) == [ENDED, AgentLost(2, CLOSED)]


def test_an_engine_that_ends_by_itself_did_so_for_the_first_agent_that_had_gone():
    told = held(WorkerExited(0, 1), AgentLost(3, CLOSED), AgentLost(2, CLOSED), asked=True).explain(
        known(ended=ENDED, by_itself=True)
    )
    assert told == [AgentLost(3, CLOSED), WorkerExited(0, 1), AgentLost(2, CLOSED, ended_by_launch_command=True)]


def test_an_agent_whose_worker_had_spoken_or_that_was_signalled_did_not_go_first():
    events = (AgentSignalled(1, 15), AgentLost(1, CLOSED), AgentLost(0, CLOSED), AgentLost(2, CLOSED))
    told = held(*events, asked=True).explain(known(ended=ENDED, by_itself=True, spoke=frozenset({0})))
    assert told[0] == AgentLost(2, CLOSED) and ENDED not in told


def test_an_engine_that_could_not_start_all_is_the_cause_of_the_ends_of_those_that_came():
    suspicion = held(AgentLost(0, CLOSED), asked=True, all_came=False)
    told = suspicion.explain(known(ended=ENDED, by_itself=True, all_came=False))
    assert told == [ENDED, AgentLost(0, CLOSED)]


def test_a_scheduler_that_signals_all_is_not_taken_for_an_engine_that_failed():
    told = held(AgentSignalled(0, 15), AgentSignalled(1, 15), asked=True).explain(known(ended=ENDED))
    assert told == [AgentSignalled(0, 15), AgentSignalled(1, 15)]
