"""Workers that one process forks, and what happens when it does not."""

import gc
import os

import pytest

CLEAN = "run(); done()"


def _descriptors():
    gc.collect()  # those of tests before this one
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [2, 40])
def test_forked_workers_run_as_any_other(run_job, size):
    before = _descriptors()
    job = run_job(*["run(); print(rank, os.getsid(0) == os.getpid()); done()"] * size, fork="fork")
    assert job.ending.reason == "ok" and job.statuses == [0] * size
    assert [job.log(rank) for rank in range(size)] == [f"{rank} True\n".encode() for rank in range(size)]
    assert "fork_declined" not in job.events.names(None)
    assert _descriptors() == before


def test_where_forking_is_declined_the_workers_start_in_fresh_interpreters(run_job):
    before = _descriptors()
    job = run_job(*["run(); print('here'); done()"] * 3, fork="decline")
    assert job.ending.reason == "ok" and job.statuses == [0, 0, 0]
    assert ("fork_declined", None, {"reason": "a thread was started"}) in job.events
    assert [job.log(rank) for rank in range(3)] == [b"here\n"] * 3
    assert _descriptors() == before


def test_a_limit_that_is_reached_after_the_first_fork_is_reported(run_job):
    before = _descriptors()
    job = run_job("run(); time.sleep(60)", CLEAN, CLEAN, fork="limit")
    assert job.ending.reason == "unavailable"
    assert job.ending.text == (
        "not all workers could be started: no process can be forked: Resource temporarily unavailable"
    )
    assert job.left_over == [] and _descriptors() == before


def test_a_failed_import_is_reported_with_its_traceback(run_job):
    before = _descriptors()
    job = run_job(CLEAN, CLEAN, fork="fail")
    assert job.ending.reason == "unavailable"
    assert job.ending.text.startswith("jax could not be imported: ModuleNotFoundError: no jax\nis it installed for")
    assert job.ending.traceback == "Traceback\n"
    assert _descriptors() == before


def test_a_fork_server_that_dies_is_reported(run_job):
    job = run_job(CLEAN, CLEAN, fork="die")
    assert job.ending.reason == "unavailable" and "--no-fork does without it" in job.ending.text


def test_a_forked_worker_that_dies_at_once_ends_the_job(run_job):
    job = run_job("os._exit(4)", "run(); time.sleep(60)", fork="fork")
    assert job.ending.reason == "failed" and job.statuses[0] == 4
    assert job.statuses[1] in (-9, None)


def test_a_missing_interpreter_is_reported_once(run_job, tmp_path):
    job = run_job(argv=[tmp_path / "python", "-m", "jaxrun_runtime", "p"], size=2)
    assert job.ending.text.startswith("rank 0 could not be started: No such file or directory")
