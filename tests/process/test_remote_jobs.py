"""Whole jobs whose agents are processes of their own, started by a shell script instead of mpirun; no jax."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import TIME_LIMIT, extended

from jaxrun.agent.guard import find_marked, job_marker
from jaxrun.protocol.names import CONTROL_FD
from jaxrun.rundir.rundir import EVENTS_FILE, VERDICT_FILE
from jaxrun.supervisor.launch_process import LOG_NAME

HERE = Path(__file__).parent
SLEEPS = "run(); time.sleep(600)"
READY = "run(); print('ready', flush=True); time.sleep(600)"
CLEAN = "run(); done()"
FAKE_RUNTIME = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
import worker_by_hand
env = worker_by_hand.WorkerEnv.from_env(os.environ)
worker_by_hand.live(env, sys.argv[2 + env.rank])
"""
LAUNCHER = """
import json, os, sys
from pathlib import Path
from jaxrun.backends.remote_plan import plan_remote
from jaxrun.job.fault_spec import parse_faults
from jaxrun.job.job import Job
from jaxrun.job.plan import LaunchCommand
from jaxrun.supervisor.run import run

script, options, *codes = sys.argv[1:]
options = json.loads(options)
if "run_dir" in options:
    options["run_dir"] = Path(options["run_dir"])
if "chaos" in options:
    options["chaos"] = parse_faults(options["chaos"])
size = len(codes)
command = LaunchCommand("open-mpi", "a script", ("/bin/sh", script, str(size)))
job = Job(program=("p", *codes), processes=size, backend="mpirun", platform="cpu", **options)
plan = plan_remote(job, os.environ, os.urandom(16).hex(), command, ["?"] * size)
sys.exit(run(plan, dict(os.environ)))
"""
AGENTS = f"""
rank=0
while [ $rank -lt $1 ]; do
  OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=$1 {sys.executable} -m jaxrun.agent &
  rank=$((rank + 1))
done
wait
"""


class Job:
    """A running job."""

    def __init__(self, directory, codes, script=AGENTS, control=None, **options):
        fake = directory / "fake" / "jaxrun_runtime"
        fake.mkdir(parents=True)
        (fake / "__init__.py").touch()
        (fake / "__main__.py").write_text(FAKE_RUNTIME)
        (directory / "launch").write_text(script)
        self.run_dir = directory / "run"
        options = {"grace": 0.5, "init_timeout": 20.0, "run_dir": str(self.run_dir), **options}
        if options.get("no_run_dir"):
            del options["run_dir"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(directory / "launch"), json.dumps(options), *codes],
            env={
                **os.environ,
                "PYTHONPATH": str(directory / "fake"),
                **({CONTROL_FD: str(control.fileno())} if control else {}),
            },
            pass_fds=[control.fileno()] if control else [],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def job_id(self):
        return json.loads((self.run_dir / "job.json").read_text())["job_id"]

    def events(self, name=None):
        with contextlib.suppress(FileNotFoundError):
            lines = (self.run_dir / EVENTS_FILE).read_text().splitlines()
            return [event for event in map(json.loads, lines) if name in (None, event["event"])]
        return []

    def until(self, condition):
        deadline = time.monotonic() + TIME_LIMIT
        while not (found := condition()):
            assert time.monotonic() < deadline and self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)
        return found

    def until_output(self, text, count=1):
        self.until(lambda: sum(text in path.read_text() for path in self.run_dir.glob("rank-*.out")) >= count)

    def agents(self):
        """Process ids by rank, of those that have started their worker."""
        parents = {}
        for event in self.events("spawned"):
            stat = Path(f"/proc/{event['pid']}/stat").read_text()
            parents[event["rank"]] = int(stat.rpartition(")")[2].split()[1])
        return parents

    def processes(self):
        return list(find_marked(job_marker(self.job_id)))

    def end(self):
        """Its exit status; nothing of the job is left."""
        self.out, self.err = self.process.communicate(timeout=TIME_LIMIT)
        if self.run_dir.exists():
            assert self.processes() == [], self.err
        return self.process.returncode

    def verdict(self):
        return json.loads((self.run_dir / VERDICT_FILE).read_text())

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def start(tmp_path):
    """start(CODE, …) starts a job with a worker by hand for each CODE."""
    with contextlib.ExitStack() as stack:

        def run(*codes, **options):
            job = Job(tmp_path, codes, **options)
            stack.callback(job.close)
            return job

        yield run


