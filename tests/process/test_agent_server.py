"""The head's side of agents: one connection of each rank counts, that on which its agent speaks."""

import contextlib
import signal
import struct
import time

import pytest
from handshakes import frame
from head_by_hand import JOB_INFO, HeadByHand, message, start_of, worker_of
from listener_thread import wait_until
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_end import EndedBySignal, Preempted
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.controller.supervisor import losses
from jaxrun.controller.supervisor.attempt_head import AttemptHead
from jaxrun.job_events.actions import RecordClock, Send, SendToAgents
from jaxrun.job_events.events import AgentLost, AgentTurnedAway, BadMessage, SpareReported
from jaxrun.node.channel.connection import Connection
from jaxrun.node.channel.silence import HostWatch
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentRefused,
    AgentReport,
    AgentSignalled,
    FaultNotInjected,
    NextAttempt,
    Shutdown,
    SignalWorker,
    StartFailed,
    StartWorkers,
    ToRanks,
    WorkerExited,
)
from jaxrun.protocol.codec import encode
from jaxrun.protocol.query_messages import RankReply
from jaxrun.protocol.worker_messages import Done, Run
from jaxrun.spec.job.rank_placement import agents_by_rank


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(losses, "_ASKED_GRACE_S", 0.05)
    with contextlib.closing(HeadByHand()) as made:
        yield made


@pytest.fixture
def waiting():
    """The same of a job that waits for lost hosts."""
    with contextlib.closing(HeadByHand(max_restarts=1, wait_hosts=60.0)) as made:
        yield made


@pytest.fixture
def attached():
    """The same, where an srun has started the head's process beside the agents."""
    with contextlib.closing(HeadByHand(attached=True)) as made:
        yield made


@pytest.fixture
def by_hand():
    """The same, where people have typed a command on each host; the third one has no rank."""
    with contextlib.closing(HeadByHand(host_rank=0, hosts=2)) as made:
        made.begin_next_attempt(agents_by_rank(2, 3))
        yield made


class Answers:
    """Whether the hosts that were asked are known to be alive."""

    def __init__(self, monkeypatch):
        self.known, self.looks = False, 0
        monkeypatch.setattr(HostWatch, "has_answered", lambda watch, connections: self.look())

    def look(self):
        self.looks += 1
        return self.known


@pytest.fixture
def unanswered(monkeypatch):
    """No host that is asked is known to be alive."""
    Answers(monkeypatch)


def report(server, client, rank, attempt=1):
    count = len(server.events)
    client.send(message(AgentReport, agent=rank, attempt=attempt))
    wait_until(lambda: len(server.events) > count)


@pytest.mark.parametrize("used", [0, 1])
def test_of_two_connections_of_an_agent_that_counts_on_which_it_speaks(server, used):
    """As over two slow paths: both are authenticated before the agent has chosen one and closed the other."""
    paths = [server.connect(0)[0] for _ in range(2)]
    report(server, paths[used], 0)
    paths[1 - used].close()
    wait_until(lambda: len(server.transport) == 1)
    server.order(SendToAgents((0,), start_of()), Send((0,), SignalWorker(2)))
    assert server.received(paths[used], 2) == [start_of(), SignalWorker(2)]
    paths[used].close()
    wait_until(lambda: len(server.events) > 1)  # only this is the agent's end
    assert [type(event) for event in server.events] == [AgentReport, AgentLost]


NONSENSE = {
    "no MessagePack": (struct.pack("!I", 2) + b"\x03\0", "a frame is not MessagePack"),
    "an unknown type": (frame({"type": "Shell", "command": "true"}), "of no known type"),
    "a giant": (struct.pack("!I", 2**32 - 1), "announces 4294967295 bytes"),
    "the end of another rank": (encode(Done(0, 1.0)), "a Done for another rank than 1, its own"),
    "another rank's calls": (encode(RankReply(0, 7)), "a RankReply for another rank than 1"),
    "no signal": (encode(AgentSignalled(1, 4711)), "AgentSignalled.signum must be of type Signals"),
    "no exit status": (
        encode(WorkerExited(1, 2**63)),
        "WorkerExited.status: 9223372036854775808 is not at most 255",
    ),
    "no kind of fault": (encode(FaultNotInjected(1, "melt", "too hot")), "'melt' is not of the form '^(kill|pause)"),
}


