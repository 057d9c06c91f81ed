"""The worker's end of the channel: messages in, messages out, and every way in which nobody listens."""

import os
import pdb
import signal
import socket
import threading
import types
import warnings

import pytest

from jaxrun.errors import ProtocolError
from jaxrun.protocol.codec import MessageDecoder, encode, message_types
from jaxrun.protocol.debugger_messages import (
    DebuggerClosed,
    DebuggerInput,
    DebuggerOutput,
    DebuggerReadRequest,
    DebuggerRequest,
    TerminalDecision,
)
from jaxrun.protocol.survivor_messages import LiveRanks, LiveRanksAsked
from jaxrun.protocol.worker_messages import (
    CallMismatch,
    Done,
    Exit,
    Join,
    Proceed,
    Run,
    StartCoordinator,
    WorkerMessageDecoder,
)
from jaxrun_runtime import debugger
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected
from jaxrun_runtime.live_ranks import LiveRanksClient


class Poll:
    """Waits as the worker's end does; the alarm of `_interrupt` comes once it waits."""

    alarm_s = 0.0

    def __init__(self, real):
        self._real = real

    def poll(self, *timeout):
        if self.alarm_s and not timeout and not self._real.poll(0):
            signal.setitimer(signal.ITIMER_REAL, self.alarm_s)
        return self._real.poll(*timeout)


@pytest.fixture
def channel():
    """(the agent's end, the worker's, the number of the latter's descriptor)"""
    ours, theirs = socket.socketpair()
    number = theirs.detach()
    link = AgentChannel(number)
    link._poll = Poll(link._poll)
    with ours, link._socket:
        yield ours, link, number


@pytest.fixture
def ends(channel):
    """(the agent's end, the worker's)"""
    return channel[:2]


def test_a_message_arrives_as_it_was_sent(ends):
    agent, link = ends
    link.send(Done(3, 1.5))
    assert WorkerMessageDecoder().feed(agent.recv(65536)) == [Done(3, 1.5)]


def test_a_signal_handler_may_send_while_its_thread_sends(ends, monkeypatch):
    agent, link = ends

    class SignalledSocket:
        """A signal arrives just before the first frame is sent."""

        def sendall(self, frame):
            monkeypatch.setattr(link, "_socket", real)
            signal.raise_signal(signal.SIGUSR1)
            real.sendall(frame)

        def __getattr__(self, name):
            return getattr(real, name)

    before = signal.signal(signal.SIGUSR1, lambda *_: link.send(Done(4, 2.5)))
    real = link._socket
    monkeypatch.setattr(link, "_socket", SignalledSocket())
    try:
        link.send(Done(3, 1.5))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert WorkerMessageDecoder().feed(agent.recv(65536)) == [Done(3, 1.5), Done(4, 2.5)]


def test_several_messages_in_one_piece_are_received_one_by_one_each_of_one_or_two_kinds(ends):
    agent, link = ends
    agent.sendall(b"".join(map(encode, (Run(), Exit(), Join("h:1"), StartCoordinator("h")))))
    assert link.receive(Run) == Run()
    assert link.receive(Exit) == Exit()
    assert link.receive(StartCoordinator, Join) == Join("h:1")
    assert link.receive(StartCoordinator, Join) == StartCoordinator("h")


def test_another_message_type_is_a_protocol_error_that_names_both(ends):
    agent, link = ends
    agent.sendall(encode(Exit()) * 2)
    with pytest.raises(ProtocolError, match=r"expected Run from the agent, received Exit\(\)"):
        link.receive(Run)
    with pytest.raises(ProtocolError, match="expected StartCoordinator or Join"):
        link.receive(StartCoordinator, Join)


def test_threads_do_not_mix_their_messages(ends):
    agent, link = ends
    names = [str(number) * 30_000 for number in range(4)]
    threads = [threading.Thread(target=lambda n=name: link.send(Join(n))) for name in names]
    for thread in threads:
        thread.start()
    decoder, received = WorkerMessageDecoder(), []
    while len(received) < len(names):
        received += decoder.feed(agent.recv(65536))
    assert sorted(message.address for message in received) == names
    for thread in threads:
        thread.join()


def test_an_answer_is_for_the_call_that_it_names(ends):
    agent, link = ends
    stale = [Proceed("0-1", 3), CallMismatch("0-3", 4, "another group"), Proceed("0-3", 3)]
    agent.sendall(b"".join(map(encode, [*stale, CallMismatch("0-1", 4, "why"), Exit()])))
    assert link.receive_answer("0-1", 4) == CallMismatch("0-1", 4, "why")
    assert link.receive(Exit) == Exit()


