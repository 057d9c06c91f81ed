"""The agent, with real processes that speak the protocol without jax."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from jaxrun.agent.worker_process import WorkerProcess
from jaxrun.protocol.codec import encode
from jaxrun.protocol.worker_messages import Done

CLEAN = "run(); done()"
SLEEPS = "run(); time.sleep(60)"


def _is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _inheritable():
    """What this process itself hands down, besides its three streams."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if fd > 2 and os.get_inheritable(fd):
                yield fd


def test_a_clean_run(run_job):
    job = run_job(*(f"run(); print('hello from {rank}'); done()" for rank in range(3)))
    assert job.ending.reason == "ok" and job.statuses == [0, 0, 0]
    names = job.events.names(2)
    assert [name for name in names if name != "first_output"] == ["spawned", "hello", "proof", "done", "exit"]
    assert names.count("first_output") == 1
    assert sorted(job.screen.splitlines()) == [f"[{rank}] hello from {rank}" for rank in range(3)]
    assert job.log(1) == b"hello from 1\n"
    assert job.left_over == []


def test_the_first_error_ends_the_job_at_once(run_job):
    job = run_job(SLEEPS, "run(); fail('bad record', 3)", SLEEPS)
    assert job.ending.reason == "failed" and job.statuses == [-9, 3, -9]
    assert job.ending.workers[1].failure.message == "bad record"
    assert job.screen == "jaxrun: rank 1 failed; stopping 2 others\n"
    assert b"ValueError: bad record" in job.log(1, "err")
    assert ("stop", None, {"signal": 9, "ranks": [0, 2]}) in job.events


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


def test_a_crash_leaves_its_stack_and_the_last_lines_of_stderr(run_job):
    job = run_job("run(); print('so far', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)")
    (end,) = job.ending.workers
    assert end.status == -signal.SIGSEGV
    assert "Segmentation fault" in end.crash_dump and end.stderr_tail == "so far\n"


def test_a_crash_leaves_its_stack_where_the_program_has_led_the_fault_handler_to_stderr(run_job):
    """As absl.app.run does."""
    job = run_job("run(); import faulthandler; faulthandler.enable(2); os.kill(os.getpid(), signal.SIGSEGV)")
    (end,) = job.ending.workers
    assert end.crash_dump.startswith("Fatal Python error: Segmentation fault") and "Current thread" in end.crash_dump


@pytest.mark.parametrize(
    ("sent", "why"),
    [(b"GET / HTTP/1.0\r\n\r\n", "a frame announces"), (encode(Done(0, 1.0)), "a Done for another rank than 1")],
    ids=["a request", "another rank's end"],
)
def test_what_a_worker_cannot_mean_is_its_own_fault(run_job, sent, why):
    job = run_job(SLEEPS, f"run(); link.sendall({sent!r}); time.sleep(60)")
    end = job.ending.workers[1]
    assert end.failure.error == "ProtocolError" and "wrote to jaxrun's channel" in end.failure.message
    assert why in end.failure.message and job.ending.workers[0].failure is None
    assert job.ending.reason == "failed" and job.statuses == [-9, -9]


def test_an_announced_giant_is_refused(run_job):
    job = run_job("run(); link.sendall(b'\\xff' * 4); link.recv(1); os._exit(70)")
    assert "a frame announces 4294967295 bytes" in job.ending.workers[0].failure.message


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


def test_two_workers_with_one_rank_are_refused(run_job):
    job = run_job("hello(); time.sleep(60)", "hello(); hello(pid=1); time.sleep(60)")
    assert job.ending.reason == "refused" and "two processes say that they are rank 1" in job.ending.text


def test_a_silent_worker_is_named_when_the_start_up_takes_too_long(run_job):
    job = run_job("hello(); time.sleep(60)", "time.sleep(60)", init=2.0)
    assert job.ending.reason == "unavailable" and "missing: rank 1\n" in job.ending.text


def test_a_time_limit_shows_where_the_ranks_were(run_job):
    job = run_job("run(); time.sleep(60)", "run(); os.kill(os.getpid(), signal.SIGSTOP)", job=1.0)
    assert job.ending.reason == "timeout" and job.statuses == [-9, -9]
    assert 'File "<string>", line 1' in job.ending.stacks[0]
    assert job.ending.stacks[1] == ""
    assert [end.crash_dump for end in job.ending.workers] == ["", ""]


def test_sigterm_is_the_workers_notice(run_job):
    waits = "signal.signal(signal.SIGTERM, lambda *_: done()); run(); listen(); "
    job = run_job(waits + "time.sleep(60)", waits + "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)")
    assert job.ending.reason == "preempted" and job.statuses == [0, 0]


