"""The agent of one worker, as mpirun or srun starts it: real processes without jax, the head played by hand."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agent_by_hand import SLEEPS, ByHand
from harness import TIME_LIMIT, is_alive, wait_until, wait_until_dead, wait_until_gone
from msgspec.structs import replace

from jaxrun import __version__
from jaxrun.node.agent import __main__ as agent_command
from jaxrun.protocol import auth
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentReport,
    AgentSignalled,
    AtPrompt,
    FirstOutput,
    OutputChunk,
    OutputCredit,
    Shutdown,
    SignalWorker,
    StartAgain,
    StartWorkers,
    StreamEnded,
    ToRanks,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.env import AgentEnv
from jaxrun.protocol.query_messages import RankDetail, RankQuery, RankReply
from jaxrun.protocol.worker_messages import Done, Exit, Failed, Hello


@pytest.mark.parametrize(("text", "sees"), [("{}", True), ("another job", False), (None, False)])
def test_an_agent_reports_what_is_there_and_whether_it_sees_the_jobs_own_run_directory(
    by_hand, tmp_path, job_id, text, sees
):
    run_dir = tmp_path / "run"
    if text is not None:
        run_dir.mkdir()
        (run_dir / "job.json").write_text(text.format(job_id))
    head = by_hand(rank=2, size=5, run_dir=str(run_dir))
    report = head.admit()
    assert report.can_write_run_dir is sees
    assert (report.agent, report.size, report.pid) == (2, 5, head.process.pid)
    assert report.host == os.uname().nodename and report.jaxrun_version == __version__
    assert report.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert report.machine.cores == tuple(sorted(os.sched_getaffinity(0))) and report.directory == str(tmp_path)
    assert report.address == report.head_address == "127.0.0.1"
    assert report.machine.seen_gpus.names == () and abs(report.time - time.time()) < TIME_LIMIT
    assert head.shut_down(3) == (3, "")


def test_a_worker_from_its_start_to_its_end_is_the_agents_child_as_the_start_message_says(by_hand):
    head = by_hand(OMPI_MARK="7")
    names = "COLOUR", "OMPI_MARK", "JAXRUN_TOKEN", "JAXRUN_HEAD_ADDRESSES", "JAXRUN_RANK", "OMPI_COMM_WORLD_RANK"
    shown = f"print([os.environ.get(name) for name in {names}], os.getppid())"
    head.run(f"run(); {shown}; print('bad', file=sys.stderr); done()")
    assert head.expect(Done).rank == 0
    head.send(Exit())
    exited = head.expect(WorkerExited)
    assert exited.peak_memory_bytes > 0
    assert replace(exited, peak_memory_bytes=0) == WorkerExited(0, 0, stderr_tail="bad\n")
    assert head.output().decode() == f"['blue sky', '7', None, None, '0', '0'] {head.process.pid}\n"
    assert head.output("err") == b"bad\n"
    assert head.shut_down(0) == (0, "")
    kinds = [type(message) for message in head.received]
    assert kinds[:3] == [AgentConnected, AgentReport, WorkerSpawned] and kinds.count(FirstOutput) == 1
    assert kinds.index(FirstOutput) < kinds.index(OutputChunk) < kinds.index(StreamEnded) < kinds.index(WorkerExited)
    assert kinds.index(Done) < kinds.index(WorkerExited) and kinds[-1] is WorkerExited


@pytest.mark.parametrize("stdin", ["0", "none"])
def test_an_agent_says_that_the_rank_with_the_standard_input_may_be_at_a_prompt_and_not_while_it_computes(
    by_hand, stdin
):
    head = by_hand()
    waits = "read, _ = os.pipe(); os.write(1, b'name? '); time.sleep(0.8); os.write(1, b'!\\n'); os.write(1, b'age? ')"
    head.run(f"run(); {waits}; os.read(read, 1)", stdin=stdin)
    if stdin == "0":
        assert head.expect(AtPrompt) == AtPrompt(0)
        assert head.output() == b"name? !\nage? "
    head.send(SignalWorker(signal.SIGKILL))
    head.expect(WorkerExited)
    assert [type(message) for message in head.received].count(AtPrompt) == (stdin == "0")
    assert head.shut_down(0)[0] == 0


def test_an_agent_of_several_ranks_starts_them_together_and_an_order_may_be_for_some(by_hand):
    head = by_hand(size=2, ranks="0-1")
    assert head.admit().agent == 0
    notes = "signal.signal(10, lambda *_: os.write(1, b'signalled\\n')); print('ready', flush=True)\n"
    orders = [head.order(*[notes + "while True: time.sleep(600)"] * 2, rank=rank, local_rank=rank) for rank in (0, 1)]
    head.send(StartWorkers(tuple(start for order in orders for start in order.workers)))
    head.until(lambda: sum(isinstance(one, WorkerSpawned) for one in head.received) == 2)
    head.until(lambda: head.output().count(b"ready") == 2)
    head.send(ToRanks((1,), SignalWorker(signal.SIGUSR1)))
    head.until(lambda: b"signalled\n" in head.output())
    chunks = [one for one in head.received if isinstance(one, OutputChunk)]
    assert b"".join(one.data for one in chunks if one.rank == 1) == b"ready\nsignalled\n"
    assert b"".join(one.data for one in chunks if one.rank == 0) == b"ready\n"
    head.send(SignalWorker(signal.SIGTERM))
    head.until(lambda: sum(isinstance(one, WorkerExited) for one in head.received) == 2)
    assert [type(one) for one in head.received].count(AgentReport) == 1
    assert head.shut_down(0) == (0, "")


def test_an_agent_that_was_started_again_with_other_ranks_obeys_orders_for_all_that_it_gets(by_hand):
    head = by_hand(rank=2, size=4, ranks="2")
    assert head.admit().agent == 2
    orders = [head.order(*[SLEEPS] * 4, rank=rank, local_rank=rank - 2) for rank in (2, 3)]
    head.send(StartWorkers(tuple(start for order in orders for start in order.workers)))
    head.until(lambda: sum(isinstance(one, WorkerSpawned) for one in head.received) == 2)
    head.send(SignalWorker(signal.SIGKILL))
    head.until(lambda: sum(isinstance(one, WorkerExited) for one in head.received) == 2)
    assert {one.rank for one in head.received if isinstance(one, WorkerExited)} == {2, 3}
    assert head.shut_down(0) == (0, "")


def test_a_failure_is_reported_before_the_exit_and_logs_are_written_here_where_they_can_be(by_hand, tmp_path):
    head = by_hand()
    head.run("run(); print('hello'); fail('bad record', 3)", log_dir=str(tmp_path), show_output=False)
    assert head.expect(Failed).message == "bad record"
    assert head.expect(WorkerExited).status == 3
    kinds = [type(message) for message in head.received]
    assert kinds.index(Failed) < kinds.index(WorkerExited)
    assert head.shut_down(0)[0] == 0
    assert (tmp_path / "rank-0000.out").read_bytes() == b"hello\n"
    assert b"ValueError: bad record" in (tmp_path / "rank-0000.err").read_bytes()
    assert head.output() == b"" and FirstOutput(0) in head.received


def test_signals_and_stacks_of_a_running_worker_which_leaves_nothing(by_hand, tmp_path):
    """The head's signals and SIGUSR1 are the worker's; a signal of the scheduler to the agent is the head's."""
    head = by_hand()
    shows = "[signal.signal(number, lambda number, frame: print(-number, flush=True)) for number in (10, 15)]"
    left_behind = f"grandchild({str(tmp_path / 'pid')!r})"
    pid = head.run(f"{shows}; {left_behind}; run(); print('ready', flush=True)\nwhile True: time.sleep(600)")
    head.until(lambda: b"ready" in head.output())
    head.send(SignalWorker(signal.SIGTERM))
    head.until(lambda: b"-15" in head.output())
    head.process.send_signal(signal.SIGUSR1)
    head.until(lambda: b"-10" in head.output())
    head.process.send_signal(signal.SIGTERM)
    assert head.expect(AgentSignalled) == AgentSignalled(0, signal.SIGTERM)

    def answered():  # a worker that gets no core for half a second has not
        head.send(RankQuery(7, RankDetail.STACKS))
        return (reply := head.expect(RankReply)).stacks and reply

    taken = wait_until(answered)
    assert taken.number == 7 and "worker_by_hand.py" in taken.stacks and taken.cpu_seconds >= 0.0
    assert head.output() == b"ready\n-15\n-10\n" and is_alive(pid)
    assert head.shut_down(143)[0] == 143
    assert not is_alive(pid) and not is_alive(int((tmp_path / "pid").read_text()))