def test_a_job_of_three_agents_runs_to_its_end(start):
    job = start(*["run(); print('hello from', rank); print('bad', file=sys.stderr); done()"] * 3)
    assert job.end() == 0, job.err
    assert sorted(job.out.splitlines()) == [f"[{rank}] hello from {rank}" for rank in range(3)]
    assert job.err.count("] bad\n") == 3 and "jaxrun: done in" in job.err
    for rank in range(3):
        assert (job.run_dir / f"rank-{rank:04d}.out").read_text() == f"hello from {rank}\n"
        names = [event["event"] for event in job.events() if event.get("rank") == rank]
        assert [name for name in names if name not in ("first_output", "connected", "reported", "clock")] == [
            "spawned",
            "hello",
            "proof",
            "done",
            "exit",
        ]
    assert job.verdict()["exit_code"] == 0


def test_without_a_run_directory_all_output_comes_by_the_network(start, tmp_path):
    job = start("run(); print('hello'); done()", CLEAN, no_run_dir=True)
    assert job.end() == 0 and job.out == "[0] hello\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fake", "launch"]


def test_the_first_error_ends_the_job_with_its_status(start):
    job = start(SLEEPS, "run(); fail('bad record', 3)", SLEEPS)
    assert job.end() == 3
    assert "jaxrun: rank 1 failed; stopping 2 others" in job.err and "ValueError: bad record" in job.err
    assert b"ValueError: bad record" in (job.run_dir / "rank-0001.err").read_bytes()
    assert job.verdict()["culprits"] == [1]


def test_much_output_arrives_whole_and_in_order(start):
    code = "run(); [print(rank, number, 'x' * 90) for number in range(30000)]; done()"
    job = start(code, code)
    assert job.end() == 0
    for rank in range(2):
        wanted = [f"{rank} {number} {'x' * 90}" for number in range(30000)]
        assert (job.run_dir / f"rank-{rank:04d}.out").read_text().splitlines() == wanted
        assert [line[4:] for line in job.out.splitlines() if line.startswith(f"[{rank}] ")] == wanted


def test_an_agent_that_is_killed_is_named_and_leaves_nothing(start):
    job = start(*[READY] * 3)
    job.until_output("ready", 3)
    os.kill(job.agents()[1], signal.SIGKILL)
    assert job.end() == 69
    assert "rank 1 of 3 was lost: the connection to its agent" in job.err
    assert job.verdict()["culprits"] == [1]


def test_kill_9_of_the_launcher_leaves_nothing(start):
    job = start(*[READY] * 2)
    job.until_output("ready", 2)
    job.process.kill()
    job.process.wait()
    deadline = time.monotonic() + TIME_LIMIT
    while job.processes():
        assert time.monotonic() < deadline, job.processes()
        time.sleep(0.02)
    job.process.communicate()


ON_TERM = "signal.signal(15, lambda *args: done()); run(); listen(); print('ready', flush=True); time.sleep(600)"


@pytest.mark.parametrize("whom", ["the launcher", extended("all agents")])
def test_a_sigterm_that_the_program_obeys_is_a_preemption(start, whom):
    job = start(ON_TERM, ON_TERM)
    job.until_output("ready", 2)
    for pid in [job.process.pid] if whom == "the launcher" else job.agents().values():
        os.kill(pid, signal.SIGTERM)
    assert job.end() == 75 and job.err.count("asked ranks 0-1 to end (SIGTERM)") == 1, job.err


@pytest.mark.parametrize("whom", [extended("the launcher"), "all agents"])
def test_a_sigterm_that_the_program_does_not_obey_ends_it_after_the_grace(start, whom):
    code = "signal.signal(15, signal.SIG_IGN); run(); listen(); print('ready', flush=True); time.sleep(600)"
    job = start(code, code)
    job.until_output("ready", 2)
    for pid in [job.process.pid] if whom == "the launcher" else job.agents().values():
        os.kill(pid, signal.SIGTERM)
    assert job.end() == 143 and "interrupted by SIGTERM (15)" in job.err


def test_a_launch_command_that_fails_is_quoted(start):
    job = start(CLEAN, CLEAN, script="echo 'ssh: Could not resolve hostname h9' >&2; exit 7")
    assert job.end() == 69
    assert "a script ended with status 7 before the job was over; it said:\n" in job.err
    assert "  ssh: Could not resolve hostname h9" in job.err
    assert "Could not resolve" in (job.run_dir / LOG_NAME).read_text()


