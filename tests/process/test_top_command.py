"""`jaxrun top`: a running job on one screen, asked from another terminal."""

import contextlib
import os
import re
import signal
import subprocess
import sys

from harness import MISBEHAVE, jaxrun, started
from terminals import TerminalSession

SCREEN = {"size": (80, 24), "env": {"TERM": "xterm", "NO_COLOR": "1"}}


def top(*arguments, status=0):
    command = [sys.executable, "-m", "jaxrun", "top", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done
    return done.stdout + done.stderr


@contextlib.contextmanager
def hanging(directory, *options):
    """A job of three ranks, in which rank 1 hangs and the others wait for it."""
    with started(directory, "-n", "3", *options, MISBEHAVE, "--rank", "1", "--hang") as job:
        job.wait_for_output("ready", 3)
        yield job


def rows(text):
    """The rows of ranks: what follows their titles, by rank."""
    found = re.findall(r"^([! ]) (\d+)  +(.*?) *$", text, re.MULTILINE)
    return {int(rank): (mark, rest) for mark, rank, rest in found}


def test_the_screen_shows_who_is_late_and_the_end_of_the_job(tmp_path):
    with hanging(tmp_path) as job:
        with TerminalSession(tmp_path, "top", str(job.run_dir), **SCREEN) as screen:
            screen.wait_for("jaxrun top  run  attempt 1, running")
            screen.wait_for("! 1     sleeps")
            screen.wait_for("s for rank 1 ")
            screen.type("s")
            screen.wait_for("3 ranks, 2 groups")
            screen.type("x")
            screen.wait_for("o order: what stands out   q quit")
            screen.type("o")
            screen.wait_for("o order: rank   q quit")
            screen.type("q")
            assert screen.end() == 0 and job.process.poll() is None
        with TerminalSession(tmp_path, "top", str(job.run_dir), **SCREEN) as screen:
            screen.wait_for("! 1     sleeps")
            job.process.send_signal(signal.SIGTERM)
            screen.wait_for("jaxrun: ")
            screen.wait_for("SIGTERM")
            assert screen.end() == 0
            last = screen.text.rpartition("\x1b[?1049l")[2]
            assert rows(last)[1] and "q quit" not in last, last
        assert "requested" not in {event["event"] for event in job.events() if event.get("request") != "StacksRequest"}
        assert "is over; how it went: jaxrun explain" in top(job.run_dir, status=2)


def test_without_a_terminal_it_is_printed_once(tmp_path):
    with hanging(tmp_path) as job:
        text = top(job.run_dir)
        while not rows(text)[1][0].strip():  # it is late after a second
            text = top("--once", job.run_dir)
        assert "\x1b" not in text and rows(text).keys() == {0, 1, 2}
        assert rows(text)[1][1].startswith("sleeps") and rows(text)[1][1].endswith("ready")
        assert re.search(r" \d+%  +\d+M  ready$", rows(text)[0][1]), text
        stopped = next(event["pid"] for event in job.events() if event["event"] == "spawned" and event["rank"] == 2)
        os.kill(stopped, signal.SIGSTOP)
        first, *_ = rows(top(job.run_dir)).values()
        assert first[1].startswith("stopped by a signal")


def test_ranks_whose_calls_are_not_recorded_have_none(tmp_path):
    with hanging(tmp_path, "--lockstep", "off") as job:
        text = top(job.run_dir)
    assert {len(re.findall(r"  -  ", rest)) for _, rest in rows(text).values()} == {1}, text


def test_live_has_the_terminal_until_the_job_is_over_and_then_the_verdict_is_printed(tmp_path):
    job = ("--live", "--run-dir", "run", "-n", "2", MISBEHAVE, "--rank", "1", "--after", "300", "--raise", "bad record")
    with TerminalSession(tmp_path, *job, **SCREEN) as screen:
        screen.wait_for("jaxrun top  run  attempt 1, ")
        screen.wait_for("ready")
        code = screen.end()
    shown, _, after = screen.text.rpartition("\x1b[?1049l")
    assert "[0] ready" not in screen.text and "s stacks " in shown and "s stacks " not in after
    assert "attempt 1, over after" in after and "jaxrun: 2 processes x 1 device" in after
    assert (
        "Trouble: bad record" in after
        and "rank 1 of 2 raised Trouble" in after
        and f"exit {code}" in after
        and code == 1
    )


def test_who_leaves_the_live_screen_sees_the_output(tmp_path):
    job = ("--live", "--run-dir", "run", "-n", "2", MISBEHAVE, "--rank", "1", "--after", "100000", "--steps", "600")
    with TerminalSession(tmp_path, *job, **SCREEN) as screen:
        screen.wait_for("jaxrun top  run  attempt 1, running")
        screen.type("q")
        screen.wait_for("jaxrun: 2 processes x 1 device")
        screen.wait_for("[0] finished")
        screen.wait_for("jaxrun: done in")
        assert screen.end() == 0


def test_live_needs_a_terminal(tmp_path):
    result = jaxrun(tmp_path, "--live", "-n", "2", MISBEHAVE)
    assert result.code == 2 and len(result.err.splitlines()) == 1
    assert "--live shows the job on the terminal, and standard input is none" in result.err


def test_there_must_be_a_job_that_runs(tmp_path):
    result = jaxrun(tmp_path, "-n", "1", "--timeout", "60", "-m", "jaxrun_runtime.programs.selfcheck")
    assert "is over; how it went: jaxrun explain" in top(result.run_dir, status=2)
