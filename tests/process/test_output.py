"""The output of real jobs on the terminal and in the log files, and what their ranks read as standard input."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from harness import TIME_LIMIT, extended, jaxrun, started, write_fake_runtime
from terminals import TerminalSession

from jaxrun.records.output.output import Output
from jaxrun.records.output.repeated_lines import HOLD_S


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
    assert all(re.match("jaxrun: (starting|joining|waiting for)", line) for line in between)  # on a busy machine
    assert len(result.err.splitlines()) == 5 + len(between) and len(result.out.splitlines()) == 6
    assert (first, where) == ("jaxrun: 2 processes x 1 device (cpu) on this machine", "jaxrun: run dir run")
    assert re.fullmatch(r"jaxrun: done in \d+\.\d+ s \(start-up \d+\.\d+ s\)", last)


@pytest.mark.extended
def test_the_usage_error_of_all_ranks_is_shown_once_before_how_the_job_ended(tmp_path: Path) -> None:
    code = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nparser.parse_args()\n"
    result = jaxrun(tmp_path, "-n", "3", write(tmp_path, code), "--bogus")
    screen, _, verdict = result.err.partition("jaxrun: ranks 0-2 failed")
    assert result.code == 2 and "3 of 3 ranks ended with status 2" in verdict
    lines = [line for line in screen.splitlines() if line.startswith("[")]
    assert lines[0] == "[0-2] usage: program.py [-h] [--lr LR]" and len(lines) == 2
    assert lines[1].startswith("[0-2] program.py: error: unrecognized arguments: --bogus")
    assert (result.run_dir / "rank-0001.err").read_text().startswith("usage: program.py")


@pytest.mark.extended
def test_on_a_terminal_the_screen_has_its_width_and_colours(tmp_path: Path) -> None:
    message = "'spans non-addressable (non process local) devices, ' + 20_000 * 'x' + ' the end'"
    code = f"import jax\nraise ValueError({message})\n"
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
    assert "\n\x1b[2mdetails: jaxrun explain run\x1b[0m\n\x1b[2mexit 1\x1b[0m\n" in screen
    prose = screen.partition(" into the run.")[2]
    assert "what this means:" in prose and "\ntry: " in prose
    assert max(len(line) for line in prose.splitlines() if "\x1b" not in line and "://" not in line) <= 60
    assert len(screen) < 12_000 and "characters left out, which run/rank-0000.err holds" in screen
    assert " the end" in screen and "x" * 20_000 + " the end" in (tmp_path / "run" / "rank-0000.err").read_text()


PRINTS = (
    "run(); print([os.environ.get(name) for name in ('FORCE_COLOR', 'TTY_INTERACTIVE')], end=' '); "
    "print(chr(27) + '[31mred' + chr(27) + '[2A'); done()"
)


@pytest.mark.parametrize(
    ("environ", "found"),
    [({}, ["1", "0"]), extended({"NO_COLOR": "1"}, [None, None]), extended({"FORCE_COLOR": "0"}, ["0", None])],
)
def test_programs_are_told_that_a_terminal_shows_colours_and_logs_have_what_they_print(
    tmp_path: Path, environ: dict[str, str], found: list[str | None]
) -> None:
    environ = {**write_fake_runtime(tmp_path), "TERM": "xterm", "NO_COLOR": "", **environ}
    words = ("-n", "1", "--run-dir", "run", "by_hand.py", PRINTS)
    with TerminalSession(tmp_path, *words, env=environ, size=(80, 24)) as terminal:
        assert terminal.end() == 0, terminal.text
    cursor = "\x1b[2A" * bool(environ["NO_COLOR"])
    assert f"{found} \x1b[31mred{cursor}\r\n" in terminal.raw, terminal.raw
    assert (tmp_path / "run" / "rank-0000.out").read_text() == f"{found} \x1b[31mred\x1b[2A\n"


@pytest.mark.extended
def test_ranks_that_are_not_shown_are_logged_and_strange_names_and_arguments_arrive_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "a b 'c' \"d\" ü\nnew"
    folder.mkdir()
    program = write(folder, "import sys, jax\nprint('I am', jax.process_index())\nprint(ascii(sys.argv[1:]))\n")
    arguments = ["", " ", "'", '"', "\n", "ü", "$HOME", "*", "--help", "-n"]
    result = jaxrun(tmp_path, "-n", "2", "--only-rank", "1", program, *arguments)
    assert result.out == f"[1] I am 1\n[1] {arguments!a}\n", result.err
    assert "I am 0\n" in (result.run_dir / "rank-0000.out").read_text()


@pytest.mark.extended
def test_a_slow_reader_stalls_nobody_and_every_byte_is_preserved(tmp_path: Path) -> None:
    lines = 100_000
    code = (
        f"import sys\nfor i in range({lines}):\n    print('line', i)\nsys.stdout.flush()\nout = sys.stdout.buffer\n"
        r"out.write(b'\xff\xfe not utf-8 \x00\n' + b'bar   1%\rbar 100%\n' + b'no newline'); out.flush()"
        "\nopen('ended', 'w').close()\n"
    )
    with started(tmp_path, "-n", "1", write(tmp_path, code)) as job:
        job.wait_until((tmp_path / "ended").exists, "end of the program")  # nobody has read a byte of its output yet
        out = job.process.stdout.buffer.read()  # type: ignore[union-attr]
        assert job.process.wait(TIME_LIMIT) == 0
    *shown, odd, bar, last = out.split(b"\n")[:-1]
    assert shown == [b"[0] line %d" % i for i in range(lines)]
    assert [odd, bar, last] == [b"[0] \xff\xfe not utf-8 \x00", b"[0] bar 100%", b"[0] no newline"]
    log = (job.run_dir / "rank-0000.out").read_bytes()
    assert log.endswith(b"\xff\xfe not utf-8 \x00\nbar   1%\rbar 100%\nno newline")


@pytest.mark.extended
def test_a_closed_stdout_ends_the_output_not_the_job(tmp_path: Path) -> None:
    """Beside that, its run directory has the name of the program, and `latest` points to it."""
    code = "for i in range(50_000):\n    print('line', i)\nopen('ended', 'w').close()\n"
    command = [sys.executable, "-m", "jaxrun", "-n", "1", write(tmp_path, code)]
    piped = subprocess.run(
        ["bash", "-c", '"$@" | head -n 3; echo "codes ${PIPESTATUS[*]}"', "bash", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert piped.stdout.splitlines()[-1] == "codes 0 0"
    assert (tmp_path / "ended").exists()
    ignored, numbers, run, latest = sorted(path.name for path in (tmp_path / "jaxrun-runs").iterdir())
    assert (ignored, numbers, latest) == (".gitignore", ".numbers", "latest")
    assert re.fullmatch(r"\d{4}-\d{4}-program", run)
    assert os.readlink(tmp_path / "jaxrun-runs" / "latest") == run
    assert "line 49999" in (tmp_path / "jaxrun-runs" / run / "rank-0000.out").read_text()


# ---- standard input


@pytest.mark.extended
def test_input_on_a_rank_without_standard_input_finds_nothing_to_read(tmp_path: Path) -> None:
    code = "try:\n    print('read', input('name? '))\nexcept EOFError as error:\n    print(error)\n"
    (tmp_path / "answers").write_text("Ada\n")
    with (tmp_path / "answers").open() as stdin:
        result = jaxrun(tmp_path, "-n", "2", "--stdin", "1", write(tmp_path, code), stdin=stdin)
    assert result.code == 0, result
    assert "[1] name? read Ada\n" in result.out
    assert "[0] name? EOF when reading a line\n" in result.out


def test_lines_of_several_ranks_are_grouped_and_prefixes_name_hosts_and_logs_have_every_line(tmp_path: Path) -> None:
    now = 10.0
    with open(tmp_path / "screen", "wb") as screen:
        fd = screen.fileno()
        output = Output(
            3, log_dir=tmp_path, stdout_fd=fd, stderr_fd=fd, clock=lambda: now, grouped=("err",), names_hosts=True
        )
        output.set_hosts(lambda: {0: "h1", 1: "h1", 2: "h2"})
        for rank in range(3):
            output.write(rank, "err", b"loading\n")
        output.write(2, "err", b"warning: shard 7 is empty\n")
        assert output.flush_due() == pytest.approx(HOLD_S)
        now += HOLD_S
        assert output.flush_due() is None
        output.write(1, "err", b"before\n")
        output.write(1, "out", b"after\n")  # which does not overtake
        assert output.close(5.0)
    shown = (tmp_path / "screen").read_text().splitlines()
    assert shown == ["[0-2] loading", "[2 h2] warning: shard 7 is empty", "[1 h1] before", "[1 h1] after"]
    assert (tmp_path / "rank-0002.err").read_text() == "loading\nwarning: shard 7 is empty\n"
