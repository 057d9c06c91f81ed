"""The agent of one worker, as mpirun or srun starts it: real processes without jax, the head played by hand."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from harness import TIME_LIMIT

from jaxrun import __version__
from jaxrun.agent.guard import find_marked, job_marker
from jaxrun.channel.connection import AGENT_TO_HEAD, Connection
from jaxrun.channel.event_loop import EventLoop
from jaxrun.channel.interfaces import Interface
from jaxrun.channel.listener import listen_on_tcp
from jaxrun.protocol import auth
from jaxrun.protocol.addresses import format_addresses
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentReport,
    AgentSignalled,
    FirstOutput,
    JobInfo,
    OutputChunk,
    OutputCredit,
    Shutdown,
    SignalWorker,
    StartWorker,
    StreamEnded,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.env import AgentEnv
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply, SnapshotRequest
from jaxrun.protocol.worker_messages import (
    CoordinatorReady,
    DeviceReport,
    Done,
    Exit,
    Failed,
    Hello,
    Run,
    StartCoordinator,
)

HERE = Path(__file__).parent
FAKE_RUNTIME = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
import worker_by_hand
env = worker_by_hand.WorkerEnv.from_env(os.environ)
worker_by_hand.live(env, sys.argv[2 + env.rank])
"""
SLEEPS = "run(); time.sleep(60)"


class ByHand:
    """A head that the test controls, and the agent of one rank."""

    def __init__(self, directory, job_id, *, rank=0, size=1, run_dir="", timeout=20.0, token=None, **env):
        self.rank, self.size, self.job_id = rank, size, job_id
        self.token = auth.new_token()
        interface = Interface("lo", "127.0.0.1")
        self.listener, self.loop = listen_on_tcp([interface], self.token, everywhere=False), EventLoop()
        self.listener.attach(self.loop, 0, self._on_peer)
        self.job_info = JobInfo(job_id, run_dir, ("cpu",))
        agent_env = AgentEnv(
            job_id, format_addresses(self.listener.addresses), token or self.token, "open-mpi", timeout
        )
        ranks = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}
        fake = directory / "fake" / "jaxrun_runtime"
        fake.mkdir(parents=True)
        (fake / "__init__.py").touch()
        (fake / "__main__.py").write_text(FAKE_RUNTIME)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxrun.agent"],
            env={**os.environ, **agent_env.to_env(), **ranks, "PYTHONPATH": str(directory / "fake"), **env},
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.line = None
        self.received = []
        self._examined = 0  # how many of them

    def _on_peer(self, peer):
        assert peer.rank == self.rank
        self.line = Connection(peer.connection, AGENT_TO_HEAD, peer.session)
        self.line.send(self.job_info)

    def admit(self):
        """Let the agent in; returns its report."""
        deadline = time.monotonic() + TIME_LIMIT
        while self.line is None:
            assert time.monotonic() < deadline and self.process.poll() is None, self.process.poll()
            self.loop.run_once(0.02)
        return self.expect(AgentReport)

    def begin(self, *codes, **changes):
        """Let it in, and have it start its worker by hand."""
        report = self.admit()
        self.send(self.order(*codes, **changes))
        return report

    def order(self, *codes, **changes):
        values = {
            "rank": self.rank,
            "size": self.size,
            "local_rank": 0,
            "local_size": 1,
            "host": "h1",
            "program": ("p", *([""] * self.rank), *codes),
            "environment": {"COLOUR": "blue sky"},
            "local_device_ids": (),
            "init_timeout": 20.0,
            "run_dir": "",
            "log_dir": "",
            "show_output": True,
            "lockstep": "record",
            "make_mesh": "jaxrun",
        }
        return StartWorker(**{**values, **changes})

    def run(self, code, **changes):
        """Everything up to Run."""
        report = self.begin(code, **changes)
        self.expect(Hello)
        self.send(StartCoordinator("127.0.0.1"))
        self.expect(CoordinatorReady)
        self.expect(DeviceReport)
        self.send(Run())
        return report

    def send(self, *messages):
        for message in messages:
            self.line.send(message)

    def expect(self, kind):
        """The next message of this kind; all are kept in `received`."""
        deadline = time.monotonic() + TIME_LIMIT
        while True:
            while self._examined < len(self.received):
                self._examined += 1
                if isinstance(self.received[self._examined - 1], kind):
                    return self.received[self._examined - 1]
            assert not self.line.lost_reason and time.monotonic() < deadline, (
                kind,
                self.received[-5:],
                self.line.lost_reason,
            )
            self.receive()
            time.sleep(0.002)

    def receive(self):
        arrived = self.line.receive()
        self.received += arrived
        return arrived

    def until(self, condition):
        deadline = time.monotonic() + TIME_LIMIT
        while not condition():
            assert time.monotonic() < deadline, self.received
            self.receive()
            time.sleep(0.002)

    def output(self, stream="out"):
        return b"".join(one.data for one in self.received if isinstance(one, OutputChunk) and one.stream == stream)

    def end(self):
        """(its exit status, its stderr)"""
        _, err = self.process.communicate(timeout=TIME_LIMIT)
        return self.process.returncode, err

    def shut_down(self, status=0):
        self.send(Shutdown(status))
        return self.end()

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        if self.line is not None:
            self.line.close()
        self.listener.close()

    def close(self):
        self.kill()
        wait_until_gone(self.job_id)


