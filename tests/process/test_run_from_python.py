"""jaxrun.run, Job and jobs in real processes, with workers by hand: output, endings, signals, threads, and no leaks."""

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import TIME_LIMIT, extended, wait_until, wait_until_gone, write_fake_runtime
from terminals import TerminalSession

import jaxrun
from jaxrun.cli.main import main
from jaxrun.errors import UnavailableError
from jaxrun.records.rundir.recorded_files import read_plan

HELLO = "run(); print('hello', rank, flush=True); done()"
ASLEEP = "run(); print('asleep', flush=True); time.sleep(600)"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, from which `by_hand.py CODE CODE` runs workers without jax."""
    monkeypatch.chdir(tmp_path)
    for name, value in write_fake_runtime(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def run_by_hand(*codes, **options):
    return jaxrun.run(["by_hand.py", *codes], processes=len(codes), no_fork=True, **options)


def test_a_job_is_a_result_and_its_files_are_values(here):
    lines = []
    result = run_by_hand(HELLO, HELLO, on_line=lines.append, tag="first", env={"A": "b"})
    assert (result.ok, result.exit_code, result.verdict.outcome) == (True, 0, "ok")
    assert sorted(line for line in lines if "hello" in line) == ["[0] hello 0", "[1] hello 1"]
    assert lines[0].startswith("jaxrun: 2 processes") and lines[-1].startswith("jaxrun: done in ")
    job = result.job
    assert (job.state, job.running, job.exit_code, job.tag, job.processes) == ("done", False, 0, "first", 2)
    assert job.program[0] == "by_hand.py" and job.headline == result.headline and job.goodput is None
    assert [(rank.rank, rank.status, rank.state) for rank in job.ranks] == [(0, 0, "finished"), (1, 0, "finished")]
    assert [(line.rank, line.stream, line.text) for line in job.lines()] == [
        (0, "out", "hello 0"),
        (1, "out", "hello 1"),
    ]
    assert [line.text for line in job.lines(ranks=[1], follow=True)] == ["hello 1"]
    kinds = [type(event.message).__name__ for event in job.events(follow=True)]
    assert kinds[0] == "AttemptStarted" and kinds == [type(event.message).__name__ for event in job.events()]
    assert job.wait(0) == result.verdict == job.verdict
    assert jaxrun.jobs() == (job,) == (jaxrun.Job(1),) == (jaxrun.Job(),) == (jaxrun.Job(result.run_dir),)
    assert repr(job) == f"<Job 1: jaxrun-runs/{job.run_dir.name}, done>"
    assert repr(result).startswith("<Result: ok, exit 0 after ")


@pytest.mark.extended
def test_a_job_that_fails_is_a_result_and_one_without_a_run_directory_has_a_verdict(here, capfd):
    result = run_by_hand("run(); os._exit(3)", ASLEEP, no_run_dir=True)
    assert (result.exit_code, result.verdict.culprits, result.run_dir) == (3, (0,), None)
    out, err = capfd.readouterr()
    assert out == "[1] asleep\n" * ("asleep" in out) and "rank 0 of 2 exited with status 3" in err
    with pytest.raises(jaxrun.UsageError, match="no run directory"):
        _ = result.job
    assert jaxrun.jobs() == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_restart": 2}, ["--max-restart=2"]),
        extended({"max_restarts": -1}, ["--max-restarts=-1"]),
        extended({"n": "two"}, ["-n", "two"]),
        extended({"live": True}, ["--live"]),
    ],
)
def test_bad_options_are_errors_in_the_words_of_the_command_line(here, capfd, options, words):
    with pytest.raises(jaxrun.UsageError) as raised:
        jaxrun.run("by_hand.py", no_fork=True, **options)
    assert capfd.readouterr() == ("", "")
    assert main([*words, "by_hand.py"]) == 2
    assert capfd.readouterr() == ("", f"jaxrun: {raised.value}\n")


@pytest.mark.extended
def test_an_error_of_the_machine_is_one_here_and_a_dry_run_is_no_job(here, capfd):
    with pytest.raises(UnavailableError, match="mpirun"):
        jaxrun.run("by_hand.py", processes=2, backend="mpirun", mpirun="/nowhere/mpirun")
    result = jaxrun.run("by_hand.py", processes=3, dry_run=True, no_fork=True)
    assert result == type(result)(0) and "by_hand.py" in capfd.readouterr().out and jaxrun.jobs() == ()


def test_threads_run_jobs_at_once_and_what_a_callback_raises_ends_its_job(here):
    both = threading.Barrier(2, timeout=TIME_LIMIT)

    def meet(line):
        if "asleep" in line:
            both.wait()
            raise KeyError("enough")

    def run(name):
        try:
            run_by_hand(ASLEEP, run_dir=name, on_line=meet)
        except KeyError:
            return jaxrun.Job(here / name).state

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, ("a", "b"))) == ["interrupted, exit 129"] * 2
    for name in ("a", "b"):
        wait_until_gone(read_plan(here / name).job_id)


@pytest.mark.extended
def test_a_running_job_is_followed_asked_and_stopped(here):
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_by_hand, ASLEEP, HELLO.replace("done()", "time.sleep(600)"), on_line=[].append)
        job = wait_until(lambda: next((job for job in jaxrun.jobs() if len(job.ranks) == 2), None))
        assert next(line.text for line in job.lines(ranks=[1], follow=True)) == "hello 1"
        assert job.running and job.state == "running" and job.exit_code is None and job.headline == ""
        assert "ranks" in job.stacks() and job.goodput is None
        with pytest.raises(TimeoutError):
            job.wait(0.01)
        verdict = job.stop(now=True)
        assert verdict == job.wait() == running.result(TIME_LIMIT).verdict and verdict.exit_code == 129
    with pytest.raises(jaxrun.UsageError, match="is over"):
        job.stop()


# ---- scripts

SCRIPT = """
import os, signal, sys, threading, time
import jaxrun

