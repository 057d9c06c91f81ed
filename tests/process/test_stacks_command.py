"""`jaxrun stacks`: where the ranks of a running job are, asked from elsewhere, without disturbing it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from harness import MISBEHAVE, TIME_LIMIT, started


def ask(job, *options, status=0):
    command = [sys.executable, "-m", "jaxrun", "stacks", *options, str(job.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == status, done
    return done.stdout + done.stderr


@contextlib.contextmanager
def hanging(directory):
    """A job of three ranks, in which rank 1 hangs and the others wait for it."""
    with started(directory, "-n", "3", MISBEHAVE, "--rank", "1", "--hang") as job:
        job.wait_for_output("ready", 3)
        yield job


@pytest.fixture(scope="module")
def stuck(tmp_path_factory):
    """One such job for all questions that leave it as it is, once its ranks have compiled."""
    with hanging(tmp_path_factory.mktemp("stuck")) as job:
        deadline = time.monotonic() + TIME_LIMIT
        while "2 groups" not in ask(job):
            assert time.monotonic() < deadline
        yield job
        assert job.process.poll() is None


@contextlib.contextmanager
def stopped(job, rank):
    """This rank is stopped by a signal meanwhile."""
    pid = next(event["pid"] for event in job.events() if event["event"] == "spawned" and event["rank"] == rank)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_ranks_are_shown_in_groups(stuck):
    text = ask(stuck)
    assert "3 ranks, 2 groups" in text and "rank 1 is the one that differs." in text
    assert "misbehave.py" in ask(stuck, "--full").partition("\n\n")[2]


def test_a_job_that_was_asked_goes_on_and_answers_nowhere_else(tmp_path):
    with hanging(tmp_path) as job:
        ask(job)
        command = [sys.executable, "-m", "jaxrun", "clean", "--keep", "0", str(tmp_path)]
        clean = subprocess.run(command, capture_output=True, text=True)
        assert f"kept {job.run_dir}: running" in clean.stdout and job.run_dir.exists()
        assert job.process.poll() is None
        job.process.terminate()
        assert "groups" not in job.result().err
        assert "is over; how it went: jaxrun explain" in ask(job, status=2)


def test_a_stopped_rank_is_described_by_its_kernel_state(stuck):
    with stopped(stuck, 2):
        assert "no answer: stopped by a signal (SIGCONT lets it go on)" in ask(stuck)


def test_native_shows_c_frames(stuck):
    text = ask(stuck, "--native")
    assert "3 ranks, 2 groups" in text
    groups = dict(part.split(":\n", 1) for part in text.split("\n\n")[1:])
    sleeping = groups.pop("rank 1")
    assert "in misbehave" in sleeping and "nanosleep   libc" in sleeping
    assert groups and all("in main" in group and "gloo::" in group for group in groups.values())
    assert "gloo::" not in ask(stuck, "--full")


@pytest.mark.extended
def test_native_of_a_stopped_rank_shows_its_python_frames(stuck):
    with stopped(stuck, 1):
        text = ask(stuck, "--native")
    assert "rank 1:\n  (a stopped process is seen without C frames)\n  File " in text


def test_a_launcher_that_would_die_of_it_is_not_asked_for_native_frames(tmp_path):
    """One of an older jaxrun, to which the signal is deadly."""
    (tmp_path / "events.jsonl").touch()
    with (tmp_path / "events.jsonl").open("ab") as events:
        other = subprocess.Popen(["sleep", "60"], stdout=events)
    job = {"launcher": {"host": os.uname().nodename, "pid": other.pid}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    try:
        command = [sys.executable, "-m", "jaxrun", "stacks", "--native", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 2 and "cannot be asked that" in done.stderr
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_native_frames_are_not_watched(stuck):
    assert "halts every rank while it looks; not with --watch" in ask(stuck, "--native", "--watch", status=2)


def test_a_launcher_that_was_killed_or_is_on_another_host_is_not_asked(tmp_path):
    with hanging(tmp_path) as job:
        text = (job.run_dir / "job.json").read_text()
        described = json.loads(text)
        described["launcher"]["host"] = "h9"
        (job.run_dir / "job.json").write_text(json.dumps(described))
        assert "runs on h9" in (answer := ask(job, status=2)) and "type there: jaxrun stacks" in answer
        (job.run_dir / "job.json").write_text(text)
        job.process.kill()
        job.process.wait()
        assert "is gone, and left no verdict" in ask(job, status=2)