def wait_until_gone(job_id):
    """Until no process of the job is left."""
    deadline = time.monotonic() + TIME_LIMIT
    while left := list(find_marked(job_marker(job_id))):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def job_id():
    return os.urandom(16).hex()


@pytest.fixture
def by_hand(tmp_path, job_id):
    """by_hand(…) makes a ByHand; after the test nothing of it is left."""
    with contextlib.ExitStack() as stack:

        def start(**more):
            head = ByHand(tmp_path, job_id, **more)
            stack.callback(head.close)
            return head

        yield start


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


def test_an_agent_without_a_head_says_what_it_has_tried(by_hand):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    head = by_hand(rank=4, size=9, JAXRUN_HEAD=f"127.0.0.1:{port}", JAXRUN_INIT_TIMEOUT="0.4")
    status, err = head.end()
    assert status == 69 and err.startswith(
        f"jaxrun: rank 4 on {os.uname().nodename} found no head of the job within 0.4 s"
    )
    assert f"127.0.0.1:{port} refuses connections" in err and head.token not in err


@pytest.mark.parametrize("when", ["while it looks for a head", "before its first line"])
def test_an_agent_ends_with_what_has_started_it(tmp_path, when):
    """As where jaxrun is killed during the start, and its mpirun with it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
        env = {**os.environ, **AgentEnv("0" * 32, address, auth.new_token(), "open-mpi", 60.0).to_env(), **ranks}
        go = tmp_path / "go"
        waits = f"until [ -e {go} ]; do sleep 0.02; done; " if when == "before its first line" else ""
        agent = f"({waits}exec {sys.executable} -m jaxrun.agent) 2> {tmp_path / 'err'}"
        mpirun = subprocess.Popen(
            ["sh", "-c", f"{agent} & echo $!; wait"],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            pid = int(mpirun.stdout.readline())
            if not waits:
                silent.settimeout(TIME_LIMIT)
                silent.accept()[0].close()
            assert alive(pid)
        finally:
            mpirun.kill()
            mpirun.wait()
            mpirun.stdout.close()
            go.touch()
        deadline = time.monotonic() + TIME_LIMIT
        while alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert "what started this agent has ended" in (tmp_path / "err").read_text()


def test_an_agent_with_another_jobs_token_is_refused_and_shows_no_token(by_hand):
    wrong = auth.new_token()
    head = by_hand(token=wrong, timeout=1.5)
    deadline = time.monotonic() + TIME_LIMIT
    while head.process.poll() is None and time.monotonic() < deadline:
        head.loop.run_once(0.02)
    assert head.line is None
    status, err = head.end()
    assert status == 69 and "refuses: it does not know the token of this job" in err
    assert wrong not in err and head.token not in err


@pytest.mark.parametrize(
    ("env", "status", "text"),
    [
        ({"JAXRUN_INIT_TIMEOUT": "soon"}, 70, "JAXRUN_INIT_TIMEOUT='soon' is not a valid float"),
        ({"JAXRUN_HEAD": "nowhere"}, 2, "an address is written host:port"),
        ({"OMPI_COMM_WORLD_RANK": "x"}, 69, "OMPI_COMM_WORLD_RANK='x' is no whole number"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, 69, "OMPI_COMM_WORLD_RANK=1, which is no rank in a job of"),
    ],
    ids=["timeout", "address", "rank", "size"],
)
def test_an_environment_that_is_not_the_jobs_is_an_error_of_one_line(by_hand, env, status, text):
    head = by_hand(**env)
    found, err = head.end()
    assert found == status and err.startswith("jaxrun: ") and text in err and "Traceback" not in err
