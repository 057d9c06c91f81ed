"""Who has which place in a job: one table of what can happen to a seat, and what follows."""

import pytest
from msgspec.structs import replace
from remote_plans import hand_plan
from simulation import report, seated

from jaxrun.controller.roster import Roster
from jaxrun.controller.seat import (
    Admit,
    AskHost,
    Claim,
    Close,
    Dismiss,
    Lose,
    Name,
    Recall,
    Refuse,
    Seat,
    SeatEvent,
    SeatState,
    Take,
    Wait,
    decide_claim,
    next_state,
)
from jaxrun.protocol.agent_messages import AgentConnected, AgentSignalled, WorkerExited
from jaxrun.spec.backends.remote_plan import plan_remote
from jaxrun.spec.engines.open_mpi import OPEN_MPI
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import LaunchCommand

CALLED, CONNECTED, REPORTED, RUNNING = SeatState.CALLED, SeatState.CONNECTED, SeatState.REPORTED, SeatState.RUNNING
SPARE, EXCLUDED, DRAINED = SeatState.SPARE, SeatState.EXCLUDED, SeatState.DRAINED
SUSPECTED, LOST, AWAITED = SeatState.SUSPECTED, SeatState.LOST, SeatState.AWAITED
CLOSED, SILENCE = "the connection to its agent was closed", "nothing was heard from its host for 2 s"


# What happens to a seat with ranks in each state, and what follows; nothing else changes a state.
STATES = {
    SeatEvent.CALL: dict.fromkeys(SeatState, CALLED),
    SeatEvent.SPEAK: {CALLED: CONNECTED, LOST: CONNECTED, AWAITED: CONNECTED},
    SeatEvent.REPORT: {CALLED: REPORTED, CONNECTED: REPORTED, LOST: REPORTED, AWAITED: REPORTED},
    SeatEvent.RUN: {REPORTED: RUNNING},
    SeatEvent.VANISH: dict.fromkeys((CALLED, CONNECTED, REPORTED, RUNNING, SPARE, EXCLUDED, AWAITED), SUSPECTED),
    SeatEvent.EXPLAIN: {SUSPECTED: LOST},
    SeatEvent.AWAIT: dict.fromkeys((CALLED, CONNECTED, REPORTED, RUNNING, SPARE, EXCLUDED, LOST, AWAITED), AWAITED),
    SeatEvent.TURN_AWAY: dict.fromkeys((CONNECTED, REPORTED, RUNNING, SPARE, EXCLUDED, AWAITED), CALLED),
    SeatEvent.DRAIN: dict.fromkeys(SeatState, DRAINED),
    SeatEvent.SEAT: {SPARE: CALLED},
}
# The same of a seat without ranks, where it differs.
WAITING = {
    SeatEvent.CALL: {},
    SeatEvent.REPORT: {CALLED: SPARE, CONNECTED: SPARE, LOST: SPARE},
    SeatEvent.VANISH: dict.fromkeys((CALLED, CONNECTED, REPORTED, RUNNING, SPARE, EXCLUDED), LOST),
}


@pytest.mark.parametrize("state", SeatState, ids=lambda state: state.value)
@pytest.mark.parametrize("event", SeatEvent, ids=lambda event: event.name)
def test_what_follows_in_each_state(state, event):
    assert next_state(state, event, has_ranks=True) is STATES[event].get(state, state)
    assert next_state(state, event, has_ranks=False) is {**STATES, **WAITING}[event].get(state, state)


CONNECTED_SEAT, LINKLESS = Seat(1, ranks=(1,), state=CONNECTED, link=7), Seat(1, ranks=(1,), state=LOST)
JUST_LOST, FORSAKEN = replace(LINKLESS, state=SUSPECTED), replace(CONNECTED_SEAT, state=AWAITED)


@pytest.mark.parametrize(
    ("seat", "waits", "runs", "is_report", "wanted"),
    [
        (LINKLESS, True, True, True, Claim.ADMIT),
        (CONNECTED_SEAT, False, False, True, Claim.NAME),  # the head names both
        (CONNECTED_SEAT, False, True, True, Claim.REFUSE),
        (replace(CONNECTED_SEAT, ranks=()), False, False, True, Claim.REFUSE),  # the program can begin without both
        (CONNECTED_SEAT, False, False, False, Claim.IGNORE),  # a second path of the same agent
        (CONNECTED_SEAT, True, False, True, Claim.CONTEND),
        (CONNECTED_SEAT, True, True, False, Claim.CONTEND),
        (JUST_LOST, True, True, True, Claim.CONTEND),  # the head must learn of the loss first
        (JUST_LOST, False, True, True, Claim.ADMIT),
        (FORSAKEN, True, False, True, Claim.ADMIT),  # it has not answered since the attempt before
    ],
)
def test_what_becomes_of_another_agents_message(seat, waits, runs, is_report, wanted):
    assert decide_claim(seat, waits=waits, runs=runs, is_report=is_report) is wanted


