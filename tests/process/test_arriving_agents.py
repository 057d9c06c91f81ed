"""The agents that come to a head before there is a job: which of them decides whether an earlier one continues."""

import os
import re
import signal
import threading

import pytest
from listener_thread import wait_until

from jaxrun.controller.supervisor import earlier_head, run_job
from jaxrun.controller.supervisor.earlier_head import EndedEarlyError, FoundAgents, find_agents
from jaxrun.controller.supervisor.remote_job import Endpoint, HeadPort
from jaxrun.errors import UsageError
from jaxrun.node.channel.connection import HEAD_TO_AGENT, Connection
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.host_addresses import HostAddress
from jaxrun.node.channel.rendezvous import RendezvousFile
from jaxrun.protocol.agent_messages import AgentConnected, AgentSignalled, Shutdown
from jaxrun.protocol.connect import HeadAddress, connect
from jaxrun.protocol.job_record import JobRecord
from jaxrun.protocol.probe_messages import Machine
from jaxrun.spec.engines import by_hand
from jaxrun.spec.job.job import Job
from jaxrun.terminal import print_notice

TOKEN = "7" * 64
RECORD = JobRecord("cd" * 16, "/runs/one", 2, 1000.0, 1100.0)


def plan(**wanted):
    job = Job(
        program=("train.py",), backend="hosts", platform="cpu", hosts=3, host_rank=0, head="h1:7",
        processes_per_host=1, max_restarts=1, wait_hosts=60.0, **wanted,
    )  # fmt: skip
    return by_hand.plan(job, {}, "ab" * 16, Machine("h1", (0, 1), {}, False, False))


class Port:
    """Where the head listens, and agents that come there."""

    def __init__(self):
        self.loop = EventLoop()
        self.port = HeadPort.open(self.loop, "", [HostAddress("lo", "127.0.0.1")], Endpoint(TOKEN))
        self.agents = []

    def come(self, agent, *messages):
        head = HeadAddress(TOKEN, self.port.listener.addresses)
        came = connect(lambda: head, agent, 10.0)
        self.agents.append(Connection(came.connection, HEAD_TO_AGENT, came.tags))
        for message in messages:
            self.agents[-1].send(message)
        return self.agents[-1]

    def close(self):
        for one in self.agents:
            one.close()
        self.port.close()
        self.loop.close()


@pytest.fixture
def port():
    made = Port()
    yield made
    made.close()


def later(*steps):
    """Do this in a thread, as agents on other hosts do."""
    thread = threading.Thread(target=lambda: [step() for step in steps])
    thread.start()
    return thread


def test_a_new_job_begins_once_an_agent_of_each_other_host_is_there(port):
    said = AgentSignalled(2, 15)
    thread = later(
        lambda: port.come(1),  # a path that its agent does not use
        lambda: port.come(1, AgentConnected(1, "h2")),
        lambda: port.come(2, AgentConnected(2, "h3"), said),
    )
    result = find_agents(plan(), port.port, port.loop)
    thread.join()
    assert result.record is None
    sent = {one.agent: one.messages for one in result.agents if one.messages}
    assert sent[1] == (AgentConnected(1, "h2"),) and sent[2][0] == AgentConnected(2, "h3")


def test_the_first_record_decides_whoever_is_missing(port):
    thread = later(lambda: port.come(2, AgentConnected(2, "h3", RECORD)))
    result = find_agents(plan(), port.port, port.loop)
    thread.join()
    assert (result.record, result.host) == (RECORD, "h3")
    assert [one.messages for one in result.agents] == [(AgentConnected(2, "h3"),)]  # no log gets the record


def test_when_the_time_for_the_start_is_over_the_job_begins_and_says_who_is_missing(port):
    result = find_agents(plan(init_timeout=0.1), port.port, port.loop)
    assert result == FoundAgents()


def test_it_is_said_which_hosts_are_missing(port, monkeypatch, capsys):
    def say(text):
        print_notice(text)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(earlier_head, "_SAID_INTERVAL_S", 0.1)
    monkeypatch.setattr(earlier_head, "print_notice", say)
    with pytest.raises(EndedEarlyError):
        find_agents(plan(), port.port, port.loop)
    said = capsys.readouterr().err
    assert re.match(r"jaxrun: host 0 of 3 waits for hosts 1-2 after \d+ s\n", said), said


def test_a_signal_ends_the_wait_and_the_agents_that_have_come(port):
    agents = []
    thread = later(
        lambda: agents.append(port.come(1, AgentConnected(1, "h2"))),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    with pytest.raises(EndedEarlyError) as ended:
        find_agents(plan(), port.port, port.loop)
    thread.join()
    assert ended.value.status == 143
    received = []
    wait_until(lambda: received.extend(agents[0].receive()) or received or agents[0].lost_reason)
    assert received == [Shutdown(143)] or agents[0].lost_reason  # it may have come too late to be told


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The rendezvous file that the head writes."""
    monkeypatch.chdir(tmp_path)
    return RendezvousFile(tmp_path / "rendezvous")


def test_a_signal_before_the_job_begins_leaves_no_rendezvous_file(file):
    came = []
    thread = later(
        lambda: came.append(connect(file.read, 1, 10.0)),  # so the head waits by now
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    assert run_job.run(plan(), {}, endpoint=Endpoint(TOKEN, rendezvous=file)) == 143
    thread.join()
    came[0].connection.close()
    assert not file.path.exists()


def test_a_job_that_cannot_begin_leaves_no_rendezvous_file(file, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "other").touch()
    with pytest.raises(UsageError, match="is not empty"):
        run_job.run(plan(run_dir=tmp_path / "run", init_timeout=0.1), {}, endpoint=Endpoint(TOKEN, rendezvous=file))
    assert not file.path.exists()
