"""Output as a whole: from the workers' bytes to what arrives on stdout and stderr and in the log files."""

import fcntl
import os
import pty
import struct
import termios
import time

import pytest
from simulation import Clock

from jaxrun.controller.supervisor.job_report import open_output
from jaxrun.protocol.probe_messages import Machine
from jaxrun.records.output.output import (
    HELD_POLL_S,
    LAST_LINE_DELAY_S,
    MAX_PARTIAL_BYTES,
    PARTIAL_LINE_DELAY_S,
    PROGRESS_BAR_INTERVAL_S,
    Output,
)
from jaxrun.records.output.rank_logs import TAIL_BYTES
from jaxrun.records.output.screen import HeldScreen
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.spec.backends.local import plan
from jaxrun.spec.job.job import Job


class CapturedOutput:
    """An Output with a clock that the test moves, and the receiving ends of its stdout and stderr, which may be one."""

    def __init__(self, size=8, *, merged=True, log_dir=None, **options):
        self.out_read, self.out = os.pipe()
        fcntl.fcntl(self.out, fcntl.F_SETPIPE_SZ, 2**18)
        self.err_read, self.err = (self.out_read, os.dup(self.out)) if merged else os.pipe()
        self.open = {self.out_read, self.out, self.err_read, self.err}
        self.clock = Clock()
        fds = {"stdout_fd": self.out, "stderr_fd": self.err}
        self.output = Output(size, log_dir=log_dir, clock=self.clock, **fds, **options)

    def close(self, fd):
        self.open.remove(fd)
        os.close(fd)

    def wait(self, seconds):
        self.clock.now += seconds
        return self.output.flush_due()

    def finish(self):
        """All that has arrived since the last time: stdout (both if merged) and stderr."""
        assert self.output.close(timeout=60)
        return _read_now(self.out_read), _read_now(self.err_read)


def _read_now(fd):
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 2**20)
    except BlockingIOError:
        return b""


@pytest.fixture
def capture():
    """capture(…) → a CapturedOutput until the test ends."""
    outputs = []
    yield lambda *size, **options: outputs.append(CapturedOutput(*size, **options)) or outputs[-1]
    for captured in outputs:
        for fd in {captured.out_read, captured.err_read} & captured.open:
            captured.close(fd)
        # Its thread must not write to a descriptor that is another test's by then.
        assert captured.output.close(timeout=60)
        for fd in list(captured.open):
            captured.close(fd)


@pytest.fixture
def captured(capture):
    return capture()


def test_lines_carry_their_rank_and_streams_stay_apart(capture):
    captured = capture(12, merged=False)
    captured.output.write(3, "out", b"one\ntwo\n")
    captured.output.write(11, "err", b"trouble\n")
    captured.output.print_line("jaxrun: rank 11 failed\nstopping the others")
    out, err = captured.finish()
    assert out == b"[3]  one\n[3]  two\n"
    assert err == b"[11] trouble\njaxrun: rank 11 failed\nstopping the others\n"


def test_where_both_are_one_file_the_order_is_kept(capture):
    captured = capture(2)
    expected = b""
    for number in range(200):
        stream = ("out", "err")[number % 3 == 0]
        captured.output.write(1, stream, b"%d\n" % number)
        expected += b"[1] %d\n" % number
    assert captured.finish()[0] == expected


def test_only_prefixes_on_terminals_are_coloured(capture):
    captured = capture(2, colour=(True, False), merged=False)
    captured.output.write(1, "out", b"a\xff\x00\n")
    captured.output.write(1, "err", b"b\n")
    out, err = captured.finish()
    assert (out, err) == (b"\x1b[33m[1]\x1b[0m a\xff\x00\n", b"[1] b\n")


def test_ranks_that_are_not_shown_are_logged(capture, tmp_path):
    captured = capture(3, shown=frozenset({1}), log_dir=tmp_path)
    for rank in range(3):
        captured.output.write(rank, "out", b"hi\r\n")
        captured.output.end_stream(rank, "out")
    assert captured.finish()[0] == b"[1] hi\n"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        f"rank-000{rank}.{stream}": b"hi\r\n" if stream == "out" else b""
        for rank in range(3)
        for stream in ("out", "err")
    }


def test_log_files_hold_the_exact_bytes(capture, tmp_path):
    captured = capture(1, log_dir=tmp_path)
    data = b"\r10%\r20%\r\n\x00\xff\r\n[Gloo] Rank 0 is connected to 1 peer ranks. "
    for byte in data:
        captured.output.write(0, "out", bytes([byte]))
    captured.output.logs.write_file(0, "err", b"only in the file\n")
    assert captured.finish()[0] == b"[0] 20%\n[0] \x00\xff\n"
    assert (tmp_path / "rank-0000.out").read_bytes() == data
    assert (tmp_path / "rank-0000.err").read_bytes() == b"only in the file\n"