def test_the_next_process_of_a_rank_gets_no_signal_for_the_stacks_of_its_last_one(by_hand):
    head = by_hand()
    deaf = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
    pid = head.run(f"run(); {deaf}; print('ready', flush=True); time.sleep(600)")
    head.until(lambda: b"ready" in head.output())
    asked_at = time.monotonic()
    head.send(RankQuery(7, RankDetail.STACKS))
    os.kill(pid, signal.SIGKILL)
    head.expect(WorkerExited)
    head.send(StartAgain())
    again = head.expect(WorkerSpawned).pid
    kinds = [type(message) for message in head.received]
    assert kinds.index(RankReply) < kinds.index(WorkerExited), "nobody waits for an answer that cannot come"
    time.sleep(max(0.0, asked_at + 0.6 - time.monotonic()))  # the last signal would come after 0.4 s
    assert is_alive(again) and head.shut_down(0)[0] == 0


def test_c_frames_of_a_process_that_has_ended_are_not_waited_for(by_hand, tmp_path):
    py_spy, has_begun = tmp_path / "py-spy", tmp_path / "begun"
    py_spy.write_text(f"#!/bin/sh\ntouch {has_begun}\nexec sleep 600\n")
    py_spy.chmod(0o755)
    changes = f"from jaxrun.node.agent import pyspy; pyspy.find_pyspy = lambda: {str(py_spy)!r}"
    head = by_hand(changes=changes)
    pid = head.run(SLEEPS)
    head.send(RankQuery(7, RankDetail.NATIVE_STACKS))
    wait_until(has_begun.exists, "py-spy's start")
    os.kill(pid, signal.SIGKILL)
    head.expect(WorkerExited)
    (reply,) = (message for message in head.received if isinstance(message, RankReply))
    assert "worker_by_hand.py" in reply.stacks and "it said nothing" in reply.native_stacks
    assert head.shut_down(0)[0] == 0


