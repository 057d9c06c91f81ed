"""The process that starts the agents: its words, its end, and how it is made to end."""

import os
import signal
import sys
import time

import pytest

from jaxrun.agent.guard import find_marked, job_marker
from jaxrun.supervisor.launch_process import LOG_NAME, LaunchProcess


@pytest.fixture
def start(tmp_path):
    """start(SHELL) → a Starting; nothing of it is left after the test."""
    job_id = os.urandom(16).hex()
    begun = []

    def run(script, directory=tmp_path, **environ):
        environ = {"PATH": os.environ["PATH"], "JAXRUN_JOB_ID": job_id, **environ}
        begun.append(LaunchProcess("Open MPI 5", ["/bin/sh", "-c", script], environ, directory))
        return begun[-1]

    yield run
    for one in begun:
        one.stop(signal.SIGKILL)
        await_end(one)
        one.close()
    for pid in find_marked(job_marker(job_id)):
        os.kill(pid, signal.SIGKILL)


def await_end(starting, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not starting.reap():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def read(starting, seconds=5.0):
    """All that it writes until its pipe ends."""
    text = b""
    deadline = time.monotonic() + seconds
    while (data := starting.read()) is not None and time.monotonic() < deadline:
        text += data
        time.sleep(0.002)
    return text


def test_its_words_are_kept_in_a_file_and_its_last_lines_at_hand(start, tmp_path):
    starting = start("echo one; echo two >&2; seq 100; exit 3")
    assert read(starting).startswith(b"one\ntwo\n1\n")
    assert await_end(starting) and starting.status == 3
    assert (tmp_path / LOG_NAME).read_bytes().startswith(b"one\ntwo\n1\n2\n")
    assert starting.words().splitlines() == [f"  {number}" for number in range(89, 101)]
    assert starting.end_in_words() == "Open MPI 5 ended with status 3"


def test_what_it_wrote_last_is_there_when_it_is_reaped(start):
    starting = start("echo no such host; exit 1")
    assert await_end(starting)
    assert starting.words() == "  no such host" and starting.end_in_words() == "Open MPI 5 ended with status 1"


def test_lines_that_are_only_drawn_are_left_out(start):
    starting = start("echo -----; echo; echo ' text'; echo '   '")
    assert await_end(starting) and starting.words() == "   text"


def test_a_silent_starter_has_no_words(start):
    starting = start("exit 0")
    assert await_end(starting) and starting.words() == "" and starting.read() is None


def test_bytes_that_are_no_text_do_no_harm(start):
    starting = start(r"printf '\377\376 bad\n'")
    assert await_end(starting) and starting.words().endswith(" bad")


def test_reading_never_blocks(start):
    starting = start("sleep 60")
    assert starting.read() == b"" and not starting.reap() and starting.status is None


def test_its_pipe_may_outlive_it(start):
    """A daemon that it leaves holds its stdout."""
    starting = start("sleep 60 & echo gone")
    assert await_end(starting) and starting.words() == "  gone" and starting.read() == b""


def test_a_signal_reaches_all_of_its_group(start):
    starting = start("sleep 60 & sleep 60; echo never")
    starting.stop(signal.SIGTERM)
    assert await_end(starting) and starting.status == -signal.SIGTERM
    assert starting.end_in_words() == "Open MPI 5 was killed by SIGTERM (15)"
    assert read(starting) == b"" and starting.words() == ""


def test_one_that_has_ended_is_sent_nothing(start):
    starting = start("exit 0")
    assert await_end(starting)
    starting.stop(signal.SIGKILL)
    assert starting.reap() and starting.status == 0


def test_it_has_a_session_of_its_own_and_our_stdin(start):
    starting = start(f"exec {sys.executable} -Sc 'import os; print(os.getsid(0) == os.getpid(), os.fstat(0).st_ino)'")
    assert read(starting).decode() == f"True {os.fstat(0).st_ino}\n"


def test_it_inherits_none_of_our_own_descriptors(start):
    held = os.open("/dev/null", os.O_RDONLY)
    other = start("sleep 60")
    starting = start(f"exec {sys.executable} -Sc 'import os; print(*os.listdir(\"/proc/self/fd\"))'")
    ours = {fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd) and os.get_inheritable(fd)}
    there = set(map(int, read(starting).split()))
    assert {0, 1, 2} <= there and len(there - ours - {0, 1, 2}) == 1  # the one that lists them
    assert other.fileno() not in ours and held not in ours
    os.close(held)


def _is_open(fd):
    return os.path.exists(f"/proc/self/fd/{fd}")


def test_its_environment_is_what_it_is_given_and_nothing_else(start):
    starting = start("env", X="two words")
    names = {line.partition("=")[0] for line in read(starting).decode().splitlines()}
    assert names - {"PWD", "SHLVL", "_", "OLDPWD"} == {"PATH", "JAXRUN_JOB_ID", "X"}


def test_without_a_directory_its_words_are_kept_all_the_same(start, tmp_path):
    starting = start("echo hello", directory=None)
    assert await_end(starting) and starting.words() == "  hello" and not (tmp_path / LOG_NAME).exists()


def test_a_directory_that_is_gone_costs_the_file_alone(start, tmp_path):
    starting = start("echo hello", directory=tmp_path / "gone")
    assert await_end(starting) and starting.words() == "  hello"


def test_one_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        LaunchProcess("srun", [str(tmp_path / "srun")], {}, None)