def test_answers_do_not_disturb_waits_for_other_messages(ends):
    agent, link = ends
    agent.sendall(encode(Proceed("0-1", 1)) + encode(Exit()))
    assert link.receive(Exit) == Exit()
    assert link.receive_answer("0-1", 1) == Proceed("0-1", 1)


def _waiting(wait):
    """Start a thread that waits, and give it some time to; returns it, and the list that will hold what it got."""
    got = []

    def run():
        try:
            got.append(wait())
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    return thread, got


@pytest.mark.parametrize("leave_first", [False, True])
@pytest.mark.parametrize("caller_first", [False, True])
def test_a_call_and_the_end_may_be_waited_for_at_once(ends, caller_first, leave_first):
    agent, link = ends
    waits = [lambda: link.receive(Exit), lambda: link.receive_answer("0-1", 7)]
    messages = [Exit(), Proceed("0-1", 7)]
    threads = [_waiting(wait) for wait in (waits[::-1] if caller_first else waits)]
    for message in messages if leave_first else messages[::-1]:
        agent.sendall(encode(message))
    for thread, _ in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert [got for _, got in threads] == [[message] for message in (messages[::-1] if caller_first else messages)]


def test_a_thread_that_waits_behind_another_notices_the_agents_end_too(ends):
    agent, link = ends
    threads = [_waiting(lambda: link.receive(Exit)), _waiting(lambda: link.receive_answer("0-1", 7))]
    agent.close()
    for thread, got in threads:
        thread.join(60)
        assert [type(error) for error in got] == [AgentDisconnected]


def _interrupt(wait, error=KeyboardInterrupt):
    """End this wait a moment after it has begun, by a signal handler that raises."""

    def interrupt(*_):
        raise error

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
            patch.setattr(Poll, "alarm_s", 0.1)
            wait()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_wait_that_is_interrupted_leaves_the_reading_to_the_others(ends):
    agent, link = ends
    _interrupt(lambda: link.receive_answer("0-1", 7))
    thread, got = _waiting(lambda: link.receive(Exit))
    agent.sendall(encode(Exit()))
    thread.join(60)
    assert got == [Exit()]


@pytest.fixture
def live_ranks(ends):
    """(the agent's end, what JAX calls in rank 0 to learn which ranks live)"""
    agent, link = ends
    agent.settimeout(60)
    ask = LiveRanksClient(0, link, None).wrap("get_live_nodes", lambda *_: {})
    return agent, lambda *ranks: ask(None, ranks)


def _questions(agent):
    """The questions that have arrived, by number, with the ranks that they are about; at least one has."""
    return {one.number: one.ranks for one in MessageDecoder(message_types(LiveRanksAsked)).feed(agent.recv(65536))}


def _alive(*ranks, question):
    return encode(LiveRanks(dict.fromkeys(ranks, 1), ranks, dict.fromkeys(ranks, question)))


def _ask(live_ranks, about, *answers):
    """Ask, and send these answers once the question has come; returns what rank 0 learns."""
    agent, ask = live_ranks
    thread, got = _waiting(lambda: ask(*about))
    assert [*_questions(agent).values()] == [about]
    agent.sendall(b"".join(answers))
    thread.join(60)
    return [list(one) for one in got]


def test_a_rank_whose_first_live_devices_was_interrupted_gets_the_answer_that_the_others_get(live_ranks):
    agent, ask = live_ranks
    _interrupt(lambda: ask(0, 1, 2))
    agent.sendall(_alive(0, 1, 2, question=1))
    assert list(ask(0, 1, 2)) == [0, 1, 2] and _questions(agent) == {1: (0, 1, 2)}, "it asks once"
    assert _ask(live_ranks, (0, 1, 2), _alive(0, 1, question=2)) == [[0, 1]]


def test_the_answer_at_the_end_of_an_interrupted_block_is_not_taken_for_that_of_the_next_one(live_ranks):
    agent, ask = live_ranks
    assert _ask(live_ranks, (0, 1, 2), _alive(0, 1, 2, question=1)) == [[0, 1, 2]]
    _interrupt(lambda: ask(0, 1, 2))
    assert _questions(agent) == {2: (0, 1, 2)}
    late, right = _alive(0, 1, 2, question=2), _alive(0, 1, question=3)
    assert _ask(live_ranks, (0, 1, 2), late, right) == [[0, 1]]