def plan_of(spares=("h3",), **wanted):
    """Two ranks on h1 and h2, and an agent that waits on each spare host."""
    hosts = ("h1", "h2")
    command = LaunchCommand(OPEN_MPI, "mpirun", (), agent_hosts=(*hosts, *spares), size=2, survive_host_loss=True)
    job = Job(program=("train.py",), backend="mpirun", platform="cpu", processes=2, max_restarts=3, **wanted)
    return plan_remote(job, {}, "ab" * 16, command, hosts, (), spares)


class Story:
    """A roster to which things happen; each call returns the actions. The connection of agent N is 10 + N."""

    def __init__(self, **wanted):
        self.plan = plan_of(**wanted)
        self.roster = Roster.of(self.plan)

    def state(self, agent):
        return self.roster.seats[agent].state

    def connect(self, agent, link=None):
        link = 10 + agent if link is None else link
        return [*self.roster.arrive(link, agent), *self.roster.say(link, AgentConnected(agent, f"h{agent + 1}"))]

    def report(self, agent, **changes):
        said = report(agent, f"h{agent + 1}", 2, **changes)
        self.roster.add_report(said)
        return said

    def run(self):
        for agent in (0, 1):
            self.connect(agent)
            self.report(agent)
        self.roster.run()
        return self

    def begin(self, **placed):
        """Begin the next attempt, with another placement."""
        placement = replace(self.plan.placement, **{"awaited": {}, **placed})
        self.plan = replace(self.plan, attempt=self.plan.attempt + 1, placement=placement)
        return self.roster.begin(self.plan, anew=False)


@pytest.fixture
def story():
    return Story()


@pytest.fixture
def waiting():
    """A job that waits for lost hosts, and runs."""
    return Story(wait_hosts=60.0).run()


def test_an_agent_from_its_call_to_the_end_of_its_host():
    story = Story(wait_hosts=60.0)
    assert story.state(1) is CALLED and story.roster.arrive(11, 1) == [Admit(11, 1)]
    said = AgentConnected(1, "h2")
    assert story.roster.say(11, said) == [Take(11, 1, said)] and story.state(1) is CONNECTED
    story.report(1)
    assert story.state(1) is REPORTED and not story.roster.complete
    story.connect(0)
    story.report(0)
    assert story.roster.complete
    story.roster.run()
    assert story.state(1) is RUNNING
    (lost,) = story.roster.go(11, SILENCE, is_silent=True)
    assert isinstance(lost, Lose) and lost.seat.state is RUNNING
    assert story.state(1) is SUSPECTED and story.roster.suspected == {1}
    story.roster.explain(1)
    assert story.state(1) is LOST and story.roster.all_reported and not story.roster.suspected
    assert story.roster.describe() == f"rank 1 (h2) lost: {SILENCE}; h3 called"
    story.roster.wait_for(1, Wait("h2", 5.0, 65.0))
    assert story.state(1) is AWAITED and not story.roster.complete and [*story.roster.awaited] == [1]
    story.connect(1, 12)
    assert story.state(1) is CONNECTED and story.roster.awaited
    story.report(1)
    assert story.state(1) is REPORTED and not story.roster.awaited


def test_orders_go_to_the_connections_of_ranks_and_name_them_unless_they_are_all_of_an_agent():
    story = Story()
    story.begin(agents={0: (0, 1), 2: ()})
    story.connect(0)
    assert [*story.roster.split((0, 1, 9))] == [(10, None)] and [*story.roster.split((1,))] == [(10, (1,))]
    assert story.roster.links_of((0, 1, 2)) == [10] and story.roster.of_rank(1).agent == 0


def test_of_two_connections_of_an_agent_that_counts_on_which_it_speaks(story):
    story.roster.arrive(20, 0)
    story.connect(0, 21)
    assert story.roster.go(20, CLOSED) == [] and story.state(0) is CONNECTED
    assert [type(action) for action in story.roster.go(21, CLOSED)] == [Lose]


def test_a_stranger_is_for_the_head_to_refuse(story):
    said = report(7, "h8", 2)
    assert story.roster.arrive(17, 7) == [Admit(17, 0)]
    assert story.roster.say(17, said) == [Take(17, 7, said)]
    assert story.roster.go(17, CLOSED) == [Lose(7, CLOSED, None)]
    assert Story().run().roster.arrive(17, 7) == [Refuse(17, 7)]


