"""--keep-survivors with --max-restarts: a lost rank comes back, and then the numbers are those of a whole job."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import jaxrun, started
from survivor_programs import FIRST, NEEDS_LIVE_DEVICES, TRAINING, program, steps_of, write

pytestmark = [pytest.mark.extended, *NEEDS_LIVE_DEVICES]


def test_a_lost_rank_comes_back_and_the_numbers_are_those_of_a_whole_job(tmp_path: Path) -> None:
    script = program(tmp_path, "os.kill(os.getpid(), 9)")
    words = ("--keep-survivors", "--max-restarts", "2", "--notify", "cat >> told", script, *FIRST[:2], "1000000")
    result = jaxrun(tmp_path, "-n", "3", *words)
    assert result.code == 0, result
    lost, back, _ = map(json.loads, (tmp_path / "told").read_text().splitlines())
    assert (lost["event"], lost["rank"], lost["is_started_again"]) == ("lost", 2, True)
    assert str(lost["headline"]).startswith("rank 2 of 3 was killed by SIGKILL (9), ")
    assert (back["event"], back["rank"]) == ("returned", 2) and 0 < back["seconds"] < 30
    assert "ranks 0-1 go on (--keep-survivors), and it is started again (1 of 2)" in result.err
    assert re.search(r"rank 2 is back, [\d.]+ s after it was lost: ranks 0-2 go on", result.err), result
    details = str(result.verdict()["details"])
    assert re.search(r"rank 2 of 3 was killed by SIGKILL \(9\), .* and was back after [\d.]+ s", details)
    started = [event["rank"] for event in result.events("WorkerSpawned")]
    assert sorted(started) == [0, 1, 2, 2], "the survivors keep their processes"
    steps = steps_of(result.out)
    assert [step for step, *_ in steps] == list(range(len(steps)))
    assert {size for _, size, *_ in steps[:20]} == {3} == {size for _, size, *_ in steps[-20:]}
    assert {size for _, size, *_ in steps[20:-20]} <= {2} and result.out.count("lost") == 2

    whole = tmp_path / "whole"
    whole.mkdir()
    begin, _, weight, _ = steps[-20]
    again = jaxrun(whole, "-n", "3", program(whole, "pass"), str(begin), weight, str(begin + 20))
    assert steps_of(again.out) == steps[-20:]


def test_a_rank_that_came_back_stops_with_the_others_and_its_calls_are_counted_alike(tmp_path: Path) -> None:
    code = TRAINING.format(fails="os.kill(os.getpid(), 9)").replace("last = step + 20", "last = step + 1_000_000")
    poll = "from jaxrun_runtime import should_stop\nwhile step < last and not should_stop(step):"
    code = (
        code.replace("while step < last:", poll)
        + "    if last - step == 999_990:\n        print('whole', flush=True)\n"
    )
    script = write(tmp_path, code + "print('stops at', step)\n")
    with started(tmp_path, "-n", "3", "--keep-survivors", "--max-restarts", "1", script, *FIRST[:2], "2000000") as job:
        job.wait_for_output("whole", count=3)
        job.process.send_signal(signal.SIGTERM)
        result = job.result()
    assert result.code == 75 and len(set(re.findall(r"stops at (\d+)", result.out))) == 1, result
    assert result.out.count("stops at") == 3
    explained = subprocess.run(
        [sys.executable, "-m", "jaxrun", "explain", str(result.run_dir)], capture_output=True, text=True, check=False
    )
    assert "ranks 0-2  after call #" in explained.stdout, explained.stdout


def test_a_program_that_does_not_use_the_order_of_live_devices_is_told_and_all_start_again(tmp_path: Path) -> None:
    code = TRAINING.format(fails="os.kill(os.getpid(), 9)").replace("np.array(devices)", "np.array(jax.devices())")
    code = code.replace(
        "with live_devices(jax.devices()) as devices:", "with live_devices(jax.devices()) as devices, whole(devices):"
    )
    whole = """
from contextlib import contextmanager

@contextmanager
def whole(devices):
    if len(devices) < 3:
        time.sleep(0.1)
        raise RuntimeError("this program needs all ranks")
    yield

