"""--notify with real jobs: which events its command hears of, what it gets, and what becomes of one that fails."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from harness import jaxrun, started, write_fake_runtime

from jaxrun.controller.supervisor import notifier

FAILS_ONCE = "run(); env.attempt > 1 or fail()"
KEEPS = 'read line; printf "%s %s\\n" $JAXRUN_EVENT "$line" >> heard'


def heard(directory: Path) -> list[tuple[str, dict[str, object]]]:
    """The events that KEEPS has written, each by its variable and its standard input."""
    lines = (line.split(" ", 1) for line in (directory / "heard").read_text().splitlines())
    return [(name, json.loads(text)) for name, text in lines]


def test_a_restart_and_the_end_are_reported(tmp_path: Path) -> None:
    words = ("-n", "1", "--tag", "night", "--max-restarts", "1", "--notify", KEEPS, "by_hand.py", FAILS_ONCE)
    result = jaxrun(tmp_path, *words, env=write_fake_runtime(tmp_path))
    (first, again), (last, end) = heard(tmp_path)
    assert (first, last) == ("restarted", "ended") == (again["event"], end["event"])
    assert (again["attempt"], again["hosts"], again["tag"], again["size"]) == (2, 1, "night", 1)
    assert str(again["reason"]).startswith("rank 0 of 1 raised ")
    assert (end["outcome"], end["exit_code"], end["attempt"], end["culprits"]) == ("ok", 0, 2, [])
    assert str(end["headline"]).startswith("done in ") and str(end["headline"]).endswith("1 restart)")
    assert end["run_dir"] == str(result.run_dir) and end["job_id"] == again["job_id"]
    assert result.code == 0 and "--notify" not in result.err


def test_a_command_that_fails_is_one_line_and_changes_nothing(tmp_path: Path) -> None:
    words = ("-n", "1", "--notify", "echo no such channel >&2; exit 3", "by_hand.py", "run(); fail()")
    result = jaxrun(tmp_path, *words, env=write_fake_runtime(tmp_path))
    assert result.code == 1
    assert result.err.count("--notify") == 1
    assert "jaxrun: --notify exited with status 3 for the event ended: no such channel" in result.err


@pytest.mark.extended
def test_a_command_that_hangs_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    words = ("-n", "1", "--notify", "sleep 600 & sleep 600", "by_hand.py", "run()")
    began = time.monotonic()
    with started(tmp_path, *words, env=write_fake_runtime(tmp_path)) as job:
        result = job.end()
        assert not job.processes()
    assert result.code == 0 and time.monotonic() - began < notifier.NOTIFY_TIMEOUT_S + 10
    assert "jaxrun: --notify did not end in 10 s for the event ended" in result.err


def test_ctrl_c_ends_the_wait_for_the_command_at_the_end_of_the_job(tmp_path: Path) -> None:
    words = ("-n", "1", "--notify", "touch runs; sleep 600", "by_hand.py", "run()")
    with started(tmp_path, *words, env=write_fake_runtime(tmp_path)) as job:
        job.wait_until((tmp_path / "runs").exists, "the command")
        began = time.monotonic()
        job.wait_until(lambda: job.process.poll() is not None or job.process.send_signal(signal.SIGINT), "its end")
        result = job.end()
        assert not job.processes()
    assert result.code == 0 and time.monotonic() - began < notifier.NOTIFY_TIMEOUT_S - 3
