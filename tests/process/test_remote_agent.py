"""The agent of one worker, as mpirun or srun starts it: real processes without jax, the head played by hand."""

import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from agent_by_hand import SLEEPS, ByHand, alive, wait_until_gone
from harness import TIME_LIMIT

from jaxrun import __version__
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentReport,
    AgentSignalled,
    FirstOutput,
    OutputChunk,
    OutputCredit,
    Shutdown,
    SignalWorker,
    StreamEnded,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply, SnapshotRequest
from jaxrun.protocol.worker_messages import (
    Done,
    Exit,
    Failed,
    Hello,
)


def test_an_agent_reports_what_is_there(by_hand, tmp_path):
    head = by_hand(rank=2, size=5)
    report = head.admit()
    assert (report.rank, report.size, report.pid) == (2, 5, head.process.pid)
    assert report.host == os.uname().nodename and report.jaxrun_version == __version__
    assert report.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert report.cpus == tuple(sorted(os.sched_getaffinity(0))) and report.directory == str(tmp_path)
    assert report.address == report.head_address == "127.0.0.1"
    assert report.gpu_names == () and not report.can_write_run_dir
    assert abs(report.time - time.time()) < TIME_LIMIT
    assert head.shut_down(0) == (0, "")


@pytest.mark.parametrize(("text", "sees"), [("{}", True), ("another job", False), (None, False)])
def test_an_agent_knows_the_jobs_own_run_directory(by_hand, tmp_path, job_id, text, sees):
    run_dir = tmp_path / "run"
    if text is not None:
        run_dir.mkdir()
        (run_dir / "job.json").write_text(text.format(job_id))
    head = by_hand(run_dir=str(run_dir))
    assert head.admit().can_write_run_dir is sees
    assert head.shut_down(3) == (3, "")


def test_a_worker_from_its_start_to_its_end(by_hand):
    head = by_hand()
    head.run("run(); print('hello'); print('bad', file=sys.stderr); done()")
    assert head.expect(Done).rank == 0
    head.send(Exit())
    ended = head.expect(WorkerExited)
    assert replace(ended, output_bursts=()) == WorkerExited(0, 0, stderr_tail="bad\n")
    assert sum(count for _, _, count in ended.output_bursts) == len("hello\nbad\n")
    assert head.shut_down(0) == (0, "")
    kinds = [type(message) for message in head.received]
    assert kinds[:3] == [AgentConnected, AgentReport, WorkerSpawned] and kinds.count(FirstOutput) == 1
    assert kinds.index(FirstOutput) < kinds.index(OutputChunk) < kinds.index(StreamEnded) < kinds.index(WorkerExited)
    assert kinds.index(Done) < kinds.index(WorkerExited) and kinds[-1] is WorkerExited
    assert head.output() == b"hello\n" and head.output("err") == b"bad\n"


def test_the_worker_is_the_agents_child_as_the_start_message_says(by_hand):
    head = by_hand(OMPI_MARK="7")
    names = "COLOUR", "OMPI_MARK", "JAXRUN_TOKEN", "JAXRUN_HEAD", "JAXRUN_RANK", "OMPI_COMM_WORLD_RANK"
    shown = f"print([os.environ.get(name) for name in {names}], os.getppid())"
    head.run(f"run(); {shown}; done()")
    head.expect(Done)
    head.send(Exit())
    head.expect(WorkerExited)
    assert head.output().decode() == f"['blue sky', '7', None, None, '0', '0'] {head.process.pid}\n"
    assert head.shut_down(0)[0] == 0


def test_a_failure_is_reported_before_the_exit(by_hand):
    head = by_hand()
    head.run("run(); fail('bad record', 3)")
    assert head.expect(Failed).message == "bad record"
    head.expect(WorkerExited)
    kinds = [type(message) for message in head.received]
    assert kinds.index(Failed) < kinds.index(WorkerExited) and head.received[-1].status == 3
    assert head.shut_down(0)[0] == 0


def test_logs_are_written_here_where_they_can_be(by_hand, tmp_path):
    head = by_hand()
    head.run("run(); print('hello'); fail()", log_dir=str(tmp_path), show_output=False)
    head.expect(WorkerExited)
    assert head.shut_down(0)[0] == 0
    assert (tmp_path / "rank-0000.out").read_bytes() == b"hello\n"
    assert b"ValueError: bad record" in (tmp_path / "rank-0000.err").read_bytes()
    assert head.output() == b"" and FirstOutput(0) in head.received


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1], ids=lambda signum: signum.name)
def test_the_head_signals_the_worker(by_hand, signum):
    head = by_hand()
    head.run(f"signal.signal({int(signum)}, lambda *args: os._exit(9)); print('ready', flush=True); {SLEEPS}")
    head.until(lambda: b"ready" in head.output())
    time.sleep(0.05)
    head.send(SignalWorker(signum))
    assert head.expect(WorkerExited).status == 9
    assert head.shut_down(0)[0] == 0


