"""Jobs in which ranks never come to their end, or wait for data of a thread or process that has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import jaxrun

ENDS = """
import atexit, multiprocessing, threading, time
import jaxrun_runtime as jr

def last_words():
    time.sleep(1000)

def work():
    time.sleep(1000)

if __name__ == "__main__":
    if jr.rank == 0:
        atexit.register(time.sleep, 1000)
    elif jr.rank == 1:
        atexit.register(last_words)
    elif jr.rank == 2:
        threading.Thread(target=work, name="Loader").start()
    elif jr.rank == 3:
        multiprocessing.get_context("spawn").Process(target=work).start()
"""

LOADS = """
import multiprocessing, os, queue, signal, threading
import jaxrun_runtime as jr

def breaks():
    raise ValueError("bad record")

def is_killed(data):
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    if jr.rank == 0:
        threading.Thread(target=breaks, name="Loader").start()
        queue.Queue().get()
    else:
        spawn = multiprocessing.get_context("spawn")
        data = spawn.Queue()
        spawn.Process(target=is_killed, args=(data,)).start()
        data.get()
"""


def test_a_program_that_does_not_end_is_reported_with_the_thread_or_handler_that_does_not_end(
    tmp_path: Path, script
) -> None:
    options = ("-n", "4", "--stall-notice", "1", "--stall-timeout", "5")
    result = jaxrun(tmp_path, *options, str(script(ENDS, name="train.py")))
    assert result.code == 124 and result.events("StallNotice"), result
    assert "no progress for as long as --stall-timeout allows" in result.err, result
    for place in (
        "0  the end of the program, in the exit handler time.sleep\n",
        "1  the end of the program, in the exit handler train.py:6 last_words\n",
        "2  the end of the program, waits for its threads\n",
        "3  the end of the program, waits for its child processes\n",
    ):
        assert place in result.err, result
    said = " ".join(result.err.split())
    assert "is at its end, but " in said and "shutdown.py" not in said, result


@pytest.mark.extended
def test_a_rank_with_a_dead_loader_is_reported_even_if_no_rank_waits_for_it(tmp_path: Path, script) -> None:
    options = ("-n", "2", "--stall-notice", "1", "--stall-timeout", "6")
    result = jaxrun(tmp_path, *options, str(script(LOADS)))
    assert result.code == 124 and result.events("StallNotice"), result
    said = " ".join(result.err.split())
    assert "but its thread Loader ended with ValueError" in said, result
    assert " was killed by SIGKILL (9): if it produced the data" in said and "but its child process " in said