def test_a_worker_that_ignores_all_signals_is_killed_after_the_grace(run_job):
    ignores = "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]; run(); "
    job = run_job(ignores + "os.kill(os.getppid(), signal.SIGINT); time.sleep(60)")
    assert job.ending.reason == "interrupted" and job.ending.signum == signal.SIGINT
    assert job.statuses == [-9]
    assert "rank 0 did not end within 0 s; sent SIGTERM and SIGKILL" in job.screen


def test_a_user_signal_is_forwarded(run_job):
    notes = "signal.signal(signal.SIGUSR1, lambda *_: done()); run(); listen(); "
    job = run_job(notes + "os.kill(os.getppid(), signal.SIGUSR1); time.sleep(60)", notes + "time.sleep(60)")
    assert job.ending.reason == "ok"


def test_sigquit_shows_stacks_and_the_job_goes_on(run_job):
    job = run_job("run(); os.kill(os.getppid(), signal.SIGQUIT); time.sleep(0.5); done()")
    assert job.ending.reason == "ok" and "<string>:1" in job.screen


def test_a_daemon_that_a_worker_left_behind_is_gone_at_the_end(run_job, tmp_path):
    job = run_job(f"grandchild({str(tmp_path / 'pid')!r}); run(); done()")
    pid = int((tmp_path / "pid").read_text())
    assert job.ending.reason == "ok"
    assert job.left_over == [pid] and _is_gone(pid)


def test_a_daemon_that_holds_the_pipes_open_does_not_hold_the_job(run_job, tmp_path):
    job = run_job(f"grandchild({str(tmp_path / 'pid')!r}, True); run(); print('last'); done()")
    assert job.ending.reason == "ok" and job.log(0) == b"last\n"
    assert job.seconds < 30 and _is_gone(int((tmp_path / "pid").read_text()))


def test_a_daemon_that_writes_for_ever_does_not_hold_the_job(run_job):
    job = run_job("os.system('yes &'); time.sleep(0.2); run(); done()")
    assert job.ending.reason == "ok"
    assert set(job.log(0)[:100_000]) == set(b"y\n")


def test_no_byte_is_lost(run_job):
    size = 10_000_000
    job = run_job(f"run(); sys.stdout.write('x' * {size}); done()", "run(); os.write(2, b'no newline \\xff'); done()")
    assert job.ending.reason == "ok"
    assert job.log(0) == b"x" * size
    assert job.log(1, "err") == b"no newline \xff"


def test_standard_input_is_rank_0s(run_job):
    code = "run(); print(repr(sys.stdin.read())); done()"
    read, write = os.pipe()
    before = os.dup(0)
    os.dup2(read, 0)
    os.write(write, b"to be read\n")
    os.close(write)
    try:
        job = run_job(code, code)
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(read)
    assert job.log(0) == b"'to be read\\n'\n" and job.log(1) == b"''\n"


def test_each_worker_has_a_session_and_no_descriptor_of_anothers(run_job):
    look = (
        "run()\n"
        "print(os.getsid(0) == os.getpid())\n"
        "for fd in os.listdir('/proc/self/fd'):\n"
        "  name = f'/proc/self/fd/{fd}'\n"
        "  if os.path.lexists(name): print(os.readlink(name))\n"
        "done()"
    )
    inherited = {os.readlink(f"/proc/self/fd/{fd}") for fd in _inheritable()}
    job = run_job(look, look, look)
    seen = [job.log(rank).decode().splitlines() for rank in range(3)]
    assert [lines[0] for lines in seen] == ["True"] * 3
    own = [{name for name in lines[1:] if not name.startswith("/dev/")} - inherited for lines in seen]
    for names, others in ((own[0], own[1] | own[2]), (own[1], own[0] | own[2]), (own[2], own[0] | own[1])):
        assert not names & others
        assert sorted(name.split(":")[0] for name in names) == ["/memfd", "/memfd", "pipe", "pipe", "socket"]


def test_a_program_that_cannot_be_started(run_job, tmp_path):
    job = run_job(argv=[tmp_path / "missing"], size=2)
    assert job.ending.reason == "unavailable"
    assert job.ending.text == f"rank 0 could not be started: No such file or directory ({tmp_path}/missing)"


def test_fifty_jobs_leave_no_descriptor_open(run_job):
    run_job(argv=["/bin/sh", "-c", "exit 3"], size=2)
    before = os.listdir("/proc/self/fd")
    for _ in range(50):
        assert run_job(argv=["/bin/sh", "-c", "exit 3"], size=2).ending.reason == "failed"
    assert len(os.listdir("/proc/self/fd")) <= len(before)  # fewer where garbage was collected
