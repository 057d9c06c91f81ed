"""The command as a process of its own: what it refuses, what a shell or a doctor needs of it, what callers may lack."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from harness import TIME_LIMIT, jaxrun, make_environment

from jaxrun.frontends.doctor.start import fixed_fault_handler
from jaxrun.protocol.worker_command import runtime_directory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    (tmp_path / "unreadable.py").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "verdict.json").write_text("{}")
    (tmp_path / "good.env").write_text("A=1\n# a remark\nexport B='two words'\n")
    return tmp_path


def run(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxrun", *arguments],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        timeout=TIME_LIMIT,
        errors="surrogateescape",
    )


def test_bad_input_is_one_clear_message_and_nothing_else(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = run(folder, "--run-dir", "used", "train.py")
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("jaxrun: --run-dir used is not empty: it holds another job")
    assert done.stderr.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


def test_a_program_that_may_not_be_read_is_refused(folder: Path) -> None:
    (folder / "unreadable.py").chmod(0)
    command = [sys.executable, "-m", "jaxrun", "-n", "2", "unreadable.py"]
    if os.getuid() == 0:  # whom no mode stops, unless it is without that privilege
        command[:0] = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "unreadable.py" in done.stderr and "Traceback" not in done.stderr


def test_names_that_are_no_unicode_and_variables_from_a_file_pass_through_the_command(folder: Path) -> None:
    name = os.fsdecode(b"\xff\xfe.py")
    (folder / name).write_text("")
    words = ("--dry-run", "--env-file", "good.env", name, os.fsdecode(b"\xe4"))
    done = run(folder, *words, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{sys.executable} {runtime_directory()} '{name}' '{os.fsdecode(bytes([0xE4]))}'\n")
    assert "B='two words'" in done.stdout


def test_a_reader_that_leaves_early_causes_no_traceback() -> None:
    script = f"{sys.executable} -m jaxrun --help-all | head -n 1"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=TIME_LIMIT)
    assert (done.stdout, done.stderr) == ("Usage: jaxrun [OPTIONS] PROGRAM [ARGS]...\n", "")


@pytest.mark.extended
def test_the_doctor_examines_two_processes_of_this_machine_and_leaves_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = run(folder, "doctor", "-n", "2", "--json", JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    content = json.loads(done.stdout)
    checks = {found["check"]: found["text"] for found in content["findings"]}
    assert checks["start"].startswith("2 processes joined") and checks["devices"].startswith("2 processes")
    assert list(content["hosts"]) == [os.uname().nodename]
    timings = {(one["collective"], one["size"] >= 2**20) for one in content["collectives"]}
    assert {("psum", False), ("all_gather", True), ("ppermute", True)} <= timings
    assert all(one["bytes_per_s"] > 0 for one in content["collectives"])
    assert sorted(folder.rglob("*")) == before


def test_to_the_doctor_a_job_that_cannot_start_is_a_failure_with_the_reason(folder: Path) -> None:
    (folder / "jax.py").write_text("raise ImportError('no jax today')\n")
    path = os.pathsep.join((str(folder), *filter(None, sys.path)))
    done = run(folder, "doctor", JAX_PLATFORMS="cpu", PYTHONPATH=path)
    assert done.returncode == 69, done.stdout
    assert "FAIL  start" in done.stdout and "no jax today" in done.stdout
    warning = " and 1 warning" if fixed_fault_handler(platform.python_version()) else ""
    assert done.stdout.splitlines()[-1] == f"jaxrun doctor: 1 failure{warning}"


CLOSED = {"stdin": "0<&-", "stdout": ">&-", "stderr": "2>&-", "both outputs": ">&- 2>&-", "all": "0<&- >&- 2>&-"}
NO_IPV4 = "ip link set lo up; ip address delete 127.0.0.1/8 dev lo"
NO_IPV6 = "sysctl -qw net.ipv6.conf.all.disable_ipv6=1"
COMMAND = (sys.executable, "-m", "jaxrun")
SUM = ["-m", "jaxrun_runtime.programs.selfcheck"]


def run_shell(tmp_path: Path, text: str, *words: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit status, output and errors of `WORDS` as "$@" in this shell script."""
    done = subprocess.run(
        ["sh", "-c", text, "sh", *words],
        cwd=tmp_path,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def own_namespaces() -> None:
    """Skips where no namespaces can be made."""
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this takes namespaces of its own (scripts/test has them as root)")


# ---- standard streams


@pytest.mark.extended
@pytest.mark.parametrize("closed", CLOSED.values(), ids=CLOSED)
def test_a_command_whose_caller_has_closed_streams_ends_as_it_would(tmp_path: Path, closed: str) -> None:
    script = f'for words in --version none.py; do "$@" $words {closed}; echo $? >> status; done'
    status, out, err = run_shell(tmp_path, script, *COMMAND)
    assert (status, (tmp_path / "status").read_text()) == (0, "0\n2\n")
    assert (out.startswith("jaxrun ") and out.count("\n") == 1) if ">&-" not in closed.split() else out == ""
    assert (err.count("\n") == 1 and "program 'none.py' does not exist" in err) if "2>&-" not in closed else err == ""


@pytest.mark.extended
def test_a_job_whose_caller_has_closed_streams_runs(tmp_path: Path) -> None:
    words = (*COMMAND, "--run-dir", "run", "-n", "1", *SUM)
    assert run_shell(tmp_path, f'"$@" {CLOSED["all"]}', *words) == (0, "", "")
    assert "are right on 1 device(s)" in (tmp_path / "run" / "rank-0000.out").read_text()


# ---- loopback addresses


@pytest.mark.extended
@pytest.mark.usefixtures("own_namespaces")
def test_without_an_ipv4_loopback_address_the_ranks_meet_at_the_other(tmp_path: Path) -> None:
    words = ("unshare", "--net", "sh", "-c", f'{NO_IPV4}; exec "$@"', "sh", *COMMAND, "-n", "2", *SUM)
    status, out, err = run_shell(tmp_path, 'exec "$@"', *words)
    assert status == 0 and "are right on 2 device(s)" in out, err


@pytest.mark.usefixtures("own_namespaces")
@pytest.mark.parametrize("setup", ["true", f"{NO_IPV6}; {NO_IPV4}"], ids=["down", "none"])
def test_without_any_loopback_address_nothing_is_made_and_a_sentence_says_why(tmp_path: Path, setup: str) -> None:
    words = ("unshare", "--net", "sh", "-c", f'{setup}; exec "$@"', "sh", *COMMAND, "-n", "2", *SUM)
    status, out, err = run_shell(tmp_path, 'exec "$@"', *words)
    assert (status, out) == (69, "")
    assert err.startswith("jaxrun: this machine reaches itself neither at 127.0.0.1 nor at ::1")
    assert err.count("\n") == 1 and list(tmp_path.iterdir()) == []


# ---- system files


@pytest.mark.usefixtures("own_namespaces")
@pytest.mark.parametrize(("hidden", "missing"), [("/dev", "/dev/null"), ("/proc", "/proc/self/stat")])
def test_without_proc_or_the_null_device_a_sentence_says_so(tmp_path: Path, hidden: str, missing: str) -> None:
    words = (
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs none {hidden}; exec "$@"',
        "sh",
        *COMMAND,
        "-n",
        "1",
        *SUM,
    )
    status, out, err = run_shell(tmp_path, 'exec "$@"', *words)
    assert (status, out, err.count("\n")) == (69, "", 1), err
    assert err.startswith(f"jaxrun: {missing} is not there") and list(tmp_path.iterdir()) == []


# ---- bytes that are no text


@pytest.mark.extended
def test_bytes_that_are_no_utf8_arrive_in_program_and_arguments(tmp_path: Path) -> None:
    odd = os.fsdecode(b"a\xff")
    (tmp_path / f"{odd}.py").write_text(
        "import os, sys\nprint(os.environb[b'ODD'], ascii(sys.argv[1]), os.environb[b'X'])"
    )
    result = jaxrun(tmp_path, "-n", "1", "--env", f"X={odd}", f"{odd}.py", odd, env={"ODD": odd})
    assert (result.code, result.out) == (0, "[0] b'a\\xff' 'a\\udcff' b'a\\xff'\n"), result
    assert result.verdict()["exit_code"] == 0


# ---- a full disk


def test_a_module_that_another_python_at_hand_has_is_named_with_that_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import onlythere.part\n")
    python = Path(make_environment(tmp_path / "env"))
    (packages,) = (tmp_path / "env").glob("lib/*/site-packages")
    (packages / "onlythere").mkdir()
    for name in ("__init__", "__main__", "part"):
        (packages / "onlythere" / f"{name}.py").touch()
    slow = tmp_path / "slow" / "bin" / "python"  # one that fails is passed over
    slow.parent.mkdir(parents=True)
    slow.write_text("#!/bin/sh\nexit 1\n")
    slow.chmod(0o755)
    environ = {"VIRTUAL_ENV": str(tmp_path / "slow"), "PATH": f"{python.parent}:{os.environ['PATH']}"}
    failed = jaxrun(tmp_path, "-n", "1", "train.py", env=environ)
    refused = run(tmp_path, "-m", "onlythere", **environ)
    assert (failed.code, refused.returncode) == (1, 2), (failed, refused)
    for text in (failed.err, refused.stderr):
        words = " ".join(text.split())
        assert f", but for {python}." in words and "start the job with that Python: python -m jaxrun …" in words, text
