"""Why agents end: what is held until it is known, and what is told then, the cause first."""

from jaxrun.head.events import AgentSignalled, Exited, Lost, Unavailable
from jaxrun.station.suspicion import Known, Suspicion

ENDED = Unavailable("mpirun ended with status 1 before the job was over")
CLOSED = "the connection to its agent was closed"


def known(**changes):
    values = {"silent": (), "spoke": frozenset(), "ended": None, "by_itself": False, "all_came": True}
    return Known(**{**values, **changes})


def held(*events, asked=False, all_came=True):
    suspicion = Suspicion(answer=1.0)
    suspicion.hold(events, 100.0, all_came=all_came, ask=(lambda: None) if asked else None)
    return suspicion


def test_a_lost_agent_is_told_of_after_a_moment():
    suspicion = held(Lost(3, CLOSED))
    assert 100.0 < suspicion.due < 100.1
    assert suspicion.explain(known()) == [Lost(3, CLOSED)]
    assert suspicion.due is None and suspicion.explain(known()) == []


def test_hosts_are_asked_once_and_given_the_time_to_answer():
    asked = []
    suspicion = held()
    for now in (100.0, 100.2):
        suspicion.hold([AgentSignalled(0, 15)], now, all_came=True, ask=lambda: asked.append("all"))
    assert asked == ["all"] and suspicion.asked and suspicion.due == 101.0


def test_a_host_that_does_not_answer_comes_before_what_its_loss_brought_about():
    told = held(AgentSignalled(0, 15), Lost(1, CLOSED), asked=True).explain(known(silent=(4, 5), ended=ENDED))
    assert [event.rank for event in told] == [4, 5, 0, 1]
    assert told[0] == Lost(4, "its host has not answered for 1 s")


def test_an_engine_that_was_killed_is_the_cause():
    assert held(Lost(2, CLOSED), asked=True).explain(known(ended=ENDED)) == [ENDED, Lost(2, CLOSED)]


def test_an_engine_that_ends_by_itself_did_so_for_the_first_agent_that_had_gone():
    told = held(Exited(0, 1), Lost(3, CLOSED), Lost(2, CLOSED), asked=True).explain(known(ended=ENDED, by_itself=True))
    assert told == [Lost(3, CLOSED), Exited(0, 1), Lost(2, CLOSED, by_engine=True)]


def test_an_agent_whose_worker_had_spoken_or_that_was_signalled_did_not_go_first():
    events = (AgentSignalled(1, 15), Lost(1, CLOSED), Lost(0, CLOSED), Lost(2, CLOSED))
    told = held(*events, asked=True).explain(known(ended=ENDED, by_itself=True, spoke=frozenset({0})))
    assert told[0] == Lost(2, CLOSED) and ENDED not in told


def test_an_engine_that_could_not_start_all_is_the_cause_of_the_ends_of_those_that_came():
    suspicion = held(Lost(0, CLOSED), asked=True, all_came=False)
    told = suspicion.explain(known(ended=ENDED, by_itself=True, all_came=False))
    assert told == [ENDED, Lost(0, CLOSED)]


def test_a_scheduler_that_signals_all_is_not_taken_for_an_engine_that_failed():
    told = held(AgentSignalled(0, 15), AgentSignalled(1, 15), asked=True).explain(known(ended=ENDED))
    assert told == [AgentSignalled(0, 15), AgentSignalled(1, 15)]