def test_a_rank_that_asks_about_other_ranks_after_an_interrupt_asks_again(live_ranks):
    agent, ask = live_ranks
    _interrupt(lambda: ask(0, 1, 2))
    assert _questions(agent) == {1: (0, 1, 2)}
    assert _ask(live_ranks, (0, 1), _alive(0, 1, 2, question=1), _alive(0, 1, question=2)) == [[0, 1]]


@pytest.fixture
def terminal(ends):
    """(the agent's end, the worker's, jaxrun's terminal for rank 0)"""
    agent, link = ends
    agent.settimeout(60)
    return agent, link, debugger.ChannelTerminal(link, 0)


def _sent(agent):
    return WorkerMessageDecoder().feed(agent.recv(65536))


def test_a_wait_for_the_terminal_that_is_interrupted_gives_it_up_and_its_answer_disturbs_nothing(terminal):
    agent, link, terminal = terminal
    _interrupt(lambda: terminal.open("train.py:8"))
    assert _sent(agent) == [DebuggerRequest(0, "train.py:8", 1), DebuggerClosed(0)]
    agent.sendall(encode(TerminalDecision(1, True)) + encode(Exit()))
    assert link.receive(Exit) == Exit()
    agent.sendall(encode(TerminalDecision(2, False, "the job is being ended")))
    with pytest.raises(debugger.NoTerminalError, match="the job is being ended"):
        terminal.open("train.py:9")


def test_a_read_that_is_interrupted_leaves_its_line_to_nobody(terminal):
    agent, link, terminal = terminal
    _interrupt(terminal.read_line)
    agent.sendall(b"".join(map(encode, (DebuggerInput(1, "late\n"), Exit(), DebuggerInput(2, "p x\n")))))
    assert terminal.read_line() == "p x\n"
    assert _sent(agent) == [DebuggerReadRequest(0, 1), DebuggerReadRequest(0, 2)]
    assert link.receive(Exit) == Exit()


def test_threads_that_want_the_terminal_wait_for_one_answer(terminal):
    agent, _, terminal = terminal
    threads = [_waiting(lambda: terminal.open("train.py:8")) for _ in range(2)]
    agent.sendall(encode(TerminalDecision(1, True)))
    for thread, _ in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert _sent(agent) == [DebuggerRequest(0, "train.py:8", 1)]


def test_an_exception_that_leaves_a_debugger_gives_the_terminal_up(terminal):
    agent, _, terminal = terminal
    module = types.SimpleNamespace(Pdb=pdb.Pdb)
    debugger._replace_pdb(module, terminal)
    agent.sendall(encode(TerminalDecision(1, True)))
    with pytest.raises(ValueError) as failure:
        raise ValueError
    _interrupt(lambda: debugger.inspect_error(module.Pdb(), failure.value), TimeoutError)
    sent = [one for one in _sent(agent) if not isinstance(one, DebuggerOutput)]
    assert [type(one) for one in sent] == [DebuggerRequest, DebuggerReadRequest, DebuggerClosed]


def test_the_agents_end_is_noticed_by_everything(ends):
    agent, link = ends
    assert not link.is_agent_gone()
    agent.sendall(encode(Run()))
    assert not link.is_agent_gone()  # and the message is still there
    assert link.receive(Run) == Run()
    agent.close()
    assert link.is_agent_gone()
    with pytest.raises(AgentDisconnected):
        link.send(Done(0, 0.0))
    with pytest.raises(AgentDisconnected):
        link.receive(Run)


@pytest.mark.parametrize("replace", [False, True])
def test_a_descriptor_that_is_not_ours_any_more_is_not_touched(channel, replace):
    _, link, number = channel
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.close(number)
        if replace:
            os.dup2(theirs.fileno(), number)
            ours.sendall(encode(Run()))
        with pytest.raises(AgentDisconnected):
            link.send(Done(0, 0.0))
        with pytest.raises(AgentDisconnected):
            link.receive(Run)
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(1)
        if not replace:
            os.dup2(theirs.fileno(), number)  # for the fixture to close


def test_the_channel_does_not_reach_programs_that_the_worker_starts(channel):
    assert not os.get_inheritable(channel[2])


def test_a_process_that_the_program_forks_cannot_send_to_the_agent(channel):
    agent, link, _ = channel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside other threads
        pid = os.fork()
    if pid == 0:
        status = 2
        try:
            link.send(Done(0, 0.0))
        except AgentDisconnected:
            status = int(link.in_owner_process())
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert link.in_owner_process()
    link.send(Done(3, 1.5))
    assert WorkerMessageDecoder().feed(agent.recv(65536)) == [Done(3, 1.5)]
