"""--stage on one machine: the ranks start from copies, which are read once and removed when nobody uses them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import extended, make_environment, started, wait_until

SHOWS = """
import os, sys
import helper
paths = sys.executable, sys.prefix, helper.__file__, os.environ["VIRTUAL_ENV"], sys.argv[0]
print("starts from", *paths, flush=True)
assert os.environ["JAXRUN_ATTEMPT"] == "2", "the first attempt fails"
"""


@pytest.fixture
def project(tmp_path):
    """A small environment and a program; returns the command that has jaxrun run in the one."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(SHOWS)
    (tmp_path / "src" / "helper.py").touch()
    (tmp_path / "local").mkdir()
    return make_environment(tmp_path / "env"), "-m", "jaxrun", "--run-dir", str(tmp_path / "run")


def staged(tmp_path):
    """The copies on the disk."""
    return [path for folder in (tmp_path / "local").iterdir() for path in folder.iterdir()]


@pytest.mark.extended
@pytest.mark.parametrize("options", [(), extended(("--no-fork",))], ids=["forked", "fresh"])
def test_the_ranks_of_all_attempts_start_from_the_copies(tmp_path, project, options):
    words = ("--stage=venv", "--stage=src", "--stage-dir=local", "-n2", "--max-restarts=1", *options, "src/train.py")
    env = {"VIRTUAL_ENV": str(tmp_path / "env")}
    with started(tmp_path, *words, command=project, env=env) as job:
        result = job.end()
    assert result.code == 0, result
    env_copy, src_copy = sorted(
        (f"{path}/copy" for path in staged(tmp_path)), key=lambda copy: not os.path.exists(f"{copy}/bin")
    )
    wanted = (f"{env_copy}/bin/python", env_copy, f"{src_copy}/helper.py", env_copy, f"{src_copy}/train.py")
    shown = f"starts from {' '.join(wanted)}\n"
    first, second = (
        [log.read_text() for log in folder.glob("rank-*.out")] for folder in (job.run_dir, job.run_dir / "attempt-2")
    )
    assert set(first) - {""} == {shown}  # the rank that fails last may be stopped before it shows anything
    assert second == [shown] * 2
    assert result.err.count(" once: ") == 2
    top = Path(__file__).parents[2]
    assert "not staged, and read where they are: " in result.err and str(top / "launcher") in result.err


def test_a_second_launch_reads_nothing_and_clean_removes_what_no_job_uses(tmp_path, project):
    (tmp_path / "src" / "wait.py").write_text("print('runs', flush=True)\nimport sys\nsys.stdin.read()\n")
    words = ("--stage", "src", "--stage-dir", "local", "-n", "1", "-m", "wait")
    clean = [*project[:3], "clean", "--staged", "--stage-dir", str(tmp_path / "local")]

    def cleaned():
        return subprocess.run(clean, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    env = {"PYTHONPATH": str(tmp_path / "src")}
    with started(tmp_path, *words, command=project, env=env, stdin=subprocess.PIPE) as job:
        job.wait_for_output("runs")
        assert cleaned() == f"deleted 0 of 1 copy in {tmp_path}/local/jaxrun-stage-{os.geteuid()}\n"
        result = job.end()
    assert result.code == 0 and " once: " in result.err, result
    with started(tmp_path, *words[:-1], "wait", command=(*project[:4], str(tmp_path / "again")), env=env) as job:
        result = job.end()
    assert result.code == 0 and " once: " not in result.err, result
    assert cleaned().startswith("deleted 1 of 1 copy") and staged(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--stage", "nowhere"), "--stage nowhere: {here}/nowhere is not a directory that can be copied"),
        (
            ("--stage", "src/train.py"),
            "--stage src/train.py: {here}/src/train.py is not a directory that can be copied",
        ),
        (("--stage", "/"), "--stage /: / is not a directory that can be copied"),
    ],
)
def test_what_cannot_be_copied_is_refused_and_nothing_is_made(tmp_path, project, options, text):
    with started(tmp_path, *options, "--stage-dir", "local", "-n", "1", "src/train.py", command=project) as job:
        result = job.end()
    assert (result.code, result.out, result.err) == (2, "", f"jaxrun: {text.format(here=tmp_path)}\n")
    assert not job.run_dir.exists() and staged(tmp_path) == []