def asleep(line):
    if "asleep" in line:
        if len(sys.argv) > 1 and not os.fork():  # a fork that outlives its parent
            os.close(1)
            os.read(0, 1)
            os._exit(0)
        print("asleep", flush=True)

def run():
    try:
        return jaxrun.run(["by_hand.py", {code!r}], processes=1, no_fork=True, grace=0.1, run_dir="run", on_line=asleep)
    except KeyboardInterrupt:
        print(jaxrun.Job("run").exit_code, flush=True)
        raise

{main}
"""
LISTENS = "signal.signal(signal.SIGINT, lambda *_: os._exit(5)); run(); print('asleep', flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("main", "signum", "code", "out"),
    [
        ("run()", signal.SIGINT, LISTENS, "130\n"),
        extended("run()", signal.SIGTERM, ASLEEP, ""),
        extended("run()", signal.SIGKILL, ASLEEP, ""),
        extended("sys.argv.append('fork'); run()", signal.SIGKILL, ASLEEP, ""),
        extended("threading.Thread(target=run, daemon=True).start(); sys.stdin.read()", None, ASLEEP, ""),
    ],
    ids=["Ctrl-C", "SIGTERM", "kill -9", "kill -9, with a fork", "the end, with a daemon thread"],
)
def test_no_job_outlives_the_process_that_runs_it(here, main, signum, code, out):
    command = [sys.executable, "-c", SCRIPT.format(code=code, main=main)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "asleep\n"
        job = jaxrun.Job("run")
        assert job.running and job.ranks[0].state == "running" and job.exit_code is None
        if signum is None:
            process.stdin.close()
        else:
            process.send_signal(signum)
        assert process.wait(TIME_LIMIT) == (0 if signum is None else -signum)
        assert process.stdout.read() == out
        wait_until_gone(read_plan(job.run_dir).job_id)


IN_A_TERMINAL = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import jaxrun

CODE = "run(); print('asleep', flush=True); time.sleep(600)"

def run(name):
    return jaxrun.run(["by_hand.py", CODE], processes=1, no_fork=True, grace=0.1, run_dir=name)

try:
    if len(sys.argv) == 1:
        run("a")
    else:
        with ThreadPoolExecutor(2) as threads:
            done = [threads.submit(run, name) for name in sys.argv[1:]]
            time.sleep(600)
except KeyboardInterrupt:
    print("\\nthen", *(each.result().exit_code for each in done) if sys.argv[1:] else "", flush=True)
    sys.exit(7)
"""


@pytest.mark.extended
@pytest.mark.parametrize(("names", "codes"), [((), ""), (("a", "b"), "130 130")], ids=["main thread", "two threads"])
def test_ctrl_c_in_a_terminal_ends_jobs_as_the_command_line_does(here, names, codes):
    (here / "script.py").write_text(IN_A_TERMINAL)
    with TerminalSession(here, *names, command=(sys.executable, "script.py")) as terminal:
        for _ in names or ("a",):
            terminal.wait_for("asleep")
        terminal.type("\x03")
        for _ in names or ("a",):
            terminal.wait_for("jaxrun: interrupted by Ctrl-C (SIGINT)")
        terminal.wait_for(f"then {codes}".strip())
        assert terminal.end() == 7
    for name in names or ("a",):
        assert jaxrun.Job(here / name).exit_code == 130
        wait_until_gone(read_plan(here / name).job_id)
