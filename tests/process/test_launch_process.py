"""The launch command: what it writes, how it ends, and how it is made to end."""

import os
import signal
import sys
import time

import pytest
from harness import TIME_LIMIT

from jaxrun.agent.guard import find_marked, job_marker
from jaxrun.supervisor.launch_process import LOG_NAME, LaunchProcess


@pytest.fixture
def start(tmp_path):
    """start(SHELL) → a LaunchProcess; nothing of it is left after the test."""
    job_id = os.urandom(16).hex()
    begun = []

    def run(script, directory=tmp_path, **environ):
        environ = {"PATH": os.environ["PATH"], "JAXRUN_JOB_ID": job_id, **environ}
        begun.append(LaunchProcess("Open MPI 5", ["/bin/sh", "-c", script], environ, directory))
        return begun[-1]

    yield run
    for one in begun:
        one.signal(signal.SIGKILL)
        await_end(one)
        one.close()
    for pid in find_marked(job_marker(job_id)):
        os.kill(pid, signal.SIGKILL)


def await_end(launch):
    deadline = time.monotonic() + TIME_LIMIT
    while not launch.reap():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def read(launch):
    """All that it writes until its pipe ends."""
    text = b""
    deadline = time.monotonic() + TIME_LIMIT
    while (data := launch.read()) is not None and time.monotonic() < deadline:
        text += data
        time.sleep(0.002)
    return text


def test_its_output_is_logged_and_its_last_lines_are_kept(start, tmp_path):
    launch = start("echo one; echo two >&2; seq 100; exit 3")
    assert read(launch).startswith(b"one\ntwo\n1\n")
    assert await_end(launch) and launch.status == 3
    assert (tmp_path / LOG_NAME).read_bytes().startswith(b"one\ntwo\n1\n2\n")
    assert launch.last_lines().splitlines() == [f"  {number}" for number in range(89, 101)]
    assert launch.describe_end() == "Open MPI 5 ended with status 3"


def test_the_last_output_is_there_when_the_command_is_reaped(start):
    launch = start("echo no such host; exit 1")
    assert await_end(launch)
    assert launch.last_lines() == "  no such host" and launch.describe_end() == "Open MPI 5 ended with status 1"


def test_lines_that_are_only_drawn_are_left_out(start):
    launch = start("echo -----; echo; echo ' text'; echo '   '")
    assert await_end(launch) and launch.last_lines() == "   text"


def test_a_silent_launch_command_has_no_last_lines(start):
    launch = start("exit 0")
    assert await_end(launch) and launch.last_lines() == "" and launch.read() is None


def test_bytes_that_are_no_text_do_no_harm(start):
    launch = start(r"printf '\377\376 bad\n'")
    assert await_end(launch) and launch.last_lines().endswith(" bad")


def test_reading_never_blocks(start):
    launch = start("sleep 60")
    assert launch.read() == b"" and not launch.reap() and launch.status is None


def test_its_pipe_may_outlive_it(start):
    """A daemon that it leaves holds its stdout."""
    launch = start("sleep 60 & echo gone")
    assert await_end(launch) and launch.last_lines() == "  gone" and launch.read() == b""


def test_a_signal_reaches_all_of_its_group(start):
    launch = start("sleep 60 & sleep 60; echo never")
    launch.signal(signal.SIGTERM)
    assert await_end(launch) and launch.status == -signal.SIGTERM
    assert launch.describe_end() == "Open MPI 5 was killed by SIGTERM (15)"
    assert read(launch) == b"" and launch.last_lines() == ""


def test_one_that_has_ended_is_sent_nothing(start):
    launch = start("exit 0")
    assert await_end(launch)
    launch.signal(signal.SIGKILL)
    assert launch.reap() and launch.status == 0


def test_it_has_a_session_of_its_own_and_our_stdin(start):
    launch = start(f"exec {sys.executable} -Sc 'import os; print(os.getsid(0) == os.getpid(), os.fstat(0).st_ino)'")
    assert read(launch).decode() == f"True {os.fstat(0).st_ino}\n"


def test_it_inherits_none_of_our_own_descriptors(start):
    held = os.open("/dev/null", os.O_RDONLY)
    other = start("sleep 60")
    launch = start(f"exec {sys.executable} -Sc 'import os; print(*os.listdir(\"/proc/self/fd\"))'")
    ours = {fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd) and os.get_inheritable(fd)}
    there = set(map(int, read(launch).split()))
    assert {0, 1, 2} <= there and len(there - ours - {0, 1, 2}) == 1  # the one that lists them
    assert other.fileno() not in ours and held not in ours
    os.close(held)


def _is_open(fd):
    return os.path.exists(f"/proc/self/fd/{fd}")


def test_its_environment_is_what_it_is_given_and_nothing_else(start):
    launch = start("env", X="two words")
    names = {line.partition("=")[0] for line in read(launch).decode().splitlines()}
    assert names - {"PWD", "SHLVL", "_", "OLDPWD"} == {"PATH", "JAXRUN_JOB_ID", "X"}


def test_without_a_directory_its_last_lines_are_kept_all_the_same(start, tmp_path):
    launch = start("echo hello", directory=None)
    assert await_end(launch) and launch.last_lines() == "  hello" and not (tmp_path / LOG_NAME).exists()


def test_a_directory_that_is_gone_costs_the_file_alone(start, tmp_path):
    launch = start("echo hello", directory=tmp_path / "gone")
    assert await_end(launch) and launch.last_lines() == "  hello"


def test_srun_names_the_agents_that_have_ended_with_an_error(start):
    said = "srun: error: h2: task 1: Exited with exit code 69\nsrun: error: h3: tasks 4-5,7: Exited with exit code 1\n"
    launch = start(f"printf '%s' '{said}'")
    assert await_end(launch) and launch.failed_agents() == {1, 4, 5, 7}
    launch = start("echo 'srun: error: h1: task 0: Killed'")
    assert await_end(launch) and launch.failed_agents() == set()


def test_one_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        LaunchProcess("srun", [str(tmp_path / "srun")], {}, None)
