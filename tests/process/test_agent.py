"""The agent and its group of workers, forked or not: real processes that speak the protocol without jax."""

import contextlib
import gc
import os
import signal

import pytest
from harness import is_alive

from jaxrun.node.agent.worker_process import WorkerProcess
from jaxrun.protocol.codec import encode
from jaxrun.protocol.worker_messages import Done
from jaxrun.records.event_log.events import FreshInterpreters

CLEAN = "run(); done()"
SLEEPS = "run(); time.sleep(600)"
LOOKS = """
run()
print('hello from', rank)
print(os.getsid(0) == os.getpid())
for fd in os.listdir('/proc/self/fd'):
    name = f'/proc/self/fd/{fd}'
    if os.path.lexists(name): print(os.readlink(name))
done()
"""


def _inheritable():
    """What this process itself hands down, besides its three streams."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if fd > 2 and os.get_inheritable(fd):
                yield fd


def _descriptors():
    gc.collect()  # those of tests before this one, of which some may be closed later, too
    return len(os.listdir("/proc/self/fd"))


def test_a_clean_run_in_which_each_worker_has_a_session_and_no_descriptor_of_anothers(run_job):
    inherited = {os.readlink(f"/proc/self/fd/{fd}") for fd in _inheritable()}
    job = run_job(LOOKS, LOOKS, LOOKS)
    assert job.ending.reason == "ok" and job.statuses == [0, 0, 0]
    names = job.events.names(2)
    whole_life = ["WorkerSpawned", "Hello", "DeviceReport", "Done", "WorkerExited"]
    assert [name for name in names if name != "FirstOutput"] == whole_life
    assert names.count("FirstOutput") == 1
    assert job.left_over == []
    seen = [job.log(rank).decode().splitlines() for rank in range(3)]
    assert sorted(job.screen.splitlines()) == sorted(f"[{rank}] {line}" for rank in range(3) for line in seen[rank])
    assert [lines[:2] for lines in seen] == [[f"hello from {rank}", "True"] for rank in range(3)]
    own = [{name for name in lines[2:] if not name.startswith("/dev/")} - inherited for lines in seen]
    for names, others in ((own[0], own[1] | own[2]), (own[1], own[0] | own[2]), (own[2], own[0] | own[1])):
        assert not names & others
        assert sorted(name.split(":")[0] for name in names) == ["/memfd", "/memfd", "pipe", "pipe", "socket"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("os._exit(3)", 3),
        ("hello(); os._exit(0)", 0),
        ("run(); link.close(); time.sleep(0.05); os._exit(5)", 5),
        ("run(); os.kill(os.getpid(), 9)", -9),
    ],
    ids=["before its hello", "while joining", "without its channel", "by SIGKILL"],
)
def test_a_worker_ends_without_a_report(run_job, code, status):
    job = run_job(SLEEPS, code)
    assert job.ending.reason == "failed" and job.statuses == [-9, status]
    assert not job.ending.workers[1].killed_by_launcher and job.ending.workers[1].failure is None


@pytest.mark.parametrize(
    "led", ["", "import faulthandler; faulthandler.enable(2); "], ids=["jaxrun's", "to stderr, by absl"]
)
def test_a_crash_leaves_its_stack_and_the_last_lines_of_stderr(run_job, led):
    job = run_job(f"run(); {led}print('so far', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)")
    (end,) = job.ending.workers
    assert end.status == -signal.SIGSEGV and end.stderr_tail.startswith("so far\n")
    assert end.crash_dump.startswith("Fatal Python error: Segmentation fault") and "Current thread" in end.crash_dump
    assert (end.stderr_tail == "so far\n") == (not led)


@pytest.mark.parametrize(
    ("sent", "why"),
    [(b"GET / HTTP/1.0\r\n\r\n", "a frame announces"), (encode(Done(0, 1.0)), "a Done for another rank than 1")],
    ids=["a request", "another rank's end"],
)
def test_what_a_worker_cannot_mean_is_its_own_fault(run_job, sent, why):
    job = run_job(SLEEPS, f"run(); link.sendall({sent!r}); time.sleep(600)")
    end = job.ending.workers[1]
    assert end.failure.error == "ProtocolError" and "wrote to jaxrun's channel" in end.failure.message
    assert why in end.failure.message and job.ending.workers[0].failure is None
    assert job.ending.reason == "failed" and job.statuses == [-9, -9]


def test_all_stand_still_before_the_first_is_killed(run_job, monkeypatch):
    # Or they would see each other die, and complain.
    sent = []
    original = WorkerProcess.signal
    monkeypatch.setattr(
        WorkerProcess, "signal", lambda child, signum: (sent.append((signum, child.rank)), original(child, signum))
    )
    job = run_job(SLEEPS, SLEEPS, "run(); os._exit(1)")
    assert job.statuses == [-9, -9, 1]
    stop, kill = signal.SIGSTOP, signal.SIGKILL
    assert sent == [(stop, 0), (stop, 1), (kill, 0), (kill, 1)]


def test_daemons_that_workers_left_behind_hold_up_nothing_and_are_gone_at_the_end(run_job, tmp_path):
    """Those with streams of their own, those that hold the worker's pipes open, and those that write for ever."""
    job = run_job(
        f"grandchild({str(tmp_path / 'pid0')!r}); run(); done()",
        f"grandchild({str(tmp_path / 'pid1')!r}, True); run(); print('last'); done()",
        "os.system('yes &'); run(); done()",
    )
    assert job.ending.reason == "ok"
    assert job.log(1) == b"last\n" and set(job.log(2)) <= set(b"y\n")
    pids = [int((tmp_path / name).read_text()) for name in ("pid0", "pid1")]
    assert set(pids) <= set(job.left_over)  # at the end they were there, and not waited for
    assert not any(map(is_alive, job.left_over))