def test_a_second_agent_is_named_at_the_start_and_refused_later(story):
    story.connect(1)
    story.report(1)
    second = report(1, "h9", 2)
    story.roster.arrive(21, 1)
    assert story.roster.say(21, second) == [Name(second)]
    story.connect(0)
    story.report(0)
    story.roster.run()
    assert story.roster.say(21, second) == [Refuse(21, 1)] and story.roster.say(21, second) == []
    assert story.roster.arrive(22, 1) == [Refuse(22, 1)]


# ---- agents that wait


def test_an_agent_that_waits_is_a_spare_and_its_loss_needs_no_explanation(story):
    story.connect(2)
    story.report(2)
    assert story.state(2) is SPARE and story.roster.usable(()) == {2}
    (lost,) = story.roster.go(12, CLOSED)
    assert (lost.agent, lost.seat.host) == (2, "h3")
    assert story.state(2) is LOST and story.roster.lost_spares() == {"h3": CLOSED} and not story.roster.suspected
    assert story.begin(agents={0: (0,), 1: (1,)}) == [] and story.roster.lost_spares() == {"h3": CLOSED}


def test_a_spare_host_whose_command_fails_is_lost(story):
    story.roster.lose(2, "mpirun ended with status 3")
    assert story.roster.lost_spares() == {"h3": "mpirun ended with status 3"}


def test_an_agent_that_cannot_be_used_takes_no_rank(story):
    story.connect(2)
    story.roster.add_report(report(2, "h3", 2), unusable="failed --host-check: no GPU")
    assert story.state(2) is EXCLUDED and story.roster.usable(()) == set()


def test_a_spare_takes_the_ranks_of_a_lost_host_while_the_program_runs(story):
    story.run().connect(2)
    story.report(2)
    roster = story.roster
    assert roster.find_spare(1) is None, "its host is there"
    roster.go(11, CLOSED)
    placed = roster.find_spare(1)
    assert placed.hosts == ("h1", "h3") and roster.placement is story.plan.placement, "nothing has changed yet"
    roster.explain(1)
    roster.seat_spare(placed)
    assert story.state(2) is CALLED and roster.of_rank(1).agent == 2 and roster.agents == {0: (0,), 2: (1,)}
    assert list(roster.split((0, 1))) == [(10, None), (12, None)]
    assert roster.complete and roster.all_reported and roster.reports.keys() == {0, 2} and not roster.waiting()
    assert roster.replaced_hosts() == {"h2": CLOSED} and roster.lost_spares() == {} and not roster.suspected
    assert roster.find_spare(1) is None, "no other waits"
    assert roster.usable(()) == {0, 2}
    story.report(2)
    roster.run()
    assert story.state(2) is RUNNING
    roster.go(12, CLOSED)
    assert story.state(2) is SUSPECTED and roster.ranks_of(2) == (1,)
    story.begin(agents={0: (0,), 2: (1,)})
    assert roster.lost_spares() == {"h2": CLOSED}, "not used again"


@pytest.mark.parametrize("why", ["it has not reported", "it is lost, too"])
def test_a_spare_that_is_not_ready_takes_no_place(story, why):
    story.run().connect(2)
    if why != "it has not reported":
        story.report(2)
    if why == "it is lost, too":
        story.roster.go(12, CLOSED)
    story.roster.go(11, CLOSED)
    assert story.roster.find_spare(1) is None


def test_a_spare_takes_the_rank_of_a_lost_agent():
    story = Story().run()
    story.connect(2)
    story.report(2)
    story.roster.go(11, CLOSED)
    assert story.roster.usable(()) == {0, 2} and story.roster.usable((0,)) == {2}
    assert story.begin(agents={0: (0,), 2: (1,)}) == [Recall(10, (0,)), Recall(12, (1,))]
    assert {agent: seat.state for agent, seat in story.roster.seats.items()} == {0: CALLED, 2: CALLED}
    said, old = report(2, "h3", 2, attempt=2), AgentSignalled(2, 15)
    assert story.roster.drop_earlier(12, [old]) == [] and story.roster.drop_earlier(12, [old, said]) == [said]
    assert story.roster.drop_earlier(12, [old]) == [old]


# ---- agents that people have started


def begin_by_hand(agents, **changes):
    """Begin the second attempt of three commands, with the ranks of these agents; `changes` of the third's report."""
    plan = hand_plan(min_hosts=1, wait_hosts=None)
    roster = seated(plan, {0, 1, 2})
    for agent in range(3):
        roster.add_report(report(agent, f"h{agent + 1}", 3, **(changes if agent == 2 else {})))
    following = replace(plan, attempt=2, placement=replace(plan.placement, agents=agents))
    return roster, roster.begin(following, anew=False)


