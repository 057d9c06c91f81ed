"""The next attempt waits until the GPUs are as free as before the first."""

import pytest

from jaxrun.agent import gpu_memory
from jaxrun.agent.gpu_memory import GpuMemory

GIB = 2**30


class Driver:
    """Reads of GPU-1's memory: the used GiB, one a read, the last one from then on."""

    def __init__(self, *used):
        self._used = list(used)
        self.slept = 0.0

    def read(self):
        used = self._used.pop(0) if len(self._used) > 1 else self._used[0]
        return {"GPU-1": (int(used * GIB), 80 * GIB)}


@pytest.fixture
def wait(monkeypatch):
    """wait(USED…) → (seconds that were waited for, what was said)."""

    def run(*used, stopped=lambda: False):
        now, said = [0.0], []
        monkeypatch.setattr(gpu_memory.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(gpu_memory.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
        GpuMemory(Driver(*used).read).wait_until_free(said.append, stopped)
        return now[0], said

    return run


def test_memory_that_is_free_is_not_waited_for(wait):
    assert wait(0, 0) == (0.0, [])
    assert wait(30, 30.5) == (0.0, [])  # others hold it


def test_memory_that_is_soon_free_is_waited_for_in_silence(wait):
    seconds, said = wait(0, 60, 60, 60, 1)
    assert 0.1 < seconds < 0.2 and said == []


def test_a_long_wait_is_told_once_and_has_an_end(wait):
    seconds, said = wait(1, 61)
    assert 30 < seconds < 31
    assert said == [
        "waiting until the GPU memory of the attempt before is free: 60.0 GiB of GPU-1",
        "still not free after 30 s: 60.0 GiB of GPU-1; the next attempt is started all the same",
    ]


def test_it_ends_once_the_job_is_stopped(wait):
    assert wait(1, 61, stopped=lambda: True) == (0.0, [])


def test_without_a_driver_there_is_nothing_to_wait_for():
    GpuMemory(dict).wait_until_free(pytest.fail, lambda: False)
