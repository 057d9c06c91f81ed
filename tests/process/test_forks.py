"""Children that the program forks end by SIGTERM and crash on their own account; a wait for one names the fork."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from harness import HERE, TIME_LIMIT, Job, jaxrun, started

FORKING = str(HERE / "forking.py")


def test_children_end_by_sigterm_and_a_wait_for_one_names_where_it_was_forked(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "2", FORKING) as job:
        job.wait_for_output("ended by [15]", 2)
        job.wait_for_output("mapped [1, 2]", 2)
        job.wait_for_output("waiting")
        text = _snapshot_with(job, "its children were forked at")
        assert "rank 1 waits for data (multiprocessing.map)" in text
        assert "forking.py:16 fork_and_signal" in text and "use spawn or forkserver" in text
        assert "Segmentation fault" in (job.run_dir / "rank-0001.err").read_text()
        forks = [event["at"] for event in job.events() if event["event"] == "forked" and event["rank"] == 0]
        assert forks == ["forking.py:16 fork_and_signal", "forking.py:41 main", "forking.py:25 fork_and_crash"]
        for _ in range(2):
            job.process.send_signal(signal.SIGINT)
        job.result()


def test_the_programs_own_handler_is_the_childrens_too(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "1", FORKING)
    assert (result.code, result.out) == (0, "[0] exited with 7\n"), result


def _snapshot_with(job: Job, words: str) -> str:
    """What `jaxrun stacks` prints, in one line, as soon as it has these words."""
    deadline = time.monotonic() + TIME_LIMIT
    text = ""
    while words not in text:
        assert time.monotonic() < deadline, text
        command = [sys.executable, "-m", "jaxrun", "stacks", str(job.run_dir)]
        text = " ".join(subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT).stdout.split())
    return text