while step < last:
"""
    script = write(tmp_path, code.replace("\nwhile step < last:\n", whole))
    result = jaxrun(tmp_path, "-n", "3", "--keep-survivors", "--max-restarts", "1", script, *FIRST)
    assert result.code == 0 and "1 restart)" in result.err, result
    assert "SpentOrderError: on CPU the devices of ranks 0, 1, 2 cannot exchange data in this order again" in result.err


def test_without_rank_0_all_start_again(tmp_path: Path) -> None:
    code = TRAINING.format(fails="os.kill(os.getpid(), 9)").replace("rank == 2 and", "rank == 0 and")
    script = write(tmp_path, code)
    result = jaxrun(tmp_path, "-n", "3", "--keep-survivors", "--max-restarts", "1", script, *FIRST)
    assert result.code == 0 and "is back" not in result.err and "1 restart)" in result.err, result
    assert [step for step, *_ in steps_of(result.out)] == [*range(20), *range(40)]


def test_the_restarts_of_a_lost_rank_are_counted_over_all_attempts(tmp_path: Path) -> None:
    trouble = """
def dies():  # in another way than before, or no attempt follows
    if rank == 0:
        raise ValueError("bad record")
    os.kill(os.getpid(), 9)

def is_time(rank, step, dying=((2, 20), (0, 50), (2, 10), (2, 30))):  # from then on, once all ranks are there
    number = len(os.listdir("deaths"))
    if number == len(dying) or len(known or ()) < 3:
        return False
    return rank == dying[number][0] and step >= dying[number][1]

last = last if os.environ["JAXRUN_ATTEMPT"] == "3" else 1_000_000
while step < last:
"""
    code = TRAINING.format(fails="dies()").replace("\nwhile step < last:\n", trouble)
    code = code.replace('rank == 2 and step == 20 and not os.path.exists("failed")', "is_time(rank, step)")
    code = code.replace('open("failed", "w")', 'open(f"deaths/{time.time()}", "w")')
    code = code.replace("len(devices) == 3 and step >= 20", "False")
    code = code.replace(
        "    step, weight = step + 1, after", "    step, weight = step + 1, after\n    time.sleep(0.05)"
    )
    (tmp_path / "deaths").mkdir()
    words = ("-n", "3", "--keep-survivors", "--max-restarts", "2", write(tmp_path, code), "0", "0x0p+0", "60")
    result = jaxrun(tmp_path, *words)
    assert result.code == 0 and "2 restarts)" in result.err, result
    told = re.findall(
        r"it is started again \(\d of 2\)|rank \d failed; .*?;|is back|attempt \d of \d failed", result.err
    )
    assert told == [
        "it is started again (1 of 2)",
        "is back",
        "rank 0 failed; rank 0 has JAX's coordinator, without which no rank goes on;",
        "attempt 1 of 3 failed",
        "it is started again (2 of 2)",
        "is back",
        "rank 2 failed; all 2 restarts of a lost rank are used up;",
        "attempt 2 of 3 failed",
    ], result


@pytest.mark.parametrize("differs", [False, True], ids=["alike", "differing"])
def test_the_calls_of_a_rank_that_came_back_are_compared_from_then_on(tmp_path: Path, differs: bool) -> None:
    other = """
@jax.jit
def other(weight, x):
    loss, slope = jax.value_and_grad(lambda weight: jnp.mean((weight * x - 3 * x) ** 2))(weight)
    return loss, weight - 0.1 * slope

def chosen(step):
    return other if {differs} and rank == 2 and step >= max(20, last - 15) else train

last = 1 if os.environ["JAXRUN_ATTEMPT"] == "2" else last
while step < last:
"""
    code = TRAINING.format(fails="os.kill(os.getpid(), 9)").replace("float, train(", "float, chosen(step)(")
    code = code.replace("\nwhile step < last:\n", other.format(differs=differs))
    words = ("-n", "3", "--keep-survivors", "--max-restarts", "1", "--lockstep", "fail")
    result = jaxrun(tmp_path, *words, write(tmp_path, code), *FIRST[:2], "1000000")
    assert result.code == 0 and "rank 2 is back" in result.err, result
    found = re.findall(r"\(jit\(train\) at .* and jit\(other\) at .*\), so --lockstep fail ended the job", result.err)
    assert len(found) == differs and result.err.count("; restarting") == differs, result
