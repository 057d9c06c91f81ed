"""The spool against real pipes: slow, stuck and gone readers, and a disk that is full."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import wait_until

from jaxrun.records.output.spool import Spool

PACKAGES = str(Path(__file__).parents[2] / "launcher")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        try:
            os.close(fd)
        except OSError:
            assert fd == read  # a test may have closed the reader


def read_all(fd: int, size: int) -> bytes:
    parts = []
    while size > 0:
        parts.append(os.read(fd, min(size, 2**20)))
        size -= len(parts[-1])
    return b"".join(parts)


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    environ = {"PYTHONPATH": PACKAGES, "PATH": os.environ["PATH"]}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)


def blocks(count: int, size: int) -> list[bytes]:
    return [bytes([number % 251]) * size for number in range(count)]


@pytest.mark.parametrize("blocking", [True, False])
def test_a_stuck_reader_blocks_nobody_and_loses_no_byte(pipe: tuple[int, int], tmp_path: Path, blocking: bool) -> None:
    read, write = pipe
    os.set_blocking(write, blocking)
    spool = Spool(write, memory=2**16, directory=tmp_path)
    data = blocks(400, 2**15)
    for block in data:
        spool.write(block)
    assert not spool.full
    assert not spool.close(timeout=0.01)
    assert list(tmp_path.iterdir()) == []  # what was spilled has no name
    expected = b"".join(data)
    assert read_all(read, len(expected)) == expected
    assert spool.close(timeout=60)


def test_bytes_put_while_a_slow_reader_drains_stay_in_order(pipe: tuple[int, int]) -> None:
    read, write = pipe
    spool = Spool(write, memory=2**14)
    data = blocks(600, 5000)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(read_all(read, 600 * 5000)))
    for block in data[:200]:
        spool.write(block)
    reader.start()
    for block in data[200:]:
        spool.write(block)
        time.sleep(0.0001)
    assert spool.close(timeout=60)
    reader.join(60)
    assert received == [b"".join(data)]


def test_temporary_files_are_given_back_as_they_are_read(
    pipe: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = pipe
    monkeypatch.setattr("jaxrun.records.output.spool.SEGMENT_BYTES", 2**20)
    spool = Spool(write, memory=2**16, directory=tmp_path)
    data = blocks(64, 2**17)
    for block in data:
        spool.write(block)
    assert open_files_in(tmp_path) >= 7
    assert read_all(read, 6 * 2**20) == b"".join(data)[: 6 * 2**20]
    wait_until(lambda: open_files_in(tmp_path) <= 3)
    assert read_all(read, 2 * 2**20) == b"".join(data)[6 * 2**20 :]
    assert spool.close(timeout=60)
    assert open_files_in(tmp_path) == 0


def open_files_in(directory: Path) -> int:
    """How many open files of this process lie there, also without a name."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue  # the descriptor of the listing itself
    return sum(target.startswith(f"{directory}/") for target in targets)


def test_a_reader_that_has_gone_is_an_error_and_no_exception(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.close(read)
    spool = Spool(write)
    spool.write(b"text")
    wait_until(lambda: spool.error is not None)
    assert isinstance(spool.error, BrokenPipeError)
    spool.write(b"more")
    assert spool.close(timeout=1)
    assert not spool.full


def test_a_reader_that_closes_while_it_is_stuck_ends_the_wait(pipe: tuple[int, int]) -> None:
    read, write = pipe
    spool = Spool(write)
    spool.write(b"x" * 2**20)
    assert not spool.close(timeout=0.05)
    os.close(read)
    assert spool.close(timeout=60)
    assert isinstance(spool.error, BrokenPipeError)


def test_bytes_put_after_a_close_are_delivered_too_and_nothing_put_starts_no_thread(pipe: tuple[int, int]) -> None:
    read, write = pipe
    before = set(threading.enumerate())
    spool = Spool(write)
    assert spool.close(timeout=0) and set(threading.enumerate()) <= before
    for text in (b"one", b"two"):
        spool.write(text)
        assert spool.close(timeout=60)
        assert os.read(read, 100) == text


# The limit on the size of files stands for a full disk: writing beyond it fails in the same way.
FULL_DISK = """
import os, resource, sys
from jaxrun.records.output.spool import Spool
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
read, write = os.pipe()
spool = Spool(write, memory=100_000)
sent = b""
while not spool.full:
    block = bytes([len(sent) % 251]) * 40_000
    spool.write(block)
    sent += block
    assert len(sent) < 1_000_000
late = b"said in spite of it\\n"
spool.write(late)
got = b""
while len(got) < len(sent + late):
    got += os.read(read, 2**16)
assert got == sent + late
assert spool.close(60)
assert not spool.full
spool.write(b"again")
assert os.read(read, 10) == b"again" and spool.close(60)
print(len(sent))
"""


def test_a_full_disk_makes_the_spool_full_and_loses_no_byte() -> None:
    done = run_code(FULL_DISK)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300_000


STUCK = """
import os, signal, sys, threading
from jaxrun.records.output.spool import Spool
read, write = os.pipe()
spool = Spool(write)
spool.write(b"x" * 2**20)
try:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    spool.close()
except KeyboardInterrupt:
    print("interrupted", spool.close(timeout=0.05))
"""


def test_an_interrupt_ends_the_wait_for_a_stuck_reader_and_the_process() -> None:
    done = run_code(STUCK)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted False\n", "")