def test_a_signal_to_an_agent_that_a_person_started_counts_before_the_agent_reports():
    roster, _ = begin_by_hand({0: (0,), 1: (1,), 2: (2,)})
    said, signalled, old = report(1, "h2", 3, attempt=2), AgentSignalled(1, 15), WorkerExited(1, 3)
    assert roster.drop_earlier(1, [old, signalled]) == [signalled]
    assert roster.drop_earlier(1, [signalled, old, said, old]) == [signalled, said, old]


@pytest.mark.parametrize(
    ("failure", "why"),
    [("no GPU", "it failed --host-check: no GPU"), ("", "rank 2 there did not end in time")],
    ids=["sick", "unanswered"],
)
def test_an_agent_that_is_left_out_is_sent_away_and_its_command_can_be_started_again(failure, why):
    roster, actions = begin_by_hand({0: (0,), 1: (1,), 2: ()}, check_failure=failure)
    refused = Refuse(2, 2, f"the job continues without h3: {why}", may_return=True)
    assert actions == [Recall(0, (0,)), Recall(1, (1,)), Recall(2, ()), refused]
    assert roster.agent_at(2) is None and roster.go(2, CLOSED) == [], "its end is not a loss"
    said = report(2, "h3", 3)
    assert roster.arrive(22, 2) == [Admit(22, 2)] and roster.say(22, said) == [Take(22, 2, said)]
    roster.add_report(said)
    assert roster.seats[2].state is SPARE and roster.usable(()) == {0, 1, 2}


def test_another_connection_of_an_agent_that_is_left_out_stays():
    """The command was started again as the attempt ended."""
    plan = hand_plan(min_hosts=1, wait_hosts=None)
    roster = seated(plan, {0, 1, 2})
    roster.go(2, CLOSED)
    roster.arrive(22, 2)
    following = replace(plan, attempt=2, placement=replace(plan.placement, agents={0: (0,), 1: (1,), 2: ()}))
    assert roster.begin(following, anew=False) == [Recall(0, (0,)), Recall(1, (1,))]
    assert roster.links_of((2,)) == [22]


def test_a_waiting_agent_that_cannot_be_used_makes_room_for_the_next_one(story):
    story.connect(2)
    assert story.roster.turn_away(12, "no GPU") == [Refuse(12, 2, "no GPU", may_return=True)]
    said = AgentConnected(2, "h3")
    assert story.connect(2, 22) == [Admit(22, 0), Take(22, 2, said)]


# ---- an agent comes in the place of another (--wait-hosts)


def test_a_later_agent_waits_until_the_earlier_one_is_known_to_be_alive(waiting):
    assert waiting.connect(1, 21) == [Admit(21, 1), AskHost(11)]
    assert waiting.roster.say(21, report(1, "h9", 2)) == []
    assert waiting.roster.confirm(11) == [Refuse(21, 1)] and waiting.roster.agent_at(21) is None
    assert waiting.state(1) is RUNNING


def test_the_first_of_later_agents_has_the_place_once_the_head_knows_of_the_loss(waiting):
    said = [AgentConnected(1, "h2"), report(1, "h9", 2)]
    waiting.connect(1, 21)
    waiting.roster.say(21, said[1])
    waiting.connect(1, 22)
    assert [type(action) for action in waiting.roster.go(11, CLOSED)] == [Lose]
    assert waiting.roster.settle() == []
    waiting.roster.explain(1)
    assert waiting.roster.settle() == [*(Take(21, 1, message) for message in said), Refuse(22, 1)]
    assert waiting.roster.seats[1].link == 21 and waiting.state(1) is CONNECTED


def test_an_agent_that_does_not_fit_leaves_the_place_to_others(waiting):
    waiting.begin(awaited={1: "h2"})
    waiting.roster.go(11, CLOSED)
    waiting.roster.explain(1)
    waiting.roster.wait_for(1, Wait("h2", 5.0, 65.0))
    waiting.connect(1, 21)
    assert waiting.roster.turn_away(21, "another version") == [Refuse(21, 1, "another version")]
    assert waiting.state(1) is AWAITED and waiting.roster.links_of((1,)) == []


def test_an_agent_that_has_not_answered_gives_its_place_to_one_that_comes(waiting):
    assert waiting.begin(awaited={1: "h2"})[-1] == Recall(11, (1,))
    assert waiting.state(1) is AWAITED
    said = AgentConnected(1, "h2")
    assert waiting.connect(1, 21) == [Admit(21, 2), Close(11), Take(21, 1, said)]
    assert waiting.roster.go(11, CLOSED) == []


def test_the_agent_of_a_drained_pod_leaves_before_the_next_attempt(waiting):
    waiting.roster.drain((1,))
    assert waiting.state(1) is DRAINED and waiting.roster.usable(()) == {0}
    assert waiting.begin(awaited={1: "h2"}) == [Dismiss(11, leaves=True), Recall(10, (0,))]
    assert waiting.state(1) is AWAITED and waiting.roster.links_of((1,)) == []
