"""An agent between two orders: what it does blocks nobody, and ends at a signal, an order, or the loss of the head."""

from __future__ import annotations

import contextlib
import signal
import socket

import pytest
from agent_by_hand import SLEEPS, ByHand
from harness import TIME_LIMIT, daemons, is_alive, seconds_of_daemons, wait_until
from msgspec.structs import replace

from jaxrun.protocol.agent_messages import (
    AgentReport,
    AgentSignalled,
    HostCheck,
    NextAttempt,
    Shutdown,
    WorkerSpawned,
)
from jaxrun.protocol.staging_messages import CopyStaged, Stage, StagedContent, StagedCopied

JOB_ID = "ce" * 16
BY_TERMINAL = """
from functools import partial
from jaxrun.node.agent import agent_process
agent_process.AgentStart = partial(agent_process.AgentStart, by_terminal=True)
"""
NO_FILES = """
import errno
from jaxrun.node.agent import agent_process
def make_report(*words):
    raise OSError(errno.EMFILE, "Too many open files")
agent_process.make_report = make_report
"""
# A machine with one GPU, of which as much memory is used as a file says.
MADE_GPU = """
import os
from types import SimpleNamespace

class NVMLError(Exception):
    pass

nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 1
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetName = lambda device: b"NVIDIA H200"
nvmlDeviceGetUUID = lambda device: "GPU-11111111-0000-0000-0000-000000000000"
nvmlSystemGetDriverVersion = lambda: "580.1"
nvmlDeviceGetMaxMigDeviceCount = lambda device: 0
nvmlDeviceGetPciInfo = lambda device: SimpleNamespace(busId=b"0000:3b:00.0")
nvmlDeviceGetUtilizationRates = lambda device: SimpleNamespace(gpu=0)

def nvmlDeviceGetMemoryInfo(device):
    return SimpleNamespace(used=int(open(os.environ["USED_BYTES"]).read()), total=100 * 2**30)
"""


@pytest.fixture
def agent(tmp_path):
    by_hand = ByHand(tmp_path, JOB_ID)
    yield by_hand
    by_hand.close()


@pytest.fixture
def check():
    """A command for --host-check that never ends, and its processes."""
    with seconds_of_daemons() as seconds:
        yield f"setsid sleep {seconds} & sleep {seconds} & sleep {seconds}", lambda: daemons(seconds)


