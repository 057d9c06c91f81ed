"""Notebooks whose kernels are interrupted, started anew and killed."""

import ast
import time

import pytest

pytest.importorskip("ipykernel")
pytest.importorskip("jupyter_client")

from notebooks import TIME_LIMIT, Kernel, processes, wait_until_gone

SLEEP = "print('asleep')\nimport time\ntime.sleep(100)"
STUBBORN = """\
%%gang
import time
print('asleep')
until = time.monotonic() + 100
while time.monotonic() < until:
    try:
        time.sleep(100)
    except KeyboardInterrupt:
        open({path!r}, 'w').close()
"""


@pytest.fixture
def kernel(tmp_path):
    started = Kernel(tmp_path)
    try:
        started.start_gang()
        yield started
    finally:
        started.close()


A_CELL = f"%%gang\n{SLEEP}"
A_FUNCTION = f"def sleep():\n    {SLEEP.replace(chr(10), chr(10) + '    ')}\n\ngang.run(sleep)"


def test_an_interrupt_ends_what_the_ranks_run_and_they_go_on(kernel):
    for cell, shown in (
        (A_CELL, "all ranks raised the same\nTraceback (most recent call last):\n  Cell In["),
        (A_FUNCTION, "----> 6 gang.run(sleep)\n"),
    ):
        interrupted = kernel.run(cell, kernel.interrupt)
        assert interrupted.error == "KeyboardInterrupt"
        assert "the gang goes on, its ranks know what they knew" in interrupted.text
        assert shown in interrupted.text
        assert kernel.run("%%gang\nknown").result == "True"


@pytest.mark.extended
def test_ranks_that_cannot_be_interrupted_are_started_anew(kernel, tmp_path):
    stuck = kernel.run(STUBBORN.format(path=str(tmp_path / "no")), kernel.interrupt)
    assert stuck.error == "KeyboardInterrupt"
    assert "ranks 0-1 could not be interrupted; the gang is started anew when it is used next" in stuck.text
    assert kernel.run("%%gang\n'known' in globals()").result == "False"


@pytest.mark.extended
def test_a_second_interrupt_ends_the_ranks_and_not_the_kernel(kernel, tmp_path):
    caught = tmp_path / "no"

    def interrupt_twice():
        kernel.interrupt()
        deadline = time.monotonic() + TIME_LIMIT
        while not caught.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        kernel.interrupt()

    ranks = ast.literal_eval(kernel.run("[worker.pid for worker in gang.workers]").result)
    ended = kernel.run(STUBBORN.format(path=str(caught)), interrupt_twice)
    assert ended.error == "KeyboardInterrupt"
    wait_until_gone(ranks, kernel.mark)
    assert kernel.run("1 + 1").result == "2"
    assert kernel.run("%%gang\n'known' in globals()").result == "False"


@pytest.mark.extended
def test_a_kernel_that_starts_anew_or_is_killed_leaves_no_process(kernel):
    before = processes(kernel.mark)
    assert len(before) > 3  # itself, two ranks, and what starts them
    kernel.restart()
    wait_until_gone(before, kernel.mark)
    kernel.start_gang()
    again = processes(kernel.mark)
    kernel.kill()
    wait_until_gone(again, kernel.mark)