def test_the_loss_of_the_head_ends_the_worker(by_hand):
    head = by_hand()
    pid = head.run(SLEEPS)
    head.line.close()
    assert head.end()[0] == 69
    assert not is_alive(pid)


def test_the_loss_of_the_head_before_the_start_message_ends_the_agent(by_hand):
    head = by_hand()
    head.admit()
    head.line.close()
    assert head.end()[0] == 69


def test_a_signal_before_the_start_is_reported_and_messages_that_come_together_with_the_start_are_handled(by_hand):
    head = by_hand()
    head.admit()
    head.process.send_signal(signal.SIGTERM)
    assert head.expect(AgentSignalled) == AgentSignalled(0, signal.SIGTERM)
    head.send(head.order(SLEEPS), Shutdown(7))
    assert head.end()[0] == 7


@pytest.mark.extended
def test_an_agent_that_is_killed_takes_its_worker_with_it_and_no_other(tmp_path, job_id):
    """Two agents of one job on one host: the end of one is not the other's."""
    with contextlib.ExitStack() as stack:
        heads, workers = [], []
        for rank in range(2):
            (tmp_path / str(rank)).mkdir()
            heads.append(ByHand(tmp_path / str(rank), job_id, rank=rank, size=2))
            stack.callback(heads[-1].kill)
        for head in heads:
            head.begin(f"grandchild({str(tmp_path / str(head.rank) / 'pid')!r}); {SLEEPS}")
            workers.append(head.expect(WorkerSpawned).pid)
            head.expect(Hello)
        daemons = [int((tmp_path / str(rank) / "pid").read_text()) for rank in range(2)]
        heads[0].process.kill()
        heads[0].process.communicate()
        wait_until_dead(workers[0], daemons[0])
        heads[0].until(lambda: heads[0].line.lost_reason)
        assert "agent" in heads[0].line.lost_reason
        assert is_alive(workers[1]) and is_alive(daemons[1]) and heads[1].process.poll() is None
        assert heads[1].shut_down(0)[0] == 0
    wait_until_gone(job_id)


