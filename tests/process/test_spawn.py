"""The descriptors and environment of a spawned worker; the tests of the agent start real workers."""

import errno
import os
import sys
from dataclasses import replace

import pytest

from jaxrun.agent.spawn import Spawner
from jaxrun.forkserver import client
from jaxrun.job.job import Job
from jaxrun.job.plan import Plan, Worker
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.flight_file import TEXT_OFFSET

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


def _read_all(fd):
    os.set_blocking(fd, True)
    with os.fdopen(os.dup(fd), "rb") as file:
        return file.read()


def test_a_worker_gets_its_streams_its_variables_and_its_descriptors(tmp_path):
    plan = _plan("/usr/bin/env", "-0")
    spawner = Spawner(plan, {"KEPT": "é", "TAKEN": "x", "JAXRUN_RANK": "9"}, str(tmp_path))
    pid, pipes = spawner.spawn(plan.workers[1])
    env = dict(pair.split("=", 1) for pair in _read_all(pipes.out).decode().split("\0") if pair)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pipes.close()
    assert env["KEPT"] == "é" and env["ADDED"] == "a b\nc" and "TAKEN" not in env
    worker_env = WorkerEnv.from_env(env)
    assert (worker_env.rank, worker_env.size, worker_env.job_id, worker_env.run_dir) == (1, 2, JOB_ID, str(tmp_path))


def test_both_streams_have_pipes_of_their_own():
    plan = _plan("/bin/sh", "-c", "echo out; echo err >&2")
    pid, pipes = Spawner(plan, dict(os.environ), "").spawn(plan.workers[0])
    assert (_read_all(pipes.out), _read_all(pipes.err)) == (b"out\n", b"err\n")
    os.waitpid(pid, 0)
    pipes.close()


def test_the_channel_and_the_file_of_stacks_reach_the_worker():
    names = "('CHANNEL', 'STACKS')"
    write = f"import os; [os.write(int(os.environ[f'JAXRUN_{{n}}_FD']), n.encode()) for n in {names}]"
    plan = _plan(sys.executable, "-ISc", write)
    pid, pipes = Spawner(plan, dict(os.environ), "").spawn(plan.workers[0])
    os.waitpid(pid, 0)
    assert pipes.channel.recv(100) == b"CHANNEL"
    assert os.pread(pipes.stacks, 100, 0) == b"STACKS"
    assert not os.get_inheritable(pipes.stacks)
    pipes.close()


def test_a_failed_start_leaves_nothing_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    plan = _plan(str(tmp_path / "missing"), "-m", "jaxrun_runtime", "p")
    spawner = Spawner(plan, dict(os.environ), "")
    with pytest.raises(FileNotFoundError):
        spawner.spawn(plan.workers[0])
    with pytest.raises(FileNotFoundError):
        client.start(plan.argv[:1], os.environ)
    pipes, request = spawner.fork_request(plan.workers[0])
    request.close()
    pipes.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_fork_server_is_given_its_role_and_has_no_streams_but_stderr(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s|" "$@" $(readlink /proc/$$/fd/0 /proc/$$/fd/1) > {tmp_path}/arguments\n')
    python.chmod(0o755)
    server = client.start([str(python)], os.environ)
    os.waitpid(server.pid, 0)
    _, module, fd, role, stdin, stdout = (tmp_path / "arguments").read_text().split("|")[:-1]
    assert module == "jaxrun_runtime.forkserver" and fd.isdigit() and role == "workers"
    assert stdin == stdout == os.devnull
    assert server.receive() == [None]
    server.close()


@pytest.mark.parametrize(("lockstep", "seen"), [("record", True), ("off", True), ("record", False)])
def test_the_flight_recorder_is_a_file_of_the_run_directory_where_it_can_be(tmp_path, lockstep, seen):
    plan = replace(_plan("/bin/true"), job=Job(program=("p",), platform="cpu", lockstep=lockstep))
    pid, pipes = Spawner(plan, dict(os.environ), str(tmp_path), tmp_path if seen else None).spawn(plan.workers[1])
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
    pid, pipes = Spawner(plan, dict(os.environ), str(tmp_path), tmp_path).spawn(plan.workers[0])
    os.waitpid(pid, 0)
    assert os.fstat(pipes.flight).st_size == TEXT_OFFSET and not list(tmp_path.iterdir())
    pipes.close()