@pytest.mark.parametrize(("sent", "why"), NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize("has_reported", [True, False])
def test_nonsense_of_an_agent_ends_its_own_connection_with_its_rank(server, sent, why, has_reported):
    other, (client, _) = server.connect(0)[0], server.connect(1)
    report(server, other, 0)
    if has_reported:
        report(server, client, 1)
    client.send_frame(sent)
    wait_until(lambda: client.receive() or client.lost_reason)
    (record,) = server.records
    assert (type(record), record.agent) == (BadMessage, 1) and why in record.reason
    if has_reported:
        wait_until(lambda: len(server.events) == 3)
        assert server.events[2].agent == 1 and why in server.events[2].reason
    server.order(Send((0,), SignalWorker(2)))
    assert server.received(other) == [SignalWorker(2)]


def test_an_agent_that_ends_before_it_has_reported_is_lost_if_it_has_said_that_it_uses_this_connection(server):
    unused, used = server.connect(1)[0], server.connect(1)[0]
    unused.close()
    wait_until(lambda: len(server.transport) == 1)
    used.send(AgentConnected(1, "h2"))
    wait_until(lambda: server.events)
    used.close()
    wait_until(lambda: len(server.events) == 2)
    assert server.events == [AgentConnected(1, "h2"), AgentLost(1, "the connection to its agent was closed")]


def test_orders_go_to_the_ranks_connection_and_the_end_to_all(server):
    (speaks, _), (silent, _) = server.connect(0), server.connect(0)
    report(server, speaks, 0)
    server.order(Send((0,), SignalWorker(2)))
    assert server.received(speaks) == [SignalWorker(2)]
    server.end_attempt()
    server.agents.shut_down(0)
    assert server.received(speaks) == server.received(silent) == [Shutdown(0)]


def test_an_agent_that_was_signalled_before_it_could_report_is_heard(server):
    client, first = server.connect(1)
    assert first == [JOB_INFO]
    client.send(AgentSignalled(1, 15))
    wait_until(lambda: server.events)
    assert server.events == [AgentSignalled(1, 15)]


def test_two_agents_of_a_rank_are_named_by_the_head_while_the_job_starts(server):
    report(server, server.connect(0)[0], 0)
    server.order(SendToAgents((0,), start_of()))
    report(server, server.connect(0)[0], 0)
    assert [event.agent for event in server.events] == [0, 0]


@pytest.mark.parametrize("connects", ["before", "after"])
def test_an_agent_that_comes_to_a_running_job_is_refused_in_words_and_touches_nothing(server, connects):
    first = server.connect(1)[0]
    early = server.connect(1)[0] if connects == "before" else None
    report(server, first, 1)
    server.order(SendToAgents((1,), start_of()), Send((1,), Run()))
    assert server.received(first, 2) == [start_of(), Run()]
    before = list(server.events)
    if early is not None:
        early.send(AgentSignalled(1, 2))
        early.send(message(AgentReport, agent=1))
        said = server.received(early)
    else:
        early, said = server.connect(1)
    assert said == [AgentRefused("this job runs already: its rank 1 is another process, on h2")]
    wait_until(lambda: early.receive() or early.lost_reason)
    assert [type(record) for record in server.records] == [AgentTurnedAway]
    assert server.connect(7)[1] == [AgentRefused("this job runs already, with 2 processes: none is rank 7")]
    server.order(Send((1,), SignalWorker(2)))
    assert server.received(first) == [SignalWorker(2)]
    first.close()
    wait_until(lambda: len(server.events) > len(before))
    assert server.events == [*before, AgentLost(1, "the connection to its agent was closed")]


def test_nothing_of_an_earlier_attempt_is_taken_for_one_of_the_present(server):
    clients = [server.connect(rank)[0] for rank in (0, 1)]
    for rank, client in enumerate(clients):
        report(server, client, rank)
    server.end_attempt()
    server.events.clear()
    clients[0].send(WorkerExited(0, 3))  # on its way while the attempt ends
    server.begin_next_attempt()
    assert [server.received(client) for client in clients] == [[NextAttempt(2, (0,))], [NextAttempt(2, (1,))]]
    clients[0].send(message(AgentReport, agent=0, attempt=1))
    clients[0].send(AgentSignalled(0, 15))
    clients[0].send(message(AgentReport, agent=0, attempt=2))
    clients[0].send(WorkerExited(0, 4))
    wait_until(lambda: len(server.events) > 1)
    assert server.events == [message(AgentReport, agent=0, attempt=2), WorkerExited(0, 4)]
    server.order(Send((1,), SignalWorker(2)))
    assert server.received(clients[1]) == [SignalWorker(2)]


def test_an_agent_of_several_ranks_reports_for_each_and_gets_orders_for_some(server):
    server.begin_next_attempt({0: (0, 1)})
    client = server.connect(0)[0]
    client.send(message(AgentReport, agent=0))
    wait_until(lambda: server.events)
    start = StartWorkers((worker_of(0), worker_of(1)))
    server.order(SendToAgents((0,), start), Send((0, 1), SignalWorker(2)), Send((1,), SignalWorker(3)))
    assert server.received(client, 3) == [start, SignalWorker(2), ToRanks((1,), SignalWorker(3))]
    client.send(WorkerExited(1, 4))
    wait_until(lambda: len(server.events) == 2)
    client.close()
    wait_until(lambda: len(server.events) == 3)
    assert server.events == [
        message(AgentReport, agent=0),
        WorkerExited(1, 4),
        AgentLost(0, "the connection to its agent was closed"),
    ]


def test_an_agent_that_waits_takes_the_rank_of_a_lost_one(server):
    server.begin_next_attempt(agents_by_rank(2, 3))
    first, second, waiting = (server.connect(number)[0] for number in range(3))
    waiting.send(message(AgentReport, agent=2, host="h3", pid=7))
    assert server.received(waiting) == [start_of(2, waits=True)]
    assert server.records == [SpareReported(2, "h3", 7)] and not server.events
    report(server, first, 0)
    report(server, second, 1)
    assert server.roster.usable(()) == {0, 1, 2}
    second.close()
    wait_until(lambda: len(server.events) == 3)
    assert (type(server.events[2]), server.events[2].agent, server.roster.usable(())) == (AgentLost, 1, {0, 2})
    server.begin_next_attempt({0: (0,), 2: (1,)})
    assert server.received(first) == [NextAttempt(3, (0,))] and server.received(waiting) == [NextAttempt(3, (1,))]
    server.events.clear()
    waiting.send(AgentSignalled(2, 15))  # on its way
    waiting.send(message(AgentReport, agent=2, attempt=3))
    waiting.send(WorkerExited(1, 4))
    wait_until(lambda: len(server.events) > 1)
    assert server.events == [message(AgentReport, agent=2, attempt=3), WorkerExited(1, 4)]
    server.order(Send((1,), SignalWorker(2)))
    assert server.received(waiting) == [SignalWorker(2)]


def test_how_a_rank_has_ended_that_a_spare_host_has_since_is_not_told(server, monkeypatch):
    server.begin_next_attempt(agents_by_rank(2, 3))
    first, second, spare = (server.connect(number)[0] for number in range(3))
    spare.send(message(AgentReport, agent=2, host="h3"))
    report(server, first, 0)
    report(server, second, 1)
    server.received(spare)
    server.events.clear()
    held = [AgentLost(1, "it is silent"), WorkerExited(1, 4), WorkerExited(0, 5)]
    explain = losses.LossWatch.explain
    monkeypatch.setattr(losses.LossWatch, "explain", lambda watch, hosts: explain(watch, hosts) and held)
    collect, placement = server.head.handle, replace(server.plan.placement, agents={0: (0,), 2: (1,)})

    def seat_the_spare(event, now):
        if isinstance(event, AgentLost):
            server.roster.seat_spare(placement)
        return collect(event, now)

    monkeypatch.setattr(server.head, "handle", seat_the_spare)
    second.close()
    wait_until(lambda: len(server.events) == 2)
    assert server.events == [AgentLost(1, "it is silent"), WorkerExited(0, 5)]


def test_the_loss_of_a_spare_agent_is_not_a_loss_for_the_job(server):
    server.begin_next_attempt(agents_by_rank(2, 3))
    waiting = server.connect(2)[0]
    waiting.send(message(AgentReport, agent=2, host="h3"))
    server.received(waiting)
    waiting.close()
    wait_until(lambda: server.printed)
    assert server.printed == ["jaxrun: spare host h3 is lost: the connection to its agent was closed"]
    assert server.roster.lost_spares() == {"h3": "the connection to its agent was closed"}
    report(server, server.connect(0)[0], 0)
    assert [type(event) for event in server.events] == [AgentReport]


# ---- agents that people have started


def test_a_signal_ends_an_agent_that_waits_and_the_job_goes_on(by_hand):
    waiting = by_hand.connect(2)[0]
    waiting.send(message(AgentReport, agent=2, host="h3"))
    by_hand.received(waiting)
    waiting.send(AgentSignalled(2, 15))
    assert by_hand.received(waiting) == [Shutdown(143)]
    wait_until(lambda: by_hand.printed)
    assert by_hand.printed == ["jaxrun: spare host h3 is lost: it was ended by SIGTERM"]
    report(by_hand, by_hand.connect(0)[0], 0, 2)
    assert [type(event) for event in by_hand.events] == [AgentReport]


def test_a_waiting_agent_that_an_engine_started_leaves_signals_to_the_engine(server):
    server.begin_next_attempt(agents_by_rank(2, 3))
    waiting = server.connect(2)[0]
    waiting.send(AgentSignalled(2, 15))
    waiting.send(message(AgentReport, agent=2, host="h3"))
    assert server.received(waiting) == [start_of(2, waits=True)]


def test_of_two_agents_that_wait_in_one_place_the_second_is_refused_and_the_job_goes_on(by_hand):
    first, second = by_hand.connect(2)[0], by_hand.connect(2)[0]
    first.send(message(AgentReport, agent=2, host="h3"))
    by_hand.received(first)
    second.send(message(AgentReport, agent=2, host="h3"))
    text = "this job has no rank for this host now, and another process waits in its place"
    assert by_hand.received(second) == [AgentRefused(text, is_taken=True)]
    report(by_hand, by_hand.connect(0)[0], 0, 2)
    assert [type(event) for event in by_hand.events] == [AgentReport]


def test_an_agent_that_waits_and_cannot_be_used_learns_why_and_can_be_started_again(by_hand):
    sick = by_hand.connect(2)[0]
    sick.send(message(AgentReport, agent=2, host="h3", check_failure="no GPU"))
    text = "the job cannot use h3: failed --host-check: no GPU"
    assert by_hand.received(sick) == [AgentRefused(text, may_return=True)]
    assert by_hand.printed == ["jaxrun: h3 cannot be taken back: failed --host-check: no GPU"]
    healthy = by_hand.connect(2)[0]
    healthy.send(message(AgentReport, agent=2, host="h3"))
    wait_until(lambda: by_hand.roster.usable(()) == {2})


def test_an_agent_that_is_left_out_learns_why(by_hand):
    clients = [by_hand.connect(rank)[0] for rank in (0, 1)]
    for rank, client in enumerate(clients):
        client.send(message(AgentReport, agent=rank, host=f"h{rank + 1}", attempt=2))
    wait_until(lambda: len(by_hand.events) == 2)
    by_hand.begin_next_attempt({0: (0,), 1: (), 2: ()})
    assert by_hand.received(clients[0]) == [NextAttempt(3, (0,))]
    text = "the job continues without h2: rank 1 there did not end in time"
    assert by_hand.received(clients[1], 2) == [NextAttempt(3, ()), AgentRefused(text, may_return=True)]
    assert [type(event) for event in by_hand.events] == [AgentReport] * 2


def test_an_agent_that_goes_away_between_two_attempts_is_lost_at_once(server):
    clients = [server.connect(rank)[0] for rank in (0, 1)]
    for rank, client in enumerate(clients):
        report(server, client, rank)
    server.begin_next_attempt()
    server.events.clear()
    clients[1].close()
    wait_until(lambda: server.events)
    assert [(type(event), event.agent) for event in server.events] == [(AgentLost, 1)]


def test_the_end_of_agents_is_not_explained_before_it_is_known_which_hosts_are_alive(server, monkeypatch):
    answers = Answers(monkeypatch)
    clients = [server.connect(rank)[0] for rank in (0, 1)]
    for rank, client in enumerate(clients):
        report(server, client, rank)
    server.events.clear()
    clients[1].send(AgentSignalled(1, 15))
    wait_until(lambda: answers.looks > 3)
    clients[0].send(WorkerExited(0, 4))
    wait_until(lambda: answers.looks > 6)
    assert not server.events
    answers.known = True
    wait_until(lambda: len(server.events) == 2)
    assert server.events == [AgentSignalled(1, 15), WorkerExited(0, 4)]


@pytest.mark.usefixtures("unanswered")
def test_where_the_head_ends_the_job_no_host_is_waited_for(server):
    client = server.connect(1)[0]
    report(server, client, 1)
    server.events.clear()
    client.send(AgentSignalled(1, 15))
    client.send(WorkerExited(1, -15))
    server.head.is_healthy = False
    server.order(Send((1,), SignalWorker(signal.SIGKILL)))
    assert server.received(client) == [SignalWorker(signal.SIGKILL)]
    client.send(FaultNotInjected(1, "kill", "it has ended"))
    wait_until(lambda: len(server.events) == 3)
    wanted = AgentSignalled(1, signal.SIGTERM), WorkerExited(1, -15), FaultNotInjected(1, "kill", "it has ended")
    assert sorted(map(repr, server.events)) == sorted(map(repr, wanted))


def test_after_the_end_of_one_rank_in_a_job_that_goes_on_hosts_are_still_asked(server, monkeypatch):
    answers = Answers(monkeypatch)
    clients = [server.connect(rank)[0] for rank in (0, 1)]
    for rank, client in enumerate(clients):
        report(server, client, rank)
    server.events.clear()
    server.order(Send((1,), SignalWorker(signal.SIGKILL)))  # with --keep-survivors, if it did not join in time
    assert server.received(clients[1]) == [SignalWorker(signal.SIGKILL)]
    clients[0].send(AgentSignalled(0, 15))
    wait_until(lambda: answers.looks > 3 or server.events)
    assert not server.events


@pytest.mark.usefixtures("unanswered")
def test_where_the_engine_ends_this_process_too_a_host_that_has_not_answered_soon_is_the_cause(attached):
    client = attached.connect(1)[0]
    report(attached, client, 1)
    attached.events.clear()
    client.send(AgentSignalled(1, 15))
    wait_until(lambda: len(attached.events) == 2)
    silent = AgentLost(1, "nothing was heard from its host for 0.15 s")
    assert attached.events == [silent, AgentSignalled(1, 15)]


# ---- an agent comes in the place of another (--wait-hosts)

TAKEN = AgentRefused("this job runs already: its rank 1 is another process, on h2", is_taken=True)


def run_both(server):
    """The connections of two agents whose program runs."""
    clients = [server.connect(rank)[0] for rank in (0, 1)]
    for rank, client in enumerate(clients):
        report(server, client, rank)
    server.order(SendToAgents((0, 1), start_of()), Send((0, 1), Run()))
    for client in clients:
        server.received(client, 2)
    server.events.clear()
    return clients


@pytest.mark.parametrize("runs", [True, False], ids=["running", "starting"])
def test_an_agent_is_refused_without_blame_while_its_ranks_have_a_live_agent(waiting, runs):
    if runs:
        run_both(waiting)
    else:
        report(waiting, waiting.connect(1)[0], 1)
    later, _ = waiting.connect(1)
    later.send(AgentConnected(1, "h9"))
    later.send(message(AgentReport, agent=1, host="h9"))
    assert waiting.received(later) == [TAKEN]
    assert [type(record) for record in waiting.records] == [AgentTurnedAway]


def test_an_agent_that_comes_before_the_loss_of_the_other_is_known_takes_its_place_after_that(waiting, monkeypatch):
    _, earlier = run_both(waiting)
    acknowledged = Connection.acknowledged_bytes
    monkeypatch.setattr(Connection, "acknowledged_bytes", lambda one: min(acknowledged(one), 1))  # as of a dead host
    later, first = waiting.connect(1)
    assert first == [JOB_INFO]
    later.send(AgentConnected(1, "h9"))
    later.send(message(AgentReport, agent=1, host="h9"))
    time.sleep(0.2)  # the head has looked several times by then
    assert not waiting.events and not later.receive()
    earlier.close()
    wait_until(lambda: len(waiting.events) == 3)
    assert [type(event) for event in waiting.events] == [AgentLost, AgentConnected, AgentReport]
    assert waiting.roster.usable(()) == {0, 1}
    waiting.begin_next_attempt()
    assert waiting.received(later) == [NextAttempt(2, (1,))]


def test_an_agent_whose_host_fails_its_check_while_the_others_run_is_lost_with_its_connection(waiting):
    _, earlier = run_both(waiting)
    earlier.close()
    wait_until(lambda: waiting.events)
    later, _ = waiting.connect(1)
    later.send(message(AgentReport, agent=1, host="h9", check_failure="no GPU"))
    assert waiting.received(later) == [Shutdown(0)]
    wait_until(lambda: len(waiting.events) == 2)
    assert waiting.events[-1] == AgentLost(1, "it failed --host-check: no GPU")
    waiting.begin_next_attempt(awaited={1: "h2"})
    assert waiting.roster.links_of((1,)) == []


def test_the_clock_of_a_host_is_recorded_once_the_head_knows_that_it_may_be_another(server, monkeypatch):
    heard = []
    monkeypatch.setattr(AttemptHead, "record", lambda head, recorded: heard.append((recorded, len(server.events))))
    report(server, server.connect(1)[0], 1)
    wait_until(lambda: heard)
    ((clock, events),) = heard
    assert isinstance(clock, RecordClock) and events == 1


def test_an_agent_is_taken_in_the_place_of_a_lost_one_in_the_next_attempt_with_its_index(waiting):
    first, second = run_both(waiting)
    second.close()
    wait_until(lambda: waiting.events)
    waiting.begin_next_attempt(awaited={1: "h2"})
    assert waiting.received(first) == [NextAttempt(2, (0,))]
    waiting.events.clear()
    wrong, _ = waiting.connect(1)
    wrong.send(message(AgentReport, agent=1, host="h8", jaxrun_version="0.0", attempt=2))
    assert waiting.received(wrong) == [AgentRefused("h8 has another version")]
    assert "jaxrun: h8 cannot take the place of a lost host: h8 has another version" in waiting.printed
    later, (info,) = waiting.connect(1)
    assert info.attempt == 2 and not waiting.events
    report(waiting, later, 1)
    waiting.order(Send((1,), SignalWorker(2)))
    assert waiting.received(later) == [SignalWorker(2)]


def test_the_agent_of_a_drained_pod_leaves_before_the_next_attempt_and_the_others_stay(waiting):
    first, second = run_both(waiting)
    waiting.end_attempt(JobOutcome(Preempted(signal=EndedBySignal(signal.SIGTERM)), drained=frozenset({1})))
    assert waiting.roster.usable(()) == {0}
    waiting.begin_next_attempt(awaited={1: "h2"})
    assert waiting.received(first) == [NextAttempt(2, (0,))]
    assert waiting.received(second) == [Shutdown(75, leaves=True)]
    later, _ = waiting.connect(1)
    report(waiting, later, 1)
    assert [type(event) for event in waiting.events] == [AgentReport]


def test_an_agent_that_has_not_answered_gives_its_place_to_one_that_comes(waiting):
    _, second = run_both(waiting)
    waiting.begin_next_attempt(awaited={1: "h2"})  # the end of its rank was reported by nobody
    assert waiting.received(second) == [NextAttempt(2, (1,))]
    later, _ = waiting.connect(1)
    report(waiting, later, 1)
    wait_until(lambda: second.receive() or second.lost_reason)
    assert [type(event) for event in waiting.events] == [AgentReport]


# ---- srun continues if it has lost a task (--max-restarts)

EXITED = "srun: error: h2: task 1: Exited with exit code 69"


def hear_srun(server, client, line):
    """Let srun say this; the head, which has this agent of rank 0, has handled it then."""
    server.let_srun_say(line)
    server.order(Send((0,), SignalWorker(2)))
    server.received(client)


def test_an_agent_that_srun_could_not_start_ends_the_attempt(waiting):
    first, _ = waiting.connect(0)
    report(waiting, first, 0)
    reason = "jaxrun: rank 1 on h2 found no head of the job within 60 s"
    for line in (reason, EXITED):
        hear_srun(waiting, first, line)
    wanted = f"srun could not start all agents; it said:\n  {reason}\n  {EXITED}"
    assert waiting.events[1:] == [StartFailed(wanted)]


@pytest.mark.parametrize("said_in", [1, 2])
def test_what_srun_says_of_an_agent_that_had_come_ends_no_later_attempt(waiting, said_in):
    first, second = run_both(waiting)
    if said_in == 1:
        hear_srun(waiting, first, EXITED)
    second.close()
    wait_until(lambda: waiting.events)
    waiting.begin_next_attempt(awaited={1: "h2"})
    assert waiting.received(first) == [NextAttempt(2, (0,))]
    report(waiting, first, 0, attempt=2)
    hear_srun(waiting, first, EXITED if said_in == 2 else "step 1")
    again, _ = waiting.connect(1)
    again.send(AgentConnected(1, "h2"))
    wait_until(lambda: len(waiting.events) > 2)
    hear_srun(waiting, first, "step 2")
    report(waiting, again, 1, attempt=2)
    waiting.begin_next_attempt()
    assert waiting.received(first) == [NextAttempt(3, (0,))]
    hear_srun(waiting, first, "step 3")
    assert [type(event) for event in waiting.events] == [AgentLost, AgentReport, AgentConnected, AgentReport]


def test_an_agent_that_is_lost_as_the_job_starts_is_lost_whatever_srun_says_of_its_task(waiting):
    first, second = (waiting.connect(rank)[0] for rank in (0, 1))
    report(waiting, first, 0)
    second.send(AgentConnected(1, "h2"))
    wait_until(lambda: len(waiting.events) == 2)
    second.close()
    hear_srun(waiting, first, EXITED)
    wait_until(lambda: len(waiting.events) == 3)
    assert waiting.events[2] == AgentLost(1, "the connection to its agent was closed")