def test_a_program_that_cannot_be_started(run_job, tmp_path):
    job = run_job(argv=[tmp_path / "missing"], size=2)
    assert job.ending.reason == "unavailable"
    assert job.ending.text == f"rank 0 could not be started: No such file or directory ({tmp_path}/missing)"


def test_many_jobs_leave_no_descriptor_open(run_job):
    run_job(argv=["/bin/sh", "-c", "exit 3"], size=2)
    before = _descriptors()
    for _ in range(15):
        assert run_job(argv=["/bin/sh", "-c", "exit 3"], size=2).ending.reason == "failed"
    assert _descriptors() <= before


# ---- workers that one process forks, and what happens when it does not


def test_forked_workers_run_as_any_other(run_job):
    before, size = _descriptors(), 20
    job = run_job(*["run(); print(rank, os.getsid(0) == os.getpid()); done()"] * size, fork="fork")
    assert job.ending.reason == "ok" and job.statuses == [0] * size
    assert [job.log(rank) for rank in range(size)] == [f"{rank} True\n".encode() for rank in range(size)]
    assert not any(isinstance(message, FreshInterpreters) for message in job.events)
    assert _descriptors() <= before


@pytest.mark.parametrize(
    ("how", "reason"),
    [("decline", "a thread was started"), ("die", "the process that imports jax for all workers has ended")],
)
def test_where_nothing_is_forked_the_workers_start_in_fresh_interpreters(run_job, how, reason):
    before = _descriptors()
    job = run_job(*["run(); print('here'); done()"] * 2, fork=how)
    assert job.ending.reason == "ok" and job.statuses == [0, 0]
    assert FreshInterpreters(reason) in job.events
    assert [job.log(rank) for rank in range(2)] == [b"here\n"] * 2
    assert _descriptors() <= before


def test_a_limit_that_is_reached_after_the_first_fork_is_reported(run_job):
    before = _descriptors()
    job = run_job(SLEEPS, CLEAN, CLEAN, fork="limit")
    assert job.ending.reason == "unavailable"
    assert job.ending.text == (
        "not all workers could be started: no process can be forked: Resource temporarily unavailable"
    )
    assert job.left_over == [] and _descriptors() <= before


def test_a_forked_worker_that_dies_at_once_ends_the_job(run_job):
    job = run_job("os._exit(4)", SLEEPS, fork="fork")
    assert job.ending.reason == "failed" and job.statuses[0] == 4
    assert job.statuses[1] in (-9, None)