def test_a_log_file_that_takes_little_at_a_time_gets_all(capture, tmp_path, monkeypatch):
    captured = capture(1, log_dir=tmp_path, shown=frozenset())
    write = os.write
    monkeypatch.setattr("jaxrun.records.output.rank_logs.os.write", lambda fd, data: write(fd, bytes(data)[:7]))
    captured.output.write(0, "out", bytes(range(256)))
    assert (tmp_path / "rank-0000.out").read_bytes() == bytes(range(256))


def test_a_prompt_is_shown_when_its_rank_may_read_and_continued_on_its_line_and_no_line_is_torn(captured):
    captured.output.write(0, "out", b"name? ")
    assert captured.output.flush_due() == pytest.approx(PARTIAL_LINE_DELAY_S)
    captured.output.show_prompt(0)
    assert captured.output.flush_due() is None
    captured.output.write(0, "out", b"Bob\n")
    captured.output.write(0, "out", b"half ")
    captured.output.write(1, "out", b"whole\n")
    captured.output.write(0, "out", b"line\n")
    captured.output.show_prompt(0)  # its line has ended meanwhile
    assert captured.finish()[0] == b"[0] name? Bob\n[1] whole\n[0] half line\n"


@pytest.mark.parametrize("gap_s", [1.0, PARTIAL_LINE_DELAY_S - 0.1])
def test_a_line_that_is_written_in_pieces_stays_one_line_unless_its_rank_may_be_at_a_prompt(captured, gap_s):
    for rank in (2, 1, 0):
        captured.output.write(rank, "out", b"loss ")
    captured.wait(gap_s)
    for rank in (1, 0):
        captured.output.show_prompt(rank)  # nobody types for rank 1
    for rank in (2, 1, 0):
        captured.output.write(rank, "out", b"3.25\n")
    assert captured.finish()[0] == b"[0] loss \n[2] loss 3.25\n[1] loss 3.25\n[0] 3.25\n"


def test_lines_that_wait_for_the_same_ones_of_others_stand_before_a_debuggers_prompt(capture):
    captured = capture(2, merged=True, grouped=("out",))
    captured.output.write(0, "out", b"loss is nan\n")
    captured.output.show_debugger("> train.py(3)<module>()\n(Pdb) ")
    assert captured.finish()[0] == b"[0] loss is nan\n> train.py(3)<module>()\n(Pdb) "


def test_a_long_silence_shows_an_unfinished_line(captured):
    captured.output.write(0, "out", b"...")
    captured.wait(PARTIAL_LINE_DELAY_S)
    captured.output.write(1, "out", b"late\n")
    assert captured.finish()[0] == b"[0] ...\n[1] late\n"


def test_the_last_line_of_a_rank_that_has_ended_stands_before_later_lines_of_others(captured):
    for rank, text in ((1, b"one"), (0, b"two")):
        captured.output.write(rank, "out", text)
        captured.output.note_end(rank)
        captured.wait(LAST_LINE_DELAY_S)
        captured.output.write(2, "out", b"later\n")
    captured.output.write(1, "out", b"!\n")
    assert captured.finish()[0] == b"[1] one\n[2] later\n[0] two\n[2] later\n[1] !\n"


def test_without_anybody_who_types_all_lines_stay_whole_and_a_long_silence_shows_them(capture):
    captured = capture(2, prompting=None)
    for rank in (1, 0):
        captured.output.write(rank, "out", b"loss ")
    captured.wait(1.0)
    captured.output.show_prompt(0)
    for rank in (1, 0):
        captured.output.write(rank, "out", b"3.25\n")
    captured.output.write(0, "out", b"...")
    captured.wait(PARTIAL_LINE_DELAY_S)
    captured.output.write(1, "out", b"whole\n")
    assert captured.finish()[0] == b"[1] loss 3.25\n[0] loss 3.25\n[0] ...\n[1] whole\n"


def test_nothing_runs_into_a_partial_line_that_is_shown(captured):
    captured.output.write(0, "out", b"name? ")
    captured.output.show_prompt(0)
    captured.output.print_line("jaxrun: all well")
    captured.output.write(0, "out", b"Bob")
    captured.output.show_prompt(0)
    captured.output.write(1, "err", b"x\n")
    captured.output.write(0, "out", b"\n\nnext\n")  # its first end of a line has been written
    assert captured.finish()[0] == b"[0] name? \njaxrun: all well\n[0] Bob\n[1] x\n[0] \n[0] next\n"


