"""A rank reports workers of its process pools that die while the pool runs, and no others."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from harness import TIME_LIMIT
from harness_worker import environment

_PROGRAM = """
import concurrent.futures, json, multiprocessing as mp, os, signal, sys, threading, time
from jaxrun_runtime import pool_workers

reported = threading.Event()

class Channel:
    def send(self, message):
        print(json.dumps([type(message).__name__, message.rank, message.status]), flush=True)
        reported.set()

def work(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    if how == "sleep":
        time.sleep(60)
    return os.getpid()

if __name__ == "__main__":
    pool_workers.report_deaths(Channel(), 5)
    how, method, *executor = sys.argv[1:]
    if executor:
        with concurrent.futures.ProcessPoolExecutor(2, mp.get_context(method)) as pool:
            try:
                print(json.dumps(len(list(pool.map(work, ["", how])))))
            except concurrent.futures.process.BrokenProcessPool:
                assert reported.wait(60)
        sys.exit()
    with mp.get_context(method).Pool(2, maxtasksperchild=1) as pool:
        found = pool.map_async(work, ["", how, "", ""], chunksize=1)
        if how in ("kill", "exit"):
            assert reported.wait(60)
        elif how == "sleep":
            found.wait(0.5)
        else:
            found.get(60)
    print(json.dumps("the end"))
"""


@pytest.mark.parametrize(
    ("how", "method", "status"),
    [
        ("kill", "fork", -9),
        pytest.param("kill", "spawn", -9, marks=pytest.mark.extended),
        pytest.param("kill", "forkserver", -9, marks=pytest.mark.extended),
        pytest.param("exit", "fork", 3, marks=pytest.mark.extended),
    ],
)
def test_a_worker_that_dies_is_reported(tmp_path, how, method, status):
    assert _run(tmp_path, how, method)[0] == ["PoolWorkerDied", 5, status]


@pytest.mark.parametrize(
    ("how", "said"), [("kill", ["PoolWorkerDied", 5, -9]), pytest.param("", 2, marks=pytest.mark.extended)]
)
def test_a_worker_that_breaks_an_executor_is_reported_and_those_that_the_executor_ends_are_not(tmp_path, how, said):
    assert _run(tmp_path, how, "fork", "executor") == [said]


@pytest.mark.parametrize("how", ["", pytest.param("sleep", marks=pytest.mark.extended)])
def test_workers_that_have_done_their_tasks_or_are_ended_with_their_pool_are_not_reported(tmp_path, how):
    assert _run(tmp_path, how, "fork") == ["the end"]


def _run(tmp_path, how, method, *executor):
    (tmp_path / "program.py").write_text(_PROGRAM)
    words = [sys.executable, "program.py", how, method, *executor]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
