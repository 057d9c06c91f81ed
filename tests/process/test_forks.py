"""Children that the program forks end by SIGTERM and crash on their own account; a wait for one names the fork."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from harness import TIME_LIMIT, started

FORKING = """\
import multiprocessing, os, signal, time

import jax
from jax.experimental import multihost_utils


def fork_and_signal(number):
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    os.kill(pid, number)  # as soon as it exists
    return os.waitpid(pid, 0)[1]


def fork_and_crash():
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    os.waitpid(pid, 0)


def main():
    multihost_utils.sync_global_devices("start")
    ended = {os.WTERMSIG(fork_and_signal(signal.SIGTERM)) for _ in range(20)}
    print(f"ended by {sorted(ended)}", flush=True)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(f"mapped {pool.map(abs, [-1, -2])}", flush=True)
    fork_and_crash()
    if jax.process_index() == 1:
        # The program's own handler of SIGTERM is the children's, too, as under `python`.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
        print(f"exited with {os.waitstatus_to_exitcode(fork_and_signal(signal.SIGTERM))}", flush=True)
        with multiprocessing.get_context("fork").Pool(1) as pool:
            print("waiting", flush=True)
            pool.map(time.sleep, [600])
    multihost_utils.sync_global_devices("end")


if __name__ == "__main__":
    main()
"""


def test_children_end_by_sigterm_and_a_wait_for_one_names_where_it_was_forked(tmp_path):
    (tmp_path / "forking.py").write_text(FORKING)
    with started(tmp_path, "-n", "2", "forking.py") as job:
        job.wait_for_output("ended by [15]", 2)
        job.wait_for_output("mapped [1, 2]", 2)
        job.wait_for_output("exited with 7")
        job.wait_for_output("waiting")
        text = _snapshot_with(job, "its children were forked at")
        assert "rank 1 waits for data (multiprocessing.map)" in text
        assert "forking.py:8 fork_and_signal" in text and "use spawn or forkserver" in text
        assert "Segmentation fault" in (job.run_dir / "rank-0001.err").read_text()
        forks = [event["place"] for event in job.events("ChildForked") if event["rank"] == 0]
        assert forks == ["forking.py:8 fork_and_signal", "forking.py:27 main", "forking.py:17 fork_and_crash"]
        for _ in range(2):
            job.process.send_signal(signal.SIGINT)
        job.result()


def _snapshot_with(job, words):
    """What `jaxrun stacks` prints, in one line, as soon as it has these words."""
    deadline = time.monotonic() + TIME_LIMIT
    text = ""
    while words not in text:
        assert time.monotonic() < deadline, text
        command = [sys.executable, "-m", "jaxrun", "stacks", str(job.run_dir)]
        text = " ".join(subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT).stdout.split())
    return text
