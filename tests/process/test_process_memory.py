"""The memory of forked processes: what they share counts once, and the kernel is seldom asked for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from jaxrun.files import procfs
from jaxrun.node.agent.process_memory import ProcessMemory

SHARED = 64 * 2**20
# Its process holds little else, unlike that of the tests, in which others may have imported JAX.
FORKING = f"""
import mmap, os
memory = mmap.mmap(-1, {SHARED}, flags=mmap.MAP_PRIVATE)
memory.write(b"x" * {SHARED})
for _ in range(3):
    pid = os.fork()
    if not pid:
        os.read(0, 1)
        os._exit(0)
    print(pid, flush=True)
os.read(0, 1)
"""


@pytest.fixture
def forked() -> Iterator[list[int]]:
    """Three processes that share what their parent has written."""
    with subprocess.Popen([sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        yield [int(parent.stdout.readline()) for _ in range(3)]
        parent.stdin.close()


def test_what_forked_processes_share_is_divided_among_them(forked: list[int]) -> None:
    held = [ProcessMemory().read(pid, 0.0) for pid in forked]
    assert all(SHARED / 4 <= one < SHARED for one in held)
    assert ProcessMemory().read(2**22 + 1, 0.0) == 0, "a process that is gone"


def test_all_pages_are_looked_at_less_and_less_often_and_not_those_of_a_large_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[float] = []
    resident = 2**30
    monkeypatch.setattr(procfs, "resident_bytes", lambda pid: resident)
    monkeypatch.setattr(procfs, "shared_bytes", lambda pid: looks.append(now) or 2**28)
    memory = ProcessMemory()
    for now in map(float, range(300)):
        assert memory.read(1, now) == resident - 2**28
    assert looks == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0, 183.0, 243.0]
    resident = 2**40
    assert memory.read(1, 1000.0) == resident - 2**28 and len(looks) == 10