def test_a_launch_command_that_ends_during_the_job_ends_the_job(start):
    fails = "until [ -e over ]; do sleep 0.02; done; echo node failure; exit 1\n"
    job = start(READY, READY, script=AGENTS.replace("wait\n", fails))
    job.until_output("ready", 2)
    (job.run_dir.parent / "over").touch()
    assert job.end() == 69
    assert "a script ended with status 1 before the job was over; it said:\n  node failure" in job.err


def test_an_agent_that_does_not_come_is_named(start):
    job = start(CLEAN, CLEAN, CLEAN, script=AGENTS.replace("-lt $1", "-lt 2"), init_timeout=8.0)
    assert job.end() == 69
    assert "2 of 3 agents reported within 8 s; missing: rank 2" in job.err
    assert "--interface chooses another" in job.err


DIES = (
    "import os; from jaxrun.agent import __main__, remote; "
    "remote.make_report = lambda *words: os.kill(os.getpid(), 9); __main__.main()"
)


def test_an_agent_that_dies_before_it_has_reported_is_named_at_once(start):
    rank_1 = f"[ $rank = 1 ] && set -- $1 -c '{DIES}' || set -- $1 -m jaxrun.agent\n  OMPI_COMM"
    script = AGENTS.replace("OMPI_COMM", rank_1, 1).replace("-m jaxrun.agent &", '"$2" "$3" &')
    job = start(CLEAN, CLEAN, CLEAN, script=script.replace("wait\n", "sleep 600\n"), init_timeout=300.0)
    assert job.end() == 69
    assert "the agent of rank 1 went away before its worker was started" in " ".join(job.err.split())


@pytest.mark.extended
def test_two_agents_of_one_rank_are_refused(start):
    job = start(CLEAN, CLEAN, script=AGENTS.replace("RANK=$rank", "RANK=0"))
    assert job.end() == 65 and "two agents say that they are rank 0: process " in job.err


@pytest.mark.extended
def test_agents_of_another_size_are_refused(start):
    job = start(CLEAN, CLEAN, script=AGENTS.replace("SIZE=$1", "SIZE=5"))
    assert job.end() == 65 and "was started as one of 5, but the job has 2 processes" in job.err


def test_agents_in_another_directory_are_refused(start):
    job = start(CLEAN, script="cd /\n" + AGENTS)
    assert job.end() == 69 and f"is not there on {os.uname().nodename}: the agent was started in /" in job.err


def test_other_peers_at_the_port_do_not_disturb_the_job(start):
    code = "run(); print('ready', flush=True); time.sleep(1.0); done()"
    job = start(code, code)
    listening = job.until(lambda: job.events("started"))[0]["listening"]
    port = int(re.search(r"\d:(\d+)", listening)[1])
    with contextlib.ExitStack() as stack:
        resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, (100, 100))  # fewer than there are silent strangers
        for _ in range(120):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        for data in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(999),
            b"\x00\x00\x00\x05",
            b"\x16\x03\x01\x02\x00",
        ) * 5:
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                peer.sendall(data)
        job.until_output("ready", 2)
        assert job.end() == 0
    assert job.verdict()["exit_code"] == 0
    dropped = job.events("dropped")
    assert 1 <= len(dropped) <= 3 and sum(event["count"] for event in dropped) >= 10, dropped
    assert all(event["text"].startswith("a peer at ") for event in dropped)


def test_a_second_agent_of_a_rank_that_runs_is_refused_and_the_job_goes_on(start, tmp_path):
    over = tmp_path / "over"
    code = f"run(); print('ready', flush=True)\nwhile not os.path.exists({str(over)!r}): time.sleep(0.02)\ndone()"
    job = start(code, code)
    job.until_output("ready", 2)
    first = job.agents()[1]
    environ = dict(line.split("=", 1) for line in os.fsdecode(_read(first, "environ")).strip("\0").split("\0"))
    for size, expected in (
        (2, f"jaxrun: this job runs already: its rank 1 is another process, on {os.uname().nodename}\n"),
        (9, "jaxrun: this job runs already, with 2 processes: none is rank 8\n"),
    ):
        environ |= {"OMPI_COMM_WORLD_RANK": str(size - 1), "OMPI_COMM_WORLD_SIZE": str(size)}
        command = [sys.executable, "-m", "jaxrun.agent"]
        second = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=20)
        assert (second.returncode, second.stderr) == (65, expected)
    assert job.process.poll() is None
    over.touch()
    assert job.end() == 0


