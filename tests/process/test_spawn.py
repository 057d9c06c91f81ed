"""What is started with streams, descriptors and variables of its own: a worker, and the launch command of a job."""

import errno
import gc
import os
import signal
import sys
from datetime import datetime

import pytest
from harness import kill, wait_until
from msgspec.structs import replace

from jaxrun.controller.supervisor.launch_process import LOG_NAME, LaunchProcess
from jaxrun.node.agent import spawn
from jaxrun.node.agent.guard import find_marked, job_marker
from jaxrun.node.forkserver import client
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.flight_file import TEXT_OFFSET
from jaxrun.protocol.worker_command import runtime_directory
from jaxrun.records.output.rank_logs import RankLogs
from jaxrun.records.rundir.rundir import RunDir, create
from jaxrun.spec.engines.open_mpi import OPEN_MPI
from jaxrun.spec.engines.slurm import SLURM
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import LaunchCommand, Plan, Worker

JOB_ID = "ab" * 16


def _plan(*argv):
    return Plan(
        job=Job(program=("p",), platform="cpu"),
        job_id=JOB_ID,
        workers=(Worker(0, 0, 2, "h1"), Worker(1, 1, 2, "h1")),
        argv=argv,
        set_env={"ADDED": "a b\nc"},
        unset_env=("TAKEN",),
        local_devices=None,
        device_names=(),
        fork=False,
    )


def setup_of(plan, environ, run_dir="", flight_dir=None):
    """How to start the workers of a plan; `environ` is the agent's own."""
    workers = tuple(replace(plan.worker_env(worker, run_dir=run_dir), rank_token="cd" * 16) for worker in plan.workers)
    return spawn.WorkerSetup(plan.argv, plan.base_env(environ), workers, flight_dir, plan.job.wrap)


def _spawn(setup, rank):
    return spawn.spawn(setup, setup.workers[rank])


def _read_all(fd):
    os.set_blocking(fd, True)
    with os.fdopen(os.dup(fd), "rb") as file:
        return file.read()


def test_a_worker_gets_its_streams_its_variables_and_its_descriptors(tmp_path):
    plan = _plan("/usr/bin/env", "-0")
    setup = setup_of(plan, {"KEPT": "é", "TAKEN": "x", "JAXRUN_RANK": "9"}, str(tmp_path))
    pid, pipes = spawn.spawn(setup, setup.workers[1])
    env = dict(pair.split("=", 1) for pair in _read_all(pipes.out).decode().split("\0") if pair)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pipes.close()
    assert env["KEPT"] == "é" and env["ADDED"] == "a b\nc" and "TAKEN" not in env
    worker_env = WorkerEnv.from_env(env)
    assert (worker_env.rank, worker_env.size, worker_env.job_id, worker_env.run_dir) == (1, 2, JOB_ID, str(tmp_path))


def test_both_streams_the_channel_and_the_file_of_stacks_reach_the_worker():
    names = "('CHANNEL', 'STACKS')"
    write = f"import os; [os.write(int(os.environ[f'JAXRUN_{{n}}_FD']), n.encode()) for n in {names}]"
    plan = _plan(sys.executable, "-ISc", f"{write}; os.write(1, b'out'); os.write(2, b'err')")
    pid, pipes = _spawn(setup_of(plan, os.environ), 0)
    assert (_read_all(pipes.out), _read_all(pipes.err)) == (b"out", b"err")
    os.waitpid(pid, 0)
    assert pipes.channel.recv(100) == b"CHANNEL"
    assert os.pread(pipes.stacks, 100, 0) == b"STACKS"
    assert not os.get_inheritable(pipes.stacks)
    pipes.close()


def test_a_failed_start_leaves_nothing_open(tmp_path):
    gc.collect()  # of tests before this one
    before = os.listdir("/proc/self/fd")
    plan = _plan(str(tmp_path / "missing"), "/opt/jaxrun_runtime", "p")
    setup = setup_of(plan, os.environ)
    with pytest.raises(FileNotFoundError):
        spawn.spawn(setup, setup.workers[0])
    with pytest.raises(FileNotFoundError):
        client.start(plan.argv[0], os.environ)
    pipes, _, ends = spawn.fork_request(setup, setup.workers[0])
    ends.close()
    pipes.close()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.mark.parametrize(("module", "function"), [(os, "memfd_create"), (spawn, "open_stdin")])
def test_where_not_all_descriptors_of_a_worker_can_be_opened_none_stays_open(monkeypatch, module, function):
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    gc.collect()  # of tests before this one
    setup, before = setup_of(_plan("/bin/true"), os.environ), os.listdir("/proc/self/fd")
    monkeypatch.setattr(module, function, refuse)
    with pytest.raises(OSError, match="Too many open files"):
        spawn.fork_request(setup, setup.workers[0])
    assert os.listdir("/proc/self/fd") == before