def test_the_end_of_a_pipe_shows_its_last_line(captured):
    captured.output.write(0, "out", b"bye")
    captured.output.end_stream(0, "out")
    captured.output.end_stream(0, "err")
    captured.output.write(1, "out", b"x\n")
    assert captured.finish()[0] == b"[0] bye\n[1] x\n"


def test_a_bar_is_shown_every_few_seconds_and_its_last_state_at_the_end(captured):
    for step in range(100):
        captured.output.write(0, "err", b"\r%d%%" % step)
        captured.wait(0.1)
    captured.output.write(0, "err", b"\r100%\n")
    states = captured.finish()[0].splitlines()
    assert len(states) == pytest.approx(100 * 0.1 / PROGRESS_BAR_INTERVAL_S + 1, abs=1)
    assert states[-1] == b"[0] 100%"


def test_a_line_without_end_is_shown_in_parts(captured):
    captured.output.write(0, "out", b"x" * MAX_PARTIAL_BYTES)
    assert captured.output.flush_due() is not None
    captured.output.write(0, "out", b"y")
    assert captured.output.flush_due() is None
    assert len(os.read(captured.out_read, 2**17)) == len("[0] ") + MAX_PARTIAL_BYTES + 1
    captured.output.write(0, "out", b"z\n")
    assert captured.finish()[0] == b"z\n"


def test_a_status_is_replaced_by_the_next_line_on_a_terminal():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    output = Output(2, log_dir=None, stdout_fd=theirs, stderr_fd=theirs)
    for number in (2, 3):
        output.print_line(f"jaxrun: {number} s, {'x' * 50}", status=True)
    output.write(1, "out", b"hi\n")
    output.print_line("", status=True)
    output.print_line("jaxrun: joining", status=True)
    output.print_line("", status=True)
    output.print_line(f"jaxrun: {'word ' * 10}", dim=True)
    assert output.close()
    shown = b""
    while not shown.endswith(b"\nword word word word\n"):  # a terminal passes on what it gets bit by bit
        shown = (shown + os.read(ours, 10_000)).replace(b"\r\n", b"\n")
    os.close(ours)
    os.close(theirs)
    erase, rest = b"\r\x1b[K", b"x" * 26
    words = b"jaxrun: word word word word word word\nword word word word\n"
    assert shown.replace(b" \n", b"\n") == b"".join(
        [b"jaxrun: 2 s, ", rest, erase, b"jaxrun: 3 s, ", rest, erase, b"[1] hi\njaxrun: joining", erase, words]
    )


def test_elsewhere_a_status_is_printed_now_and_then(captured):
    for second in range(25):
        captured.output.print_line(f"jaxrun: {second} s", status=True)
        captured.wait(1)
    captured.output.print_line("", status=True)
    assert captured.finish()[0] == b"jaxrun: 0 s\njaxrun: 10 s\njaxrun: 20 s\n"


def test_a_quiet_output_has_the_ranks_lines_and_those_that_matter(capture):
    captured = capture(quiet=True)
    captured.output.print_line("jaxrun: 8 processes", dim=True)
    captured.output.print_line("jaxrun: joining", status=True)
    captured.output.write(1, "out", b"hi\n")
    captured.output.print_line("jaxrun: rank 1 was lost")
    assert captured.finish()[0] == b"[1] hi\njaxrun: rank 1 was lost\n"


def test_tail_is_the_last_whole_lines_of_stderr(captured):
    assert captured.output.logs.stderr_tail(0) == ""
    captured.output.write(0, "err", b"Fatal: \xff\n")
    assert captured.output.logs.stderr_tail(0) == "Fatal: \ufffd\n"
    for number in range(1000):
        captured.output.write(0, "err", b"line %d\n" % number)
    captured.output.write(0, "out", b"not this")
    lines = captured.output.logs.stderr_tail(0).splitlines()
    assert lines == [f"line {number}" for number in range(1000 - len(lines), 1000)]
    assert len(lines) == pytest.approx(TAIL_BYTES / len("line 999\n"), abs=2)


def test_the_last_dump_of_the_fault_handler_is_found_before_its_long_end(captured):
    assert captured.output.logs.crash_dump(0) == ""
    dump = f"Fatal Python error: Aborted\n\nCurrent thread 0x1:\n{'x' * 2 * TAIL_BYTES}\n"
    for text in ("Fatal Python error: of a child\n", "more\n", dump):
        captured.output.write(0, "err", text.encode())
    assert captured.output.logs.crash_dump(0) == dump
    captured.finish()


