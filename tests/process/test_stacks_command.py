"""`jaxrun stacks`: where the ranks of a running job are, asked from elsewhere, without disturbing it."""

import json
import os
import signal
import subprocess
import sys

import pytest
from harness import MISBEHAVE, jaxrun, started


def ask(job, *options, status=0):
    command = [sys.executable, "-m", "jaxrun", "stacks", *options, str(job.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == status, done
    return done.stdout + done.stderr


@pytest.fixture
def stuck(tmp_path):
    """A job of three ranks, in which rank 1 hangs and the others wait for it."""
    with started(tmp_path, "-n", "3", MISBEHAVE, "--rank", "1", "--hang") as job:
        job.wait_for_output("ready", 3)
        yield job


def test_the_ranks_are_shown_in_groups_and_the_job_goes_on(stuck):
    text = ask(stuck)
    assert "3 ranks, 2 groups" in text and "rank 1 is the one that differs." in text
    assert "misbehave.py" in ask(stuck, "--full").partition("\n\n")[2]
    runs = str(stuck.run_dir.parent)
    command = [sys.executable, "-m", "jaxrun", "clean", "--keep", "0", runs]
    clean = subprocess.run(command, capture_output=True, text=True)
    assert f"kept {stuck.run_dir}: running" in clean.stdout and stuck.run_dir.exists()
    assert stuck.process.poll() is None
    stuck.process.terminate()
    result = stuck.result()
    assert "groups" not in result.err, "it was asked from elsewhere, and must not be answered here"
    assert "is over; how it went: jaxrun explain" in ask(stuck, status=2)


def test_a_stopped_rank_is_described_by_its_kernel_state(stuck):
    pid = next(event["pid"] for event in stuck.events() if event["event"] == "spawned" and event["rank"] == 2)
    os.kill(pid, signal.SIGSTOP)
    assert "no answer: stopped by a signal (SIGCONT lets it go on)" in ask(stuck)


def test_native_shows_c_frames_and_the_job_goes_on(stuck):
    text = ask(stuck, "--native")
    assert "3 ranks, 2 groups" in text
    groups = dict(part.split(":\n", 1) for part in text.split("\n\n")[1:])
    sleeping = groups.pop("rank 1")
    assert "in misbehave" in sleeping and "nanosleep   libc" in sleeping
    assert groups and all("in main" in group and "gloo::" in group for group in groups.values())
    assert "gloo::" not in ask(stuck, "--full")
    assert stuck.process.poll() is None


def test_native_of_a_stopped_rank_shows_its_python_frames(stuck):
    pid = next(event["pid"] for event in stuck.events() if event["event"] == "spawned" and event["rank"] == 1)
    os.kill(pid, signal.SIGSTOP)
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


def test_a_launcher_that_was_killed_is_not_asked(stuck):
    stuck.process.kill()
    stuck.process.wait()
    assert "is gone, and left no verdict" in ask(stuck, status=2)


def test_a_launcher_on_another_host_is_named(stuck):
    job = json.loads((stuck.run_dir / "job.json").read_text())
    job["launcher"]["host"] = "h9"
    (stuck.run_dir / "job.json").write_text(json.dumps(job))
    assert "runs on h9" in (text := ask(stuck, status=2)) and "type there: jaxrun stacks" in text


def test_a_job_that_is_over_has_no_stacks(tmp_path):
    result = jaxrun(tmp_path, "-n", "1", "-m", "jaxrun_runtime.programs.selfcheck")
    command = [sys.executable, "-m", "jaxrun", "stacks", str(result.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and "is over" in done.stderr