def test_a_snapshot_has_the_stacks_of_the_worker(by_hand):
    head = by_hand()
    head.run(SLEEPS)
    time.sleep(0.1)
    head.send(SnapshotRequest(SnapshotPurpose.SHOW))
    taken = head.expect(SnapshotReply)
    assert taken.purpose == "show" and "worker_by_hand.py" in taken.stacks[0] and taken.cpu_seconds[0] >= 0.0
    assert head.shut_down(0)[0] == 0


def test_an_agent_that_is_shut_down_leaves_nothing_of_its_worker(by_hand, tmp_path):
    head = by_hand()
    head.run(f"grandchild({str(tmp_path / 'pid')!r}); {SLEEPS}")
    head.until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    assert head.shut_down(75)[0] == 75
    assert not alive(int((tmp_path / "pid").read_text()))


def test_the_loss_of_the_head_ends_the_worker(by_hand):
    head = by_hand()
    head.run(SLEEPS)
    pid = next(message.pid for message in head.received if isinstance(message, WorkerSpawned))
    head.line.close()
    assert head.end()[0] == 69
    assert not alive(pid)


def test_the_loss_of_the_head_before_the_start_message_ends_the_agent(by_hand):
    head = by_hand()
    head.admit()
    head.line.close()
    assert head.end()[0] == 69


def test_an_agent_that_is_killed_takes_the_worker_with_it(by_hand, tmp_path):
    head = by_hand()
    head.run(f"grandchild({str(tmp_path / 'pid')!r}); {SLEEPS}")
    head.until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    head.process.kill()
    head.process.communicate()
    wait_until_gone(head.job_id)
    head.until(lambda: head.line.lost_reason)
    assert "agent" in head.line.lost_reason


def test_a_worker_of_another_rank_is_left_alone_by_the_guard(tmp_path, job_id):
    """Two agents of one job on one host: the end of one is not the other's."""
    with contextlib.ExitStack() as stack:
        heads = []
        for rank in range(2):
            (tmp_path / str(rank)).mkdir()
            heads.append(ByHand(tmp_path / str(rank), job_id, rank=rank, size=2))
            stack.callback(heads[-1].kill)
        for head in heads:
            head.begin(SLEEPS)
            head.expect(Hello)
        heads[0].process.kill()
        heads[0].process.communicate()
        other, pid = (
            next(message.pid for message in head.received if isinstance(message, WorkerSpawned)) for head in heads
        )
        deadline = time.monotonic() + TIME_LIMIT
        while alive(other):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert alive(pid) and heads[1].process.poll() is None
        assert heads[1].shut_down(0)[0] == 0


def test_a_signal_of_the_scheduler_is_reported_to_the_head(by_hand):
    head = by_hand()
    head.run(SLEEPS)
    head.process.send_signal(signal.SIGTERM)
    assert head.expect(AgentSignalled) == AgentSignalled(0, signal.SIGTERM)
    assert not [message for message in head.received if isinstance(message, WorkerExited)]
    assert head.shut_down(143)[0] == 143


def test_sigusr1_to_the_agent_is_the_workers(by_hand):
    head = by_hand()
    head.run(f"signal.signal(signal.SIGUSR1, lambda *args: os._exit(9)); print('ready', flush=True); {SLEEPS}")
    head.until(lambda: b"ready" in head.output())
    head.process.send_signal(signal.SIGUSR1)
    assert head.expect(WorkerExited).status == 9
    assert head.shut_down(0)[0] == 0


def test_a_signal_of_the_scheduler_before_the_start_is_reported_to_the_head(by_hand):
    head = by_hand()
    head.admit()
    head.process.send_signal(signal.SIGTERM)
    assert head.expect(AgentSignalled) == AgentSignalled(0, signal.SIGTERM)
    assert head.shut_down(0)[0] == 0


def test_messages_that_come_together_with_the_start_are_handled(by_hand):
    head = by_hand()
    head.admit()
    head.send(head.order(SLEEPS), Shutdown(7))
    assert head.end()[0] == 7


def test_a_stuck_head_stops_the_workers_output_and_nothing_else(by_hand):
    head = by_hand()
    writes = "[os.write(1, b'x' * 65536) for _ in range(128)]"
    head.run(f"run(); {writes}; done()")
    head.until(lambda: len(head.output()) > 2**20)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        head.receive()
        time.sleep(0.005)
    assert len(head.output()) < 2**20 + 2**19
    head.send(SnapshotRequest(SnapshotPurpose.SHOW))
    head.expect(SnapshotReply)
    credited = 0
    deadline = time.monotonic() + TIME_LIMIT
    while len(head.output()) < 2**23 and time.monotonic() < deadline:
        if len(head.output()) > credited:
            head.send(OutputCredit(len(head.output()) - credited))
            credited = len(head.output())
        head.receive()
    assert len(head.output()) == 2**23
    head.expect(Done)
    head.send(Exit())
    head.expect(WorkerExited)
    assert head.shut_down(0)[0] == 0


def test_a_malformed_message_ends_the_agent_and_its_worker(by_hand):
    head = by_hand()
    head.run(SLEEPS)
    head.line.send_frame(b"GET / HTTP/1.1\r\n\r\n")
    status, err = head.end()
    assert status == 70 and "a frame announces" in err and "Traceback" not in err