def test_a_closed_stdout_is_reported_once_and_the_logs_go_on(capture, tmp_path):
    captured = capture(1, merged=False, log_dir=tmp_path)
    captured.close(captured.out_read)
    deadline = time.monotonic() + 60
    while b"has gone" not in (written := _read_now(captured.err_read)):
        captured.output.write(0, "out", b"line\n")
        captured.output.flush_due()
        assert time.monotonic() < deadline
    for _ in range(10):
        captured.output.write(0, "out", b"line\n")
        captured.output.flush_due()
    captured.output.write(0, "err", b"still here\n")
    assert captured.output.close(timeout=60)
    written += _read_now(captured.err_read)
    assert written.count(b"jaxrun: the reader of stdout has gone; ") == 1
    assert written.endswith(b"[0] still here\n")
    assert len((tmp_path / "rank-0000.out").read_bytes()) % len(b"line\n") == 0


@pytest.mark.parametrize(
    ("how", "why"),
    [("closed", "Bad file descriptor"), ("/dev/full", "No space left on device")],
    ids=["closed", "full"],
)
def test_a_stdout_that_cannot_be_written_causes_no_crash(capture, how, why):
    captured = capture(1, merged=False)
    if how == "closed":
        captured.close(captured.out)
    else:
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), captured.out)
    captured.output.write(0, "out", b"x\n")
    assert captured.output.close(timeout=60)
    assert f"cannot write to stdout: {why}".encode() in _read_now(captured.err_read)


def test_log_files_that_cannot_be_created_are_reported_once(capture, tmp_path):
    captured = capture(4, log_dir=tmp_path / "missing")
    captured.output.write(0, "out", b"x\n")
    written = captured.finish()[0]
    assert written.count(b"jaxrun: cannot write ") == 1
    assert written.endswith(b"[0] x\n")


# The limit on the size of files stands for a full disk: writing beyond it fails in the same way.
FULL_DISK = """
import resource, sys
from pathlib import Path
from jaxrun.records.output.output import HELD_POLL_S, Output
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
output = Output(2, log_dir=Path(sys.argv[1]))
for _ in range(30):
    for rank in range(2):
        output.write(rank, "out", b"x" * 9_999 + b"\\n")
output.write(1, "err", b"alive\\n")
output.close()
"""


def test_a_full_disk_is_reported_once_and_costs_logs_only(tmp_path, run_python):
    shown, said = run_python(FULL_DISK, str(tmp_path))
    assert shown.count(b"\n") == 60
    written, alive = said.splitlines()
    why = "File too large; such logs are abandoned, the job continues"
    assert written.decode() == f"jaxrun: cannot write {tmp_path}/rank-0000.out: {why}"
    assert alive == b"[1] alive"
    assert (tmp_path / "rank-0000.out").stat().st_size == 100_000
    assert (tmp_path / "rank-0001.err").read_bytes() == b"alive\n"


def test_the_next_attempt_has_logs_of_its_own_and_begins_on_a_new_line(capture, tmp_path):
    captured = capture(2, log_dir=tmp_path)
    captured.output.write(1, "out", b"cut off")
    captured.output.write(1, "err", b"why\n")
    (tmp_path / "attempt-2").mkdir()
    captured.output.begin_attempt(tmp_path / "attempt-2")
    assert captured.output.logs.stderr_tail(1) == ""
    captured.output.write(1, "out", b"again\n")
    assert captured.finish()[0] == b"[1] why\n[1] cut off\n[1] again\n"
    assert (tmp_path / "rank-0001.out").read_bytes() == b"cut off"
    assert (tmp_path / "attempt-2" / "rank-0001.out").read_bytes() == b"again\n"


def test_while_another_process_has_the_screen_own_words_wait_and_ranks_are_only_logged(capture, tmp_path):
    ended, holds = os.pipe()
    captured = capture(2, merged=False, log_dir=tmp_path, held=HeldScreen(ended))
    output = captured.output
    output.write(0, "out", b"one\n")
    output.print_line("jaxrun: 2 processes")
    output.print_line("waiting", status=True)
    assert output.flush_due() == HELD_POLL_S and not output.close(timeout=0.01)
    os.close(holds)
    output.flush_due()
    output.write(0, "out", b"two\n")
    assert captured.finish() == (b"[0] two\n", b"jaxrun: 2 processes\n")
    assert (tmp_path / "rank-0000.out").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("verbose", [False, True])
def test_verbose_names_the_variables_that_the_program_does_not_see(verbose, capfd):
    environ = {"JAX_PROCESS_ID": "3", "JAX_PARTITION_INDEX": "0"}
    job = Job(program=("p",), platform="cpu", verbose=verbose)
    made = plan(job, environ, "ab" * 16, Machine("box", (0, 1)))
    assert open_output(made, environ, RunDir(None)).close()
    line = "jaxrun: variables not passed on to the program: JAX_PROCESS_ID\n"
    assert (line in capfd.readouterr().err) == verbose
