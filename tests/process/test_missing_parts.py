"""What most machines and callers have, and some lack: standard streams, a loopback address, room for files, UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import TIME_LIMIT, extended, jaxrun

CLOSED = {"stdin": "0<&-", "stdout": ">&-", "stderr": "2>&-", "both outputs": ">&- 2>&-", "all": "0<&- >&- 2>&-"}
NO_IPV4 = "ip link set lo up; ip address delete 127.0.0.1/8 dev lo"
NO_IPV6 = "sysctl -qw net.ipv6.conf.all.disable_ipv6=1"
SUM = ["-m", "jaxrun_runtime.programs.selfcheck"]
GANG = """
import jaxrun, os, sys
with jaxrun.Gang(2, platform="cpu") as gang:
    ranks = list(gang.run(eval, "print('said') or __import__('jax').process_index()"))
    with open("result", "w") as file:
        print(ranks, file=file)
"""


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


@pytest.mark.parametrize("closed", CLOSED.values(), ids=CLOSED)
def test_a_command_whose_caller_has_closed_streams_ends_as_it_would(tmp_path: Path, closed: str) -> None:
    command = f'"$@" {closed}'
    words = (sys.executable, "-m", "jaxrun")
    status, out, err = run_shell(tmp_path, command, *words, "--version")
    assert (status, err) == (0, "") and (">&-" in closed.split()) != ("jaxrun" in out)
    status, out, err = run_shell(tmp_path, command, *words, "-n", "2", "none.py")
    assert (status, out) == (2, "") and ("2>&-" in closed) != ("program 'none.py' does not exist" in err)


@pytest.mark.parametrize(
    "closed",
    [
        extended(CLOSED["stdin"], id="stdin"),
        extended(CLOSED["stderr"], id="stderr"),
        pytest.param(CLOSED["all"], id="all"),
    ],
)
def test_a_job_whose_caller_has_closed_streams_runs(tmp_path: Path, closed: str) -> None:
    words = (sys.executable, "-m", "jaxrun", "--run-dir", "run", "-n", "2", *SUM)
    status, out, err = run_shell(tmp_path, f'"$@" {closed}', *words)
    assert status == 0, err
    assert (">&-" in closed.split()) != ("are right on 2 device(s)" in out)
    assert ("2>&-" in closed) != ("jaxrun: done" in err) and "Traceback" not in err
    assert "are right on 2 device(s)" in (tmp_path / "run" / "rank-0000.out").read_text()


@pytest.mark.extended
@pytest.mark.parametrize("name", ["stderr", "all"])
def test_a_gang_of_a_process_that_has_closed_its_streams_works(tmp_path: Path, name: str) -> None:
    closed = CLOSED[name]
    status, out, err = run_shell(tmp_path, f'"$@" {closed}', sys.executable, "-c", GANG)
    assert status == 0, err
    assert (tmp_path / "result").read_text() == "[0, 1]\n"
    assert (">&-" in closed.split()) != ("[1] said" in out)


# ---- loopback addresses


@pytest.mark.usefixtures("own_namespaces")
def test_without_an_ipv4_loopback_address_the_ranks_meet_at_the_other(tmp_path: Path) -> None:
    script = f'{NO_IPV4}; exec "$@"'
    words = ("unshare", "--net", "sh", "-c", script, "sh", sys.executable, "-m", "jaxrun", "-n", "2")
    status, out, err = run_shell(tmp_path, 'exec "$@"', *words, *SUM)
    assert status == 0 and "are right on 2 device(s)" in out, err


@pytest.mark.usefixtures("own_namespaces")
@pytest.mark.parametrize("setup", ["true", f"{NO_IPV6}; {NO_IPV4}"], ids=["down", "none"])
def test_without_any_loopback_address_nothing_is_made_and_a_sentence_says_why(tmp_path: Path, setup: str) -> None:
    words = ("unshare", "--net", "sh", "-c", f'{setup}; exec "$@"', "sh", sys.executable, "-m", "jaxrun", "-n", "2")
    status, out, err = run_shell(tmp_path, 'exec "$@"', *words, *SUM)
    assert (status, out) == (69, "")
    assert (
        err.startswith("jaxrun: this machine reaches itself neither at 127.0.0.1 nor at ::1") and err.count("\n") == 1
    )
    assert list(tmp_path.iterdir()) == []


# ---- bytes that are no text


def test_bytes_that_are_no_utf8_arrive_in_program_and_arguments(tmp_path: Path) -> None:
    odd = os.fsdecode(b"a\xff")
    (tmp_path / f"{odd}.py").write_text(
        "import os, sys\nprint(os.environb[b'ODD'], ascii(sys.argv[1]), os.environb[b'X'])"
    )
    result = jaxrun(tmp_path, "-n", "1", "--env", f"X={odd}", f"{odd}.py", odd, env={"ODD": odd})
    assert (result.code, result.out) == (0, "[0] b'a\\xff' 'a\\udcff' b'a\\xff'\n"), result
    assert result.verdict()["exit_code"] == 0


# ---- a full disk


@pytest.mark.extended
@pytest.mark.usefixtures("own_namespaces")
def test_where_a_reader_is_stuck_and_the_temporary_directory_is_full_no_output_is_lost(tmp_path: Path) -> None:
    """More than memory and directory take: the ranks wait until somebody reads."""
    full = tmp_path / "full"
    full.mkdir()
    program = tmp_path / "writes.py"
    program.write_text(
        "import sys\nfor _ in range(20):\n    sys.stdout.write(('x' * 1023 + '\\n') * 1024)\nprint('end')"
    )
    script = f'mount -t tmpfs -o size=1m tmpfs {full}; exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", "jaxrun", "--run-dir", "run"]
    with subprocess.Popen(
        [*words, "-n", "1", str(program)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(full)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        log, size = tmp_path / "run" / "rank-0000.out", -1
        while not log.exists() or size != (size := log.stat().st_size) or size < 2**20:  # until it stands still
            assert process.poll() is None, process.communicate()
            time.sleep(1.0)
        assert size < 20 * 2**20
        out, err = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 0, err
    assert out == (b"[0] " + b"x" * 1023 + b"\n") * 1024 * 20 + b"[0] end\n"
