"""The output on the terminal and in the log files of real jobs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import resource
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from harness import jaxrun, started


def write(tmp_path: Path, text: str) -> str:
    program = tmp_path / "program.py"
    program.write_text(text)
    return str(program)


def test_every_line_has_its_rank_and_each_stream_its_file(tmp_path: Path) -> None:
    code = "import sys, jax\nfor i in range(3):\n    print('line', i)\nprint('oops', file=sys.stderr)\n"
    result = jaxrun(tmp_path, "-n", "2", write(tmp_path, code))
    assert result.code == 0
    for rank in range(2):
        assert [line for line in result.out.splitlines() if line.startswith(f"[{rank}]")] == [
            f"[{rank}] line {i}" for i in range(3)
        ]
        assert f"[{rank}] oops" in result.err.splitlines()
        assert (result.run_dir / f"rank-{rank:04d}.out").read_text().endswith("line 0\nline 1\nline 2\n")
        assert (result.run_dir / f"rank-{rank:04d}.err").read_text() == "oops\n"
    # A good run says little.
    first, where, *between, last = (line for line in result.err.splitlines() if line.startswith("jaxrun"))
    assert all(re.match("jaxrun: (starting|joining)", line) for line in between)  # on a busy machine
    assert len(result.err.splitlines()) == 5 + len(between) and len(result.out.splitlines()) == 6
    assert (first, where) == ("jaxrun: 2 processes x 1 device (cpu) on this machine", "jaxrun: run dir run")
    assert re.fullmatch(r"jaxrun: done in \d+\.\d+ s \(start-up \d+\.\d+ s\)", last)


def test_on_a_terminal_the_screen_has_its_width_and_colours(tmp_path: Path) -> None:
    code = "import jax\nraise ValueError('Array has been deleted, ' + 20_000 * 'x' + ' the end')\n"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
    terminal = {"TERM": "xterm", "NO_COLOR": ""}
    with started(tmp_path, "-n", "1", write(tmp_path, code), env=terminal, stdout=theirs, stderr=theirs) as job:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal open any more
            while data := os.read(ours, 10_000):
                shown += data
        os.close(ours)
        job.process.wait()
    screen = shown.decode().replace("\r\n", "\n")
    assert re.search(r"\n\x1b\[1;31mrank 0 of 1 raised ValueError .* into the run\.\x1b\[0m\n", screen)
    assert "\n\x1b[2magain: jaxrun explain run\x1b[0m\n\x1b[2mexit 1\x1b[0m\n" in screen
    prose = screen.partition(" into the run.")[2]
    assert "what this means:" in prose and "\ntry: " in prose
    assert max(len(line) for line in prose.splitlines() if "\x1b" not in line and "://" not in line) <= 60
    assert len(screen) < 12_000 and "characters left out, which run/rank-0000.err holds" in screen
    assert " the end" in screen and "x" * 20_000 + " the end" in (tmp_path / "run" / "rank-0000.err").read_text()


def test_quiet_ranks_are_not_printed_but_logged(tmp_path: Path) -> None:
    program = write(tmp_path, "import jax\nprint('I am', jax.process_index())\n")
    result = jaxrun(tmp_path, "-n", "2", "--only-rank", "1", program)
    assert result.out == "[1] I am 1\n"
    assert "I am 0" in (result.run_dir / "rank-0000.out").read_text()
    quiet = jaxrun(tmp_path / "..", "--run-dir", str(tmp_path / "quiet"), "-n", "2", "--quiet-ranks", "1", program)
    assert quiet.out == "[0] I am 0\n"


def test_bytes_are_preserved(tmp_path: Path) -> None:
    code = (
        "import sys\nout = sys.stdout.buffer\n"
        r"out.write(b'\xff\xfe not utf-8 \x00\n' + b'bar   1%\rbar 100%\n' + b'no newline'); out.flush()"
        "\n"
    )
    with started(tmp_path, "-n", "1", write(tmp_path, code)) as job:
        out = job.process.stdout.buffer.read()  # type: ignore[union-attr]
        job.process.wait()
    assert out == b"[0] \xff\xfe not utf-8 \x00\n[0] bar 100%\n[0] no newline\n"
    log = (job.run_dir / "rank-0000.out").read_bytes()
    assert log.endswith(b"\xff\xfe not utf-8 \x00\nbar   1%\rbar 100%\nno newline")


def test_a_slow_reader_stalls_nobody_and_loses_nothing(tmp_path: Path) -> None:
    lines = 100_000
    code = f"for i in range({lines}):\n    print('line', i)\nopen('ended', 'w').close()\n"
    with started(tmp_path, "-n", "1", write(tmp_path, code)) as job:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ended").exists():  # nobody has read a byte of its output yet
            assert time.monotonic() < deadline and job.process.poll() is None
            time.sleep(0.05)
        result = job.result()
    assert result.code == 0
    assert result.out.splitlines() == [f"[0] line {i}" for i in range(lines)]


def test_a_closed_stdout_ends_the_output_not_the_job(tmp_path: Path) -> None:
    code = "for i in range(50_000):\n    print('line', i)\nopen('ended', 'w').close()\n"
    command = [sys.executable, "-m", "jaxrun", "--run-dir", str(tmp_path / "run"), "-n", "1", write(tmp_path, code)]
    piped = subprocess.run(
        ["bash", "-c", '"$@" | head -n 3; echo "codes ${PIPESTATUS[*]}"', "bash", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert piped.stdout.splitlines()[-1] == "codes 0 0"
    assert (tmp_path / "ended").exists()
    assert "line 49999" in (tmp_path / "run" / "rank-0000.out").read_text()


@pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning")  # where jax has been imported into pytest
def test_a_full_disk_costs_logs_and_never_the_job(tmp_path: Path) -> None:
    code = "for i in range(40_000):\n    print('line', i)\n"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # noqa: E731
    result = jaxrun(tmp_path, "-n", "2", write(tmp_path, code), preexec_fn=limit)
    assert result.code == 0, result.err
    assert result.out.count("\n") == 80_000
    assert result.err.count("cannot write") == 1


def test_without_a_run_directory_nothing_is_left_behind(tmp_path: Path) -> None:
    program = write(tmp_path, "import jaxrun_runtime as jr\nprint(jr.run_dir)\n")
    command = [sys.executable, "-m", "jaxrun", "-n", "2", "--no-run-dir", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.count("None") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_the_default_run_directory_is_named_for_the_program_and_latest_points_to_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jaxrun", "-n", "1", write(tmp_path, "print('x')\n")]
    for _ in range(2):
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    runs = sorted(path.name for path in (tmp_path / "jaxrun-runs").iterdir())
    assert len(runs) == 4 and runs[0] == ".gitignore" and runs[-1] == "latest"
    assert all(re.fullmatch(r"\d{4}-\d{4}-program(-2)?", run) for run in runs[1:3])
    assert os.readlink(tmp_path / "jaxrun-runs" / "latest") in runs


def test_strange_names_and_arguments_arrive_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "a b 'c' \"d\" ü\nnew"
    folder.mkdir()
    program = folder / "pro gram.py"
    program.write_text("import sys\nprint(ascii(sys.argv[1:]))\n")
    arguments = ["", " ", "'", '"', "\n", "ü", "$HOME", "*", "--help", "-n"]
    result = jaxrun(tmp_path, "-n", "1", str(program), *arguments)
    assert result.code == 0, result.err
    assert ascii(arguments) in result.out