def test_without_an_environment_venv_names_none(tmp_path, project):
    real = os.path.realpath(sys.executable)
    env = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    command = (real, "-m", "jaxrun")
    with started(tmp_path, "--stage", "venv", "-n", "1", "src/train.py", command=command, env=env) as job:
        result = job.result()
    assert result.code == 2 and "--stage venv, but jaxrun runs in no virtual environment" in result.err, result


def test_others_cannot_have_made_the_directory_of_the_copies(tmp_path, project):
    (tmp_path / "local" / f"jaxrun-stage-{os.geteuid()}").mkdir(0o777)
    (tmp_path / "local" / f"jaxrun-stage-{os.geteuid()}").chmod(0o777)
    with started(tmp_path, "--stage", "src", "--stage-dir", "local", "-n", "1", "src/train.py", command=project) as job:
        result = job.end()
    assert result.code == 69 and "it is not this user's alone: root, 0777: '" in result.err, result


@pytest.mark.parametrize("is_default", [False, True], ids=["--stage-dir", "TMPDIR"])
def test_others_cannot_replace_the_directory_of_the_copies(tmp_path, project, is_default):
    (below := tmp_path / "local" / "mine").mkdir()
    (tmp_path / "local").chmod(0o777)
    where, env = ((), {"TMPDIR": str(below)}) if is_default else (("--stage-dir", str(below)), {})
    with started(tmp_path, "--stage", "src", *where, "-n", "1", "src/train.py", command=project, env=env) as job:
        result = job.end()
    assert result.code == 69 and f"everybody can write to {tmp_path}/local (mode 0777)" in result.err, result
    assert list(below.iterdir()) == []


MAKES = """
import os, sys
from pathlib import Path
from jaxrun.node.staging.copies import Copies
for number in range(int(sys.argv[2])):
    sys.stdin.readline()  # all at the same time
    copies = Copies(sys.argv[1])
    def write(draft):
        os.mkdir(f"{draft}/copy")
        return f"copy-{number}-{int(sys.argv[3]) // 2}"
    name = copies.find_listing(f"listing-{number}") or copies.add(1, write, f"listing-{number}")
    print(copies.find(name) is not None, flush=True)
    for lock in copies._locks.values():  # it may be removed from now on
        os.close(lock)
    copies._locks.clear()
"""


def test_jobs_that_start_together_all_have_their_copies(tmp_path):
    (base := tmp_path / "local").mkdir()
    words = [sys.executable, "-c", MAKES, str(base), str(rounds := 30)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    makers = [subprocess.Popen([*words, str(number)], **pipes) for number in range(6)]
    try:
        for _ in range(rounds):
            for maker in makers:
                print(file=maker.stdin, flush=True)
            assert [maker.stdout.readline() for maker in makers] == ["True\n"] * len(makers)
        assert [maker.communicate(timeout=60) for maker in makers] == [("", "")] * len(makers)
    finally:
        for maker in makers:
            maker.kill()
            maker.communicate()
    assert staged(tmp_path) and not any(path.name.startswith(".") for path in staged(tmp_path))


@pytest.mark.extended
def test_ctrl_c_while_a_directory_is_read_leaves_nothing(tmp_path, project):
    with open(tmp_path / "src" / "large", "wb") as file:
        file.truncate(2**34)  # bytes, which take no room as long as they are not copied
    words = ("--stage", "src", "--stage-dir", "local", "-n", "1", "src/train.py")
    with started(tmp_path, *words, command=project) as job:
        wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("local/*/*/copy/large")))
        job.process.send_signal(signal.SIGINT)
        result = job.end()
    assert result.code == 130 and staged(tmp_path) == [], result