def test_the_token_is_in_the_agents_environment_and_nowhere_else(start):
    job = start(*["run(); print(sorted(os.environ), flush=True); print('ready', flush=True); time.sleep(600)"] * 2)
    job.until_output("ready", 2)
    agents = job.agents()
    (token,) = {re.search(rb"\0JAXRUN_TOKEN=([0-9a-f]{64})\0", _read(pid, "environ"))[1] for pid in agents.values()}
    for name in os.listdir("/proc"):
        if name.isdigit():
            assert token not in _read(name, "cmdline"), name
    for event in job.events("spawned"):
        assert b"JAXRUN_TOKEN" not in _read(event["pid"], "environ")
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.end() == 143
    assert token.decode() not in job.out + job.err and "JAXRUN_TOKEN" not in job.out
    files = [path for path in job.run_dir.rglob("*") if path.is_file()]
    assert {"events.jsonl", "job.json", "verdict.json", "rank-0000.out"} <= {path.name for path in files}
    assert all(token not in path.read_bytes() for path in files)


def _read(pid, name):
    with contextlib.suppress(OSError):
        return b"\0" + Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def test_a_time_limit_shows_where_the_ranks_were_though_stacks_are_requested_at_the_same_time(start):
    """The agents are stopped, so that each snapshot takes its full time."""
    job = start(*[READY] * 2, timeout=10.0)
    job.until_output("ready", 2)
    for pid in job.agents().values():
        os.kill(pid, signal.SIGSTOP)
    began = next(event["time"] for event in job.events("started"))
    time.sleep(max(0.0, began + 10.5 - time.time()))
    job.process.send_signal(signal.SIGQUIT)
    time.sleep(0.1)
    for pid in job.agents().values():
        os.kill(pid, signal.SIGCONT)
    assert job.end() == 124 and "worker_by_hand.py" in job.err


CONNECTED = """
import socket
server = socket.create_server(("127.0.0.1", 0))
connection = socket.create_connection(server.getsockname())
run()
if connection.recv(1) == b"":
    print("cut off", flush=True)
time.sleep(600)
"""


def test_injected_faults_reach_remote_workers(start):
    job = start(SLEEPS, CONNECTED, SLEEPS, chaos="cut:1@100ms,pause:2@200ms,kill:0@1s")
    assert job.end() == 137
    assert "cut off" in (job.run_dir / "rank-0001.out").read_text()
    assert job.verdict()["culprits"] == [0]
    when = r", as --chaos asked, \d[\d.]* s into the run\."
    assert re.search(r"rank 0 of 3 was killed by SIGKILL \(9\)" + when, job.err), job.err
    assert re.search("rank 1 was cut off from the network" + when, job.err), job.err
    assert re.search(r"rank 2 was stopped by SIGSTOP \(19\)" + when, job.err), job.err
    orders = [(event["fault"], event["ranks"]) for event in job.events("chaos")]
    assert orders == [("cut", [1]), ("pause", [2]), ("kill", [0])]


@pytest.mark.extended
def test_a_remote_agent_reports_why_a_fault_could_not_be_injected(start):
    job = start("run(); time.sleep(2); done()", chaos="cut:0@100ms")
    assert job.end() == 0
    assert "rank 0 could not be cut off from the network: it has no connections; the job goes on" in job.err


@pytest.mark.parametrize("how", [extended("by order"), "by death"])
def test_the_process_that_started_the_launcher_controls_a_remote_job(start, how):
    ours, theirs = socket.socketpair()
    with ours:
        code = (
            "signal.signal(signal.SIGUSR2, lambda *_: print('signalled', flush=True)); run(); "
            f"print('ready', {CONTROL_FD!r} in os.environ, flush=True); {SLEEPS[7:]}"
        )
        with theirs:
            job = start(*[code] * 2, control=theirs, grace=60.0)
        job.until_output("ready False", 2)
        ours.sendall(b'{"signal": 12}\n')
        job.until_output("signalled", 2)
        if how == "by order":
            ours.sendall(b'{"end": true}\n')
        else:
            ours.close()
        assert job.end() == 129
    assert job.err.count("process that started it") == 1