@pytest.mark.extended
def test_a_stuck_head_stops_the_workers_output_and_nothing_else(by_hand):
    head = by_hand()
    writes = "[os.write(1, b'x' * 65536) for _ in range(128)]"
    head.run(f"run(); {writes}; done()")
    head.until(lambda: len(head.output()) > 2**20)
    for _ in range(5):
        head.send(RankQuery(7, RankDetail.STACKS))
        head.expect(RankReply)
    assert len(head.output()) < 2**20 + 2**19
    credited = 0

    def has_all():
        nonlocal credited
        if len(head.output()) > credited:
            head.send(OutputCredit(len(head.output()) - credited))
            credited = len(head.output())
        return credited == 2**23

    head.until(has_all)
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


# ---- before it has a head


def test_an_agent_without_a_head_says_what_it_has_tried(by_hand):
    with socket.socket() as bound:  # a port at which nobody listens, and nobody else can
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        head = by_hand(rank=4, size=9, JAXRUN_HEAD_ADDRESSES=f"127.0.0.1:{port}", JAXRUN_INIT_TIMEOUT="0.4")
        status, err = head.end()
    assert status == 69 and err.startswith(
        f"jaxrun: rank 4 on {os.uname().nodename} found no head of the job within 0.4 s"
    )
    assert f"127.0.0.1:{port} refuses connections" in err and head.token not in err


def test_an_agent_with_another_jobs_token_is_refused_and_shows_no_token(by_hand):
    wrong = auth.new_token()
    head = by_hand(token=wrong, timeout=1.5)
    deadline = time.monotonic() + TIME_LIMIT
    while head.process.poll() is None and time.monotonic() < deadline:
        head.loop.run_once(0.02)
    assert head.line is None
    status, err = head.end()
    assert status == 69 and "found no head of the job" in err
    assert wrong not in err and head.token not in err


@pytest.mark.parametrize("when", ["while it looks for a head", "before its first line"])
def test_an_agent_ends_with_the_process_that_started_it(tmp_path, when):
    """As where jaxrun is killed during the start, and its mpirun with it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
        env = {**os.environ, **AgentEnv("0" * 32, address, auth.new_token(), "open-mpi", 60.0).to_env(), **ranks}
        go = tmp_path / "go"
        waits = f"until [ -e {go} ]; do sleep 0.02; done; " if when == "before its first line" else ""
        agent = f"({waits}exec {sys.executable} -m jaxrun.node.agent) 2> {tmp_path / 'err'}"
        mpirun = subprocess.Popen(
            ["sh", "-c", f"{agent} & echo $!; wait"], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            pid = int(mpirun.stdout.readline())
            if not waits:
                silent.settimeout(TIME_LIMIT)
                silent.accept()[0].close()
            assert is_alive(pid)
        finally:
            mpirun.kill()
            mpirun.wait()
            mpirun.stdout.close()
            go.touch()
        wait_until_dead(pid)
    assert "the process that started this agent ended before" in (tmp_path / "err").read_text()


@pytest.mark.parametrize(
    ("env", "status", "text"),
    [
        ({"JAXRUN_INIT_TIMEOUT": "soon"}, 70, "JAXRUN_INIT_TIMEOUT='soon' is not a valid float"),
        ({"JAXRUN_HEAD_ADDRESSES": "nowhere"}, 2, "an address is written host:port"),
        ({"OMPI_COMM_WORLD_RANK": "x"}, 69, "OMPI_COMM_WORLD_RANK='x' is not a whole number"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, 69, "OMPI_COMM_WORLD_RANK=1, which is not a rank of a job of"),
    ],
    ids=["timeout", "address", "rank", "size"],
)
def test_an_environment_that_is_not_the_jobs_is_an_error_of_one_line(monkeypatch, capsys, env, status, text):
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    agent_env = AgentEnv("0" * 32, "127.0.0.1:9", auth.new_token(), "open-mpi", 60.0).to_env()
    for name, value in (agent_env | ranks | env).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["agent"])
    assert agent_command.main() == status
    err = capsys.readouterr().err
    assert err.startswith("jaxrun: ") and text in err
