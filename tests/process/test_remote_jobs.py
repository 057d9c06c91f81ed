"""Whole jobs whose agents are processes of their own, started by a shell script instead of mpirun; no jax."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from agent_by_hand import AGENTS, CLEAN, READY, agents, remote_jobs
from harness import TIME_LIMIT, extended, started, wait_until, write_fake_runtime

from jaxrun.controller.supervisor.launch_process import LOG_NAME
from jaxrun.job_client.running_job import RunningJob
from jaxrun.protocol.job_messages import FaultOrder, SignalOrder
from jaxrun.protocol.names import CONTROL_FD


@pytest.fixture
def start(tmp_path):
    with remote_jobs(tmp_path) as run:
        yield run


def test_a_job_runs_to_its_end_and_much_output_arrives_whole_and_in_order(start):
    code = "run(); [print(rank, number, 'x' * 90) for number in range(15000)]; print('bad', file=sys.stderr); done()"
    job = start(code, code)
    ended = job.end()
    assert ended.code == 0, ended.err
    assert ended.err.count("] bad\n") == 2 and "jaxrun: done in" in ended.err
    for rank in range(2):
        wanted = [f"{rank} {number} {'x' * 90}" for number in range(15000)]  # more than an agent keeps for the head
        assert (job.run_dir / f"rank-{rank:04d}.out").read_text().splitlines() == wanted
        assert [line[4:] for line in ended.out.splitlines() if line.startswith(f"[{rank}] ")] == wanted
        names = [event["type"] for event in job.events() if event.get("rank") == rank]
        whole_life = ["WorkerSpawned", "Hello", "DeviceReport", "Done", "WorkerExited"]
        others = ("FirstOutput", "AgentConnected", "AgentReport", "RecordClock")
        assert [name for name in names if name not in others] == whole_life
    assert ended.verdict()["exit_code"] == 0


@pytest.mark.parametrize("where", ["here", "agents elsewhere"])
def test_a_line_in_pieces_stays_one_line_though_somebody_may_type_and_a_prompt_is_shown(start, tmp_path, where):
    pieces = "at = time.monotonic(); os.write(1, b'loss '); time.sleep(0.9); os.write(1, b'3.25\\n')"
    pieces += "; os.write(1, b'in %.1f s\\n' % (time.monotonic() - at))"
    prompt = "read, _ = os.pipe(); os.write(1, b'name? '); os.read(read, 1)"
    codes = f"run(); {pieces}; {prompt}", "run()\nwhile True: print('whole', flush=True); time.sleep(0.2)"
    ours, theirs = os.pipe()
    with contextlib.ExitStack() as stack, open(ours) as stdin, open(theirs, "w"), (tmp_path / "shown").open("w") as out:
        streams = {"stdin": stdin, "stdout": out, "stderr": out}
        if where == "here":
            words = ("-n", "2", "--output", "all", "by_hand.py")
            job = stack.enter_context(started(tmp_path, *words, *codes, env=write_fake_runtime(tmp_path), **streams))
        else:
            job = start(*codes, popen=streams)
        wait_until(lambda: "name? " in (tmp_path / "shown").read_text())
        job.process.send_signal(signal.SIGTERM)
        job.process.wait()
    lines = (tmp_path / "shown").read_text().splitlines()
    (took,) = (float(line.split()[2]) for line in lines if line.startswith("[0] in "))
    assert "[0] name? " in lines
    assert "[0] loss 3.25" in lines or took > 2.5, lines  # after 3 s any unfinished line is shown


@pytest.mark.extended
def test_without_a_run_directory_all_output_comes_by_the_network(start, tmp_path):
    job = start("run(); print('hello'); done()", no_run_dir=True)
    ended = job.end()
    assert (ended.code, ended.out) == (0, "[0] hello\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["by_hand.py", "fake", "launch"]


@pytest.mark.extended
def test_kill_9_of_the_launcher_leaves_nothing(start):
    job = start(READY, READY)
    job.wait_for_output("ready", 2)
    job.process.kill()
    job.process.wait()
    wait_until(lambda: not job.processes())


# Rank 0 fails in the first attempt once there is a file `go`.
TWICE = (
    "run(); print('attempt', env.attempt, flush=True)\n"
    "while env.rank or env.attempt > 1 or not os.path.exists('go'): time.sleep(0.01)\n"
    "fail()"
)


def test_logs_follow_all_agents_through_a_restart_until_jaxrun_stop_ends_the_job(start, tmp_path):
    job = start(TWICE, TWICE, max_restarts=1)
    job.wait_for_output("attempt 1", 2)
    jaxrun = [sys.executable, "-m", "jaxrun"]
    with (tmp_path / "seen").open("w") as seen:
        logs = subprocess.Popen([*jaxrun, "logs", "-f", job.run_dir], stdout=seen, stderr=subprocess.STDOUT)

    def lines(text):
        return sorted(line for line in (tmp_path / "seen").read_text().splitlines() if line.endswith(text))

    try:
        for attempt in (1, 2):
            wait_until(lambda attempt=attempt: len(lines(f"] attempt {attempt}")) == 2, "lines of both agents")
            (tmp_path / "go").touch()
        done = subprocess.run([*jaxrun, "stop", job.run_dir], capture_output=True, text=True, timeout=TIME_LIMIT)
        assert done.returncode == 0 and "interrupted by SIGTERM (15)" in done.stdout, done
        assert logs.wait(TIME_LIMIT) == 0
    finally:
        logs.kill()
        logs.wait()
    assert lines("attempt 2") == ["[0] attempt 2", "[1] attempt 2", "jaxrun: attempt 2"]
    assert len(lines("; exit 143")) == 1 and job.end().code == 143


OBEYS = "signal.signal(15, lambda *args: done()); run(); listen(); print('ready', flush=True); time.sleep(600)"
IGNORES = "signal.signal(15, signal.SIG_IGN); run(); listen(); print('ready', flush=True); time.sleep(600)"


@pytest.mark.extended
@pytest.mark.parametrize(("obeys", "status"), [(True, 75), extended(False, 143)])
@pytest.mark.parametrize("whom", ["all agents", extended("the launcher")])
def test_a_sigterm_that_all_ranks_obey_is_a_preemption_and_others_are_killed(start, whom, obeys, status):
    job = start(*[OBEYS if obeys else IGNORES] * 2, grace=60.0 if obeys else 0.5)
    job.wait_for_output("ready", 2)
    for pid in [job.process.pid] if whom == "the launcher" else agents(job).values():
        with contextlib.suppress(ProcessLookupError):  # the first signal may have ended all
            os.kill(pid, signal.SIGTERM)
    ended = job.end()
    assert ended.code == status and ended.err.count("asked ranks 0-1 to end (SIGTERM)") == 1, ended


@pytest.mark.extended
def test_a_launch_command_that_fails_is_quoted(start):
    job = start(CLEAN, script="echo 'ssh: Could not resolve hostname h9' >&2; exit 7")
    ended = job.end()
    assert ended.code == 69
    assert "a script ended with status 7 before the job was over; it said:\n" in ended.err
    assert "  ssh: Could not resolve hostname h9" in ended.err
    assert "Could not resolve" in (job.run_dir / LOG_NAME).read_text()


def test_a_launch_command_that_ends_during_the_x(start):
    fails = "until [ -e over ]; do sleep 0.02; done; echo node failure; exit 1\n"
    job = start(READY, script=AGENTS.replace("wait\n", fails))
    job.wait_for_output("ready")
    (job.run_dir.parent / "over").touch()
    ended = job.end()
    assert ended.code == 69
    assert "a script ended with status 1 before the job was over; it said:\n  node failure" in ended.err


def test_a_launch_command_that_was_started_again_leaves_no_file_open_in_the_launcher(start):
    job = start(
        "run(); os.environ['JAXRUN_ATTEMPT'] == '3' or os.kill(os.getppid(), 9); time.sleep(600)", max_restarts=2
    )
    job.wait_for_event("WorkerSpawned", 3)
    files = Path(f"/proc/{job.process.pid}/fd").iterdir()
    logs = [file for file in files if os.path.realpath(file).endswith(LOG_NAME)]
    os.kill(job.process.pid, signal.SIGINT)
    assert job.end().code == 130
    assert 1 <= len(logs) <= 2  # the second one may not have ended when the third attempt begins


DIES = (
    "import os; from jaxrun.node.agent import __main__, agent_process; "
    "agent_process.make_report = lambda *words: os.kill(os.getpid(), 9); __main__.main()"
)


def test_an_agent_that_dies_before_it_has_reported_is_named_at_once(start):
    rank_1 = f"[ $rank = 1 ] && set -- $1 -c '{DIES}' || set -- $1 -m jaxrun.node.agent\n  OMPI_COMM"
    script = AGENTS.replace("OMPI_COMM", rank_1, 1).replace("-m jaxrun.node.agent &", '"$2" "$3" &')
    job = start(CLEAN, CLEAN, script=script.replace("wait\n", "sleep 600\n"), init_timeout=300.0)
    ended = job.end()
    assert ended.code == 69
    assert "the agent of rank 1 was lost before it started its worker" in " ".join(ended.err.split())


@pytest.mark.extended
def test_injected_faults_reach_remote_workers_and_so_do_signals_of_the_process_that_started_the_launcher(start):
    ours, theirs = socket.socketpair()
    notes = (
        "signal.signal(signal.SIGUSR2, lambda *_: os.write(1, b'signalled\\n')); run(); "
        f"print('ready', {CONTROL_FD!r} in os.environ, flush=True)\nwhile True: time.sleep(600)"
    )
    deaf = "signal.signal(signal.SIGUSR2, signal.SIG_IGN)\n"
    with ours:
        with theirs:
            job = start(notes, deaf + READY, deaf + READY, control=theirs, chaos="pause:1@100ms,pause:2@200ms")
        job.wait_for_output("ready False")
        parent = RunningJob(job.run_dir, ours, job.process.pid)
        parent.send(SignalOrder(signal.SIGUSR2))
        job.wait_for_output("signalled")
        job.wait_for_event("InjectFault", 2)
        parent.send(FaultOrder("kill", (0,)))
        ended = job.end()
    assert ended.code == 137
    assert ended.verdict()["culprits"] == [0]
    assert re.search(r"rank 0 of 3 was killed by SIGKILL \(9\), as its gang asked", ended.err), ended.err
    stopped = "rank {} was stopped by SIGSTOP (19), as --chaos asked, "
    together = "ranks 1-2 were stopped by SIGSTOP (19), as --chaos asked, "  # on a busy machine
    assert together in ended.err or all(stopped.format(rank) in ended.err for rank in (1, 2)), ended.err
    orders = [(event["kind"], event["to"]) for event in job.events("InjectFault")]
    assert orders == [("pause", [1]), ("pause", [2]), ("kill", [0])]


def read(pid, name):
    with contextlib.suppress(OSError):
        return b"\0" + Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


@pytest.mark.extended
def test_strangers_at_the_port_are_noted_and_the_token_is_in_the_agents_environment_and_nowhere_else(start):
    code = f"run(); print(sorted(os.environ), flush=True); {READY.removeprefix('run(); ')}"
    job = start(code, code)
    job.wait_for_output("ready", 2)
    found = {re.search(rb"\0JAXRUN_TOKEN=([0-9a-f]{64})\0", read(pid, "environ"))[1] for pid in agents(job).values()}
    (token,) = found
    assert not [pid for pid in filter(str.isdigit, os.listdir("/proc")) if token in read(pid, "cmdline")]
    workers = [read(event["pid"], "environ") for event in job.events("WorkerSpawned")]
    assert all(b"JAXRUN_RANK" in environ and b"JAXRUN_TOKEN" not in environ for environ in workers)
    (started,) = job.events("AttemptStarted")
    with socket.create_connection(("127.0.0.1", int(re.search(r"\d:(\d+)", started["listening"])[1]))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        job.wait_for_event("PeersDropped")
    os.kill(job.process.pid, signal.SIGTERM)
    ended = job.end()
    assert (ended.code, ended.events("PeersDropped")[0]["reason"][:10]) == (143, "a peer at ")
    assert token.decode() not in ended.out + ended.err and "JAXRUN_TOKEN" not in ended.out
    files = [path for path in ended.run_dir.rglob("*") if path.is_file()]
    assert {"events.jsonl", "job.json", "verdict.json", "rank-0000.out"} <= {path.name for path in files}
    assert all(token not in path.read_bytes() for path in files)
