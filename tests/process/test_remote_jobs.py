"""Whole jobs whose agents are processes of their own, started by a shell script instead of mpirun; no jax."""

import os
import re
import signal
import socket
import time

import pytest
from harness import TIME_LIMIT, extended
from remote_job import AGENTS, CLEAN, READY, SLEEPS, remote_jobs

from jaxrun.protocol.names import CONTROL_FD
from jaxrun.supervisor.launch_process import LOG_NAME


@pytest.fixture
def start(tmp_path):
    with remote_jobs(tmp_path) as run:
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
