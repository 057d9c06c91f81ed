"""Limits that a job would exceed are told before anything is made; what the machine runs out of later, in one line."""

import errno
import resource

import pytest

from jaxrun.cli.main import main
from jaxrun.errors import UsageError, describe_shortage
from jaxrun.job.job import Job
from jaxrun.job.plan import LaunchCommand, Plan, Worker
from jaxrun.supervisor.resource_limits import check_limits


def _plan(size, *, remote=False):
    return Plan(
        job=Job(program=("p",)),
        job_id="ab" * 16,
        workers=tuple(Worker(rank, rank, size, "h1") for rank in range(size)),
        argv=("python", "-m", "jaxrun_runtime", "p"),
        set_env={},
        unset_env=(),
        local_devices=None,
        device_names=(),
        fork=True,
        launch_command=LaunchCommand("slurm", "srun", ("srun",)) if remote else None,
    )


@pytest.fixture
def limits(monkeypatch):
    """limits(SOFT, HARD) sets the limit of open files that is seen; returns those that are set then."""
    made = []

    def pretend(soft, hard):
        monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda which, pair: made.append(pair))
        return made

    return pretend


@pytest.mark.parametrize(
    ("size", "remote", "soft", "hard", "made"),
    [
        (4, False, 1024, 4096, []),
        (100, False, 1024, 4096, [(1264, 4096)]),
        (100, False, 1024, 1100, [(1100, 1100)]),  # enough for those that run
        (100, False, 1024, resource.RLIM_INFINITY, [(1264, resource.RLIM_INFINITY)]),
        (100, False, resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
        (1000, True, 1024, 4096, [(3064, 4096)]),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_needed(limits, size, remote, soft, hard, made):
    found = limits(soft, hard)
    check_limits(_plan(size, remote=remote))
    assert found == made


@pytest.mark.parametrize(
    ("size", "remote", "message"),
    [
        (1000, False, "-n 1000 takes 7000 open files at least, but only 4096 are allowed here; start fewer"),
        (2000, True, "2000 agents take 6000 open files at least, but only 4096 are allowed here"),
    ],
)
def test_a_limit_that_cannot_be_raised_is_told(limits, size, remote, message):
    made = limits(1024, 4096)
    with pytest.raises(UsageError, match=message):
        check_limits(_plan(size, remote=remote))
    assert not made


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("raise SystemExit('this program must not run')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return tmp_path


def test_more_processes_than_the_machine_can_run_leave_nothing_behind(here, monkeypatch, tmp_path, capsys):
    (tmp_path / "pid_max").write_text("32768\n")
    monkeypatch.setattr("jaxrun.supervisor.resource_limits._SYSTEM_LIMITS", (str(tmp_path / "pid_max"),))
    before = sorted(here.iterdir())
    assert main(["-n", "9999", "train.py"]) == 2
    assert "-n 9999 takes 39996 threads at least, but this machine runs no more than 32768" in capsys.readouterr().err
    assert main(["-n", "99999999", "train.py"]) == 2
    assert "-n/--processes must be 1000000 or less, not 99999999" in capsys.readouterr().err
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("words", [("train.py",), ("attach", "train.py"), ("explain",), ("stacks",)])
def test_a_deleted_working_directory_is_told(tmp_path, monkeypatch, capsys, words):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("jaxrun: the working directory has been deleted; go to one that is there")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.EMFILE, "Too many open files", "/x"),
            "open files (/x); raise the limit: ulimit -n 65536",
        ),
        (
            OSError(errno.EAGAIN, "Resource temporarily unavailable"),
            "No more processes can be started; raise",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory; start fewer processes with -n"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; make room, or"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system; make room, or let the job leave"),
        (RuntimeError("can't start new thread"), "no more threads can be started here"),
    ],
)
def test_what_the_machine_lacks_ends_the_command_in_one_line(here, monkeypatch, capsys, error, words):
    def fail(plan, environ, early_server):
        raise error

    monkeypatch.setattr("jaxrun.supervisor.run.run", fail)
    assert main(["train.py"]) == 69
    printed = capsys.readouterr().err
    assert words in printed and printed.count("\n") == 1


@pytest.mark.parametrize("error", [OSError(errno.EBADF, "Bad file descriptor"), RuntimeError("dead"), ValueError("x")])
def test_an_error_of_another_kind_keeps_its_traceback(here, monkeypatch, error):
    def fail(plan, environ, early_server):
        raise error

    monkeypatch.setattr("jaxrun.supervisor.run.run", fail)
    assert describe_shortage(error) == ""
    with pytest.raises(type(error)):
        main(["train.py"])