def test_the_fork_server_is_given_its_role_and_has_no_streams_but_stderr(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s|" "$@" $(readlink /proc/$$/fd/0 /proc/$$/fd/1) > {tmp_path}/arguments\n')
    python.chmod(0o755)
    server = client.start(str(python), os.environ)
    os.waitpid(server.pid, 0)
    package, fd, role, stdin, stdout = (tmp_path / "arguments").read_text().split("|")[:-1]
    assert package == runtime_directory("forkserver") and fd.isdigit() and role == "workers"
    assert stdin == stdout == os.devnull
    assert server.receive() == [None]
    server.close()


@pytest.mark.parametrize(("lockstep", "seen"), [("record", True), ("off", True), ("record", False)])
def test_the_flight_recorder_is_a_file_of_the_run_directory_where_it_can_be(tmp_path, lockstep, seen):
    plan = replace(_plan("/bin/true"), job=Job(program=("p",), platform="cpu", lockstep=lockstep))
    pid, pipes = _spawn(setup_of(plan, os.environ, str(tmp_path), tmp_path if seen else None), 1)
    os.waitpid(pid, 0)
    status = os.fstat(pipes.flight)
    kept = lockstep != "off" and seen
    assert status.st_size == TEXT_OFFSET and status.st_nlink == int(kept)
    assert not kept or status.st_blocks * 512 >= TEXT_OFFSET  # a full disk would end the worker that writes to it
    assert [path.name for path in tmp_path.iterdir()] == (["rank-0001.flight"] if kept else [])
    pipes.close()


def test_where_there_is_no_space_the_flight_recorder_is_in_memory(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    plan = _plan("/bin/true")
    pid, pipes = _spawn(setup_of(plan, os.environ, str(tmp_path), tmp_path), 0)
    os.waitpid(pid, 0)
    assert os.fstat(pipes.flight).st_size == TEXT_OFFSET and not list(tmp_path.iterdir())
    pipes.close()


# ---- the launch command: what it writes, how it ends, and how it is made to end


@pytest.fixture
def launch(tmp_path):
    """launch(SHELL) → a LaunchProcess; nothing of it is left after the test."""
    job_id = os.urandom(16).hex()
    begun = []

    def run(script, directory=tmp_path, engine=OPEN_MPI, **environ):
        environ = {"PATH": os.environ["PATH"], "JAXRUN_JOB_ID": job_id, **environ}
        begun.append(LaunchProcess(LaunchCommand(engine, "Open MPI 5", ("/bin/sh", "-c", script)), environ, directory))
        return begun[-1]

    yield run
    for one in begun:
        one.signal(signal.SIGKILL)
        wait_until(one.reap)
        one.close()
    kill(find_marked(job_marker(job_id)))


def ended(command):
    """The same, once it has ended."""
    wait_until(command.reap)
    return command


def read(command):
    """All that it writes until its pipe ends."""
    parts = []
    wait_until(lambda: parts.append(command.read()) or parts[-1] is None)
    return b"".join(parts[:-1])


def test_its_output_is_logged_and_its_last_lines_are_kept(launch, tmp_path):
    command = launch("echo one; echo two >&2; seq 100; exit 3")
    assert read(command).startswith(b"one\ntwo\n1\n")
    assert ended(command).status == 3
    assert (tmp_path / LOG_NAME).read_bytes().startswith(b"one\ntwo\n1\n2\n")
    assert command.last_lines().splitlines() == [f"  {number}" for number in range(89, 101)]
    assert command.describe_end() == "Open MPI 5 ended with status 3"


@pytest.mark.parametrize(
    ("script", "last_lines"),
    [
        ("echo no such host; exit 1", "  no such host"),
        (r"echo -----; echo; echo ' text'; echo '   '; printf '\0'", "   text"),
        ("exit 0", ""),
        (r"printf '\377\376 bad\n'", "  \ufffd\ufffd bad"),
        ("sleep 60 & echo gone", "  gone"),
    ],
    ids=["of an error", "without lines that are drawn", "none", "no text", "its pipe outlives it"],
)
@pytest.mark.parametrize("where", ["a directory", "a directory that is gone", "none"])
def test_the_last_output_is_there_when_the_command_is_reaped(launch, tmp_path, script, last_lines, where):
    directory = {"a directory": tmp_path, "a directory that is gone": tmp_path / "gone", "none": None}[where]
    assert ended(launch(script, directory=directory)).last_lines() == last_lines
    assert (tmp_path / LOG_NAME).exists() == (where == "a directory")


def test_reading_never_blocks(launch):
    command = launch("sleep 60")
    assert command.read() == b"" and not command.reap() and command.status is None
    command = ended(launch("sleep 60 & exit 0"))  # a daemon holds its pipe
    assert command.read() == b""
    command = ended(launch("exit 0"))
    assert command.read() is None


def test_a_signal_reaches_all_of_its_group_until_it_has_ended(launch):
    command = launch("sleep 60 & sleep 60; echo never")
    command.signal(signal.SIGTERM)
    assert ended(command).status == -signal.SIGTERM
    assert command.describe_end() == "Open MPI 5 was killed by SIGTERM (15)"
    assert read(command) == b"" and command.last_lines() == ""
    command = ended(launch("exit 0"))
    command.signal(signal.SIGKILL)
    assert command.reap() and command.status == 0


def test_it_has_a_session_of_its_own_our_stdin_and_none_of_our_other_descriptors(launch):
    held = os.open("/dev/null", os.O_RDONLY)
    other = launch("sleep 60")
    shows = "print(os.getsid(0) == os.getpid(), os.fstat(0).st_ino, *os.listdir('/proc/self/fd'))"
    command = launch(f'exec {sys.executable} -Sc "import os; {shows}"')
    ours = {fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd) and os.get_inheritable(fd)}
    is_leader, stdin, *there = read(command).decode().split()
    assert (is_leader, stdin) == ("True", str(os.fstat(0).st_ino))
    there = set(map(int, there))
    assert {0, 1, 2} <= there and len(there - ours - {0, 1, 2}) == 1  # the one that lists them
    assert other.fileno() not in ours and held not in ours
    os.close(held)


def _is_open(fd):
    return os.path.exists(f"/proc/self/fd/{fd}")


def test_its_environment_is_what_it_is_given_and_nothing_else(launch):
    command = launch("env", X="two words")
    names = {line.partition("=")[0] for line in read(command).decode().splitlines()}
    assert names - {"PWD", "SHLVL", "_", "OLDPWD"} == {"PATH", "JAXRUN_JOB_ID", "X"}


def test_srun_names_the_agents_that_have_ended_with_an_error(launch):
    said = "srun: error: h2: task 1: Exited with exit code 69\nsrun: error: h3: tasks 4-5,7: Exited with exit code 1\n"
    assert ended(launch(f"printf '%s' '{said}'", engine=SLURM)).failed_agents() == {1, 4, 5, 7}
    assert ended(launch("echo 'srun: error: h1: task 0: Killed'", engine=SLURM)).failed_agents() == set()


ENDS_A_STEP = """srun: error: h2: task 1: Exited with exit code 2
srun: launch/slurm: _step_signal: Terminating StepId=1.0
slurmstepd-h1: error: *** STEP 1.0 ON h1 CANCELLED AT 2026-11-30T16:22:08 ***
srun: error: h1: task 0: Terminated
"""
REASON = "slurmstepd-h2: error: execve(): /opt/env/bin/python: No such file or directory\n"


@pytest.mark.parametrize("is_lost", [True, False])
def test_where_srun_has_lost_why_an_agent_failed_it_is_said_how_to_see_it(launch, is_lost):
    command = ended(launch(f"printf '%s' '{ENDS_A_STEP}{'' if is_lost else REASON}'", engine=SLURM))
    command_line = f"srun -N1 -n1 -w h2 {sys.executable} -c 'import jaxrun'"
    hint = f"\nh2 has not said why, or srun has lost it; to see it, type in this job: {command_line}"
    for text in (command.describe_failed_start(), command.describe_failure({0: "h1", 1: "h2"}, [0])):
        assert text.endswith(hint) == is_lost and (REASON.strip() in text) != is_lost, text


def test_one_that_is_not_there_is_an_error_and_leaves_no_file_open(tmp_path):
    gc.collect()  # of tests before this one
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        LaunchProcess(LaunchCommand(SLURM, "srun", (str(tmp_path / "srun"),)), {}, tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_no_planted_link_is_written_through(tmp_path, monkeypatch):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    made = create(None, base=tmp_path, name="train", now=datetime(2026, 11, 20, 21, 42))
    made.close()
    run = made.path
    monkeypatch.setattr("jaxrun.files.own_files.draft_name", lambda: ".guessed.draft")
    for name in ("rank-0000.out", "rank-0000.flight", ".guessed.draft", "launch_command.log"):
        (run / name).symlink_to(precious)
    said = []
    logs = RankLogs(run, (0,), said.append)
    logs.write(0, "out", b"output")
    logs.close()
    worker = Worker(0, 0, 1, "h1")
    plan = Plan(Job(program=("p",)), "ab" * 16, (worker,), ("/bin/true",), {}, (), None, (), fork=False)
    setup = setup_of(plan, os.environ, str(run), run)
    pid, pipes = spawn.spawn(setup, setup.workers[0])
    pipes.close()
    launch = LaunchProcess(
        LaunchCommand(OPEN_MPI, "a launch command", ("/bin/sh", "-c", "echo output")), os.environ, run
    )
    os.waitpid(pid, 0)
    os.waitpid(launch.pid, 0)
    assert launch.read() == b"output\n"
    launch.close()
    (run / "events.jsonl").unlink()
    directory = RunDir(run)
    directory.on_write_error(said.append)
    directory.write_text("job.json", "x")
    directory.close()
    assert precious.read_text() == "mine"
    assert "cannot write" in said[0] and "rank-0000.out" in said[0] and "cannot write to" in said[1]
