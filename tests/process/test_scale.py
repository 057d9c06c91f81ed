"""A head and a crowd of simulated agents: all are served, and one costs no more in a large job than in a small one.

The crowd is the benchmark's (scripts/bench.d/_crowd.py). Work is counted in lines of jaxrun's that are executed, which
hardly depend on what else the machine does. As a program, this file is the head's process.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import TIME_LIMIT, read_events

import jaxrun
from jaxrun.controller.supervisor.remote_output import RemoteOutput
from jaxrun.controller.supervisor.run_job import run
from jaxrun.controller.supervisor.transport import Transport
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.host_addresses import HostAddress
from jaxrun.node.channel.listener import listen_on_tcp
from jaxrun.protocol.agent_messages import OutputChunk, WorkerExited

BENCH = Path(__file__).parents[2] / "scripts/bench.d"
LAUNCHER = Path(jaxrun.__file__).parents[1]
HOME = str(Path(jaxrun.__file__).parent)
SIZES = (80, 160)
CULPRIT = 23


class Steps:
    """Counts the lines of jaxrun that are executed in the block."""

    def __enter__(self):
        self.count = 0
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *args):
        sys.settrace(self._before)

    def _on_call(self, frame, event, arg):
        return self._on_line if frame.f_code.co_filename.startswith(HOME) else None

    def _on_line(self, frame, event, arg):
        self.count += event == "line"
        return self._on_line


def conduct(size, directory):
    """Conduct a job of a crowd; leaves the number of steps beside the crowd's own result."""
    sys.path.insert(0, str(BENCH))
    import _crowd

    from jaxrun.node.channel import listener, silence

    listener.MAX_UNPROVEN = 1  # of strangers; those that are expected may all come at once
    silence.BEAT_INTERVAL_S = 600.0  # beats are paid by time, and a job whose steps are counted is slow
    plan = _crowd.plan(size, CULPRIT, directory)
    with Steps() as steps:
        status = run(plan, os.environ)
    (directory / "steps").write_text(str(steps.count))
    return status


class Crowded:
    """A job that has been conducted."""

    def __init__(self, size, directory):
        command = [sys.executable, __file__, str(size), str(directory)]
        environ = {**os.environ, "PYTHONPATH": str(LAUNCHER)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIME_LIMIT)
        self.size = size
        self.code = done.returncode
        self.err = done.stderr
        assert (directory / "crowd.json").exists(), done.stderr
        self.at = json.loads((directory / "crowd.json").read_text())["at"]
        self.verdict = json.loads((directory / "run/verdict.json").read_text())
        self.events = read_events(directory / "run")
        self.steps = int((directory / "steps").read_text())


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """From a small one to a large one."""
    return [Crowded(size, tmp_path_factory.mktemp(f"crowd{size}")) for size in SIZES]


@pytest.mark.extended
def test_every_agent_is_admitted_assigned_and_started(jobs):
    for job in jobs:
        assert list(job.at) == ["welcome", "orders", "join", "go", "failure", "told", "dismissed"]
        counts = Counter(event["type"] for event in job.events)
        assert [counts[name] for name in ("WorkerSpawned", "Hello", "DeviceReport")] == [job.size] * 3


@pytest.mark.extended
def test_one_failure_reaches_all_others_and_the_verdict_names_the_right_rank(jobs):
    for job in jobs:
        exits = {event["rank"]: event["status"] for event in job.events if event["type"] == "WorkerExited"}
        others = set(range(job.size)) - {CULPRIT}
        assert exits == {CULPRIT: 1} | dict.fromkeys(others, -signal.SIGKILL)
        assert job.verdict["culprits"] == [CULPRIT]
        assert job.code == job.verdict["exit_code"] == 1
        assert f"rank {CULPRIT} of {job.size} on node0002 raised ValueError" in job.err
        assert f"{len(others)} others were stopped" in job.err


@pytest.mark.extended
def test_twice_as_many_agents_cost_the_head_twice_as_many_steps(jobs):
    small, large = jobs
    # 1.97 times, where each turn of its loop serves a crowd; with a turn for each message, up to a tenth more.
    assert small.steps < large.steps < 2.3 * small.steps


def _report_hello(job):
    job.spawn().handle(*(job.hello(rank) for rank in range(job.size - 2)))
    return job.hello(job.size - 2)


def _join(job):
    job.join().handle(*(job.device_report(rank) for rank in range(job.size - 2)))
    return job.device_report(job.size - 2)


def _fail_with_others(job):
    job.run().handle(*(job.failure(rank) for rank in range(job.size // 2)))
    return job.failure(job.size // 2)


def _exit_after_the_kill(job):
    job.run().exit(1, 1).wait(0.0305)
    return WorkerExited(job.size - 1, -signal.SIGKILL)


@pytest.mark.extended
@pytest.mark.parametrize("prepare", [_report_hello, _join, _fail_with_others, _exit_after_the_kill])
def test_the_head_handles_an_event_in_as_many_steps_at_any_job_size(prepare, simulate):
    def steps(size):
        job = simulate(size, hosts={rank: f"h{rank}" for rank in range(size)})
        event = prepare(job)
        with Steps() as counted:
            job.head.handle(event, job.now)
        return counted.count

    assert 0 < steps(8) == steps(200)


def _steps_at_a_listener(count):
    listener, loop = listen_on_tcp([HostAddress("lo", "127.0.0.1")], "token", everywhere=False), EventLoop()
    acceptor = listener.accept(loop, 0, lambda peer: None, expected=count)
    where = (listener.addresses[0].ip, listener.addresses[0].port)
    peers = [socket.create_connection(where) for _ in range(count)]
    while len(select.select(peers, [], [], 0)[0]) < count:  # each is challenged once it is accepted
        loop.run_once(1)
    with Steps() as steps:
        assert acceptor.drop_expired() is not None
    for peer in peers:
        peer.close()
    acceptor.close()
    listener.close()
    loop.close()
    return steps.count


def _steps_for_connections(count):
    transport = Transport(EventLoop())
    screen = SimpleNamespace(congested=False, write=lambda rank, stream, data: None)
    output = RemoteOutput(screen, transport)
    everyone = [transport.add(object()) for _ in range(count)]  # nothing is sent to them
    for rank, link in enumerate(everyone):
        output.handle(rank, link, OutputChunk(rank, "out", b"0123456789"))
    with Steps() as steps:
        output.handle(0, everyone[0], OutputChunk(0, "out", b"0123456789"))
        output.acknowledge()
        transport.flush(0.0)
    return steps.count


@pytest.mark.extended
@pytest.mark.parametrize("steps", [_steps_at_a_listener, _steps_for_connections])
def test_a_turn_of_the_event_loop_does_not_visit_every_connection(steps):
    assert 0 < steps(3) == steps(100)


if __name__ == "__main__":
    sys.exit(conduct(int(sys.argv[1]), Path(sys.argv[2])))