@contextlib.contextmanager
def deaf():
    """A host that lets others connect and says nothing; yields its address, and a function that waits for a taker."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIME_LIMIT)
        yield f"127.0.0.1:{server.getsockname()[1]}", lambda: server.accept()[0].close()


def kinds(agent):
    return [type(message) for message in agent.received]


def test_a_stop_signal_ends_the_check_of_the_host_and_the_head_decides_what_follows(agent, check):
    command, left = check
    agent.job_info = replace(agent.job_info, host_check=HostCheck(command, 60.0, {"JAXRUN_JOB_ID": JOB_ID}))
    agent.connect()
    wait_until(lambda: len(left()) == 3)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.expect(AgentSignalled) == AgentSignalled(0, signal.SIGTERM)
    wait_until(lambda: not left())
    assert AgentReport not in kinds(agent)
    assert agent.shut_down(143)[0] == 143


@pytest.mark.parametrize("end", ["is lost", "says so"])
def test_the_head_ends_the_check_of_a_host(agent, check, end):
    command, left = check
    agent.job_info = replace(agent.job_info, host_check=HostCheck(command, 60.0, {"JAXRUN_JOB_ID": JOB_ID}))
    agent.connect()
    wait_until(lambda: len(left()) == 3)
    if end == "is lost":
        agent.line.close()
        assert agent.end()[0] == 69
    else:
        assert agent.shut_down(3)[0] == 3
    assert left() == []


@pytest.mark.extended
@pytest.mark.parametrize("ends_by", ["signal", "loss", "shutdown", "next attempt", "another order"])
def test_a_copy_from_another_host_ends_at_once_and_nothing_is_said_of_it(agent, tmp_path, ends_by):
    stage = Stage(str(tmp_path), (StagedContent(("/lib",), "0" * 32, 10),))
    agent.job_info = replace(agent.job_info, stage=stage)
    with deaf() as (giver, wait_for_taker), deaf() as (other, wait_for_other):
        assert agent.admit().stage_port
        agent.send(CopyStaged(giver, 0))
        wait_for_taker()
        match ends_by:
            case "signal":
                agent.process.send_signal(signal.SIGINT)
                assert agent.expect(AgentSignalled) == AgentSignalled(0, signal.SIGINT)
            case "loss":
                agent.line.close()
                assert agent.end()[0] == 69
                return
            case "next attempt":
                agent.send(NextAttempt(2, (0,)))
                assert agent.expect(AgentReport).attempt == 2
            case "another order":
                agent.send(CopyStaged(other, 0))
                wait_for_other()
        assert agent.shut_down(5)[0] == 5
        agent.receive()
        assert StagedCopied not in kinds(agent)


def test_of_several_orders_in_one_packet_the_last_copy_counts_and_an_end_ends_it(agent, tmp_path):
    stage = Stage(str(tmp_path), (StagedContent(("/lib",), "0" * 32, 10),))
    agent.job_info = replace(agent.job_info, stage=stage)
    with deaf() as (giver, _), deaf() as (other, wait_for_other):
        agent.admit()
        agent.send(CopyStaged(giver, 0), CopyStaged(other, 0))
        wait_for_other()
        agent.send(NextAttempt(2, (0,)), Shutdown(4))
        assert agent.end()[0] == 4


def test_orders_that_arrive_with_the_heads_first_message_reach_the_next_state(tmp_path):
    agent = ByHand(tmp_path, JOB_ID)
    with contextlib.closing(agent):
        agent.job_info = replace(agent.job_info, attempt=0)
        agent.connect()
        agent.send(NextAttempt(3, (0,)))
        agent.until(lambda: any(getattr(message, "attempt", 0) == 3 for message in agent.received))
        assert agent.shut_down(0)[0] == 0


@pytest.mark.parametrize("ends_by", ["memory", "signal", "loss"])
def test_the_next_attempt_waits_for_the_memory_of_a_gpu(tmp_path, ends_by):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/pynvml.py").write_text(MADE_GPU)
    used = tmp_path / "used"
    used.write_text("0")
    path = f"{tmp_path / 'fake'}:{tmp_path / 'site'}"
    agent = ByHand(tmp_path, JOB_ID, PYTHONPATH=path, USED_BYTES=str(used))
    with contextlib.closing(agent):
        agent.job_info = replace(agent.job_info, platforms=("cuda",), restarts=True)
        assert agent.admit().machine.seen_gpus.names == ("NVIDIA H200",)
        agent.send(agent.order(SLEEPS))
        agent.until(lambda: WorkerSpawned in kinds(agent))
        used.write_text(str(50 * 2**30))
        agent.send(NextAttempt(2, (0,)))
        assert (
            "waiting until the GPU memory of the previous attempt is free: 50.0 GiB" in agent.process.stderr.readline()
        )
        agent.receive()
        assert kinds(agent).count(AgentReport) == 1
        match ends_by:
            case "memory":
                used.write_text("0")
                agent.until(lambda: any(getattr(message, "attempt", 0) == 2 for message in agent.received))
            case "signal":
                agent.process.send_signal(signal.SIGTERM)
                assert agent.expect(AgentSignalled) == AgentSignalled(0, signal.SIGTERM)
            case "loss":
                agent.line.close()
                assert agent.end()[0] == 69
                return
        assert agent.shut_down(0)[0] == 0


@pytest.mark.extended
@pytest.mark.parametrize("when", ["before the start", "while the workers run"])
def test_at_a_terminal_the_second_ctrl_c_ends_the_agent_and_its_workers(by_hand, when):
    agent = by_hand(changes=BY_TERMINAL)
    pid = agent.run(SLEEPS) if when == "while the workers run" else agent.admit() and 0
    agent.process.send_signal(signal.SIGINT)
    assert agent.expect(AgentSignalled) == AgentSignalled(0, signal.SIGINT)
    agent.process.send_signal(signal.SIGINT)
    assert agent.end()[0] == 130
    assert not pid or not is_alive(pid)


def test_an_error_in_a_task_thread_ends_the_agent_with_one_line(by_hand):
    agent = by_hand(changes=NO_FILES)
    agent.connect()
    status, err = agent.end()
    assert status == 69 and err.startswith("jaxrun: on ") and "Traceback" not in err and err.count("\n") == 1
