"""--keep-survivors: a program with JAX's live_devices goes on when a rank dies, with the numbers of a smaller job."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import jaxrun, started

jax = find_spec("jax")
assert jax is not None and jax.submodule_search_locations is not None
# Its text, as a process that collects tests should not import JAX.
MULTIHOST_UTILS = Path(jax.submodule_search_locations[0], "experimental/multihost_utils.py").read_text()

pytestmark = [
    pytest.mark.extended,
    pytest.mark.jax_version,
    pytest.mark.skipif(
        "class _LiveDevices" not in MULTIHOST_UTILS, reason="live_devices of this JAX only returns a list"
    ),
]

# Fits y = 2x by gradient descent on the ranks that live; prints each step's loss and the state before it, exactly.
TRAINING = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.multihost_utils import live_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

rank, step, weight, last = jax.process_index(), int(sys.argv[1]), float.fromhex(sys.argv[2]), int(sys.argv[3])
known = None

def fails():
    open("failed", "w").close()
    {fails}

def newest(states):
    return states[jnp.argmax(states[:, 0])]

def take_state(mesh, step, weight):
    split, mine = NamedSharding(mesh, P("x")), np.array([[step, weight]], np.float32)
    states = jax.make_array_from_callback((mesh.size, 2), split, lambda at: mine)
    step, weight = np.asarray(jax.jit(newest, out_shardings=NamedSharding(mesh, P()))(states)).tolist()
    return int(step), weight

@jax.jit
def train(weight, x):
    loss, slope = jax.value_and_grad(lambda weight: jnp.mean((weight * x - 2 * x) ** 2))(weight)
    return loss, weight - 0.1 * slope

while step < last:
    if rank == 2 and step == 20 and not os.path.exists("failed"):
        print("failing at", time.time(), flush=True)
        fails()
    try:
        with live_devices(jax.devices()) as devices:
            mesh = Mesh(np.array(devices), "x")
            if devices != known:
                step, weight = take_state(mesh, step, weight)
                known = devices
                if len(devices) == 3 and step >= 20:  # the lost rank is back
                    last = step + 20
            data = np.random.default_rng(step).normal(size=12 * len(devices)).astype(np.float32)
            x = jax.make_array_from_callback(data.shape, NamedSharding(mesh, P("x")), lambda at: data[at])
            loss, after = map(float, train(jax.device_put(np.float32(weight), NamedSharding(mesh, P())), x))
    except Exception as error:
        known = None
        print("lost", type(error).__name__, flush=True)
        continue
    if rank == 0:
        print(f"{{time.time()}} step {{step}} on {{len(devices)}}: {{float(weight).hex()}} {{loss.hex()}}", flush=True)
    step, weight = step + 1, after
"""
STEP = re.compile(r"\[0\] ([\d.]+) step (\d+) on (\d+): (\S+) (\S+)")
FIRST = ("0", "0x0p+0", "40")


def write(tmp_path: Path, code: str) -> str:
    (tmp_path / "train.py").write_text(code)
    return "train.py"


def program(tmp_path: Path, fails: str) -> str:
    return write(tmp_path, TRAINING.format(fails=fails))


@pytest.mark.parametrize(
    ("fails", "how"),
    [
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL (9)"),
        ("raise ValueError('bad record')", "raised ValueError"),
    ],
)
def test_a_rank_is_lost_and_the_others_go_on_as_a_smaller_job_would(tmp_path: Path, fails: str, how: str) -> None:
    result = jaxrun(tmp_path, "-n", "3", "--keep-survivors", program(tmp_path, fails), *FIRST)
    assert result.code == 0, result
    assert f"rank 2 of 3 {how}" in result.err and "ranks 0-1 go on (--keep-survivors)" in result.err
    assert f"rank 2 of 3 {how}" in str(result.verdict()["details"]) and "did not come back" in result.err
    steps = steps_of(result.out)
    assert [step for step, *_ in steps] == list(range(40)) and {size for _, size, *_ in steps[:20]} == {3}
    assert {size for _, size, *_ in steps[20:]} == {2} and result.out.count("lost ProcessFailureError") == 2
    failed_at = float(re.findall(r"failing at ([\d.]+)", result.out)[0])
    assert min(float(at) for at, step, *_ in STEP.findall(result.out) if int(step) == 20) - failed_at < 10.0

    first = tmp_path / "smaller"
    first.mkdir()
    smaller = jaxrun(first, "-n", "2", program(first, "pass"), "20", steps[20][2], "40")
    assert [tuple(found[1:]) for found in STEP.findall(smaller.out)] == [
        (str(step), str(size), weight, loss) for step, size, weight, loss in steps[20:]
    ]


def steps_of(out: str) -> list[tuple[int, int, str, str]]:
    """Each step with the number of devices, the state before it and its loss."""
    return [(int(step), int(size), weight, loss) for _, step, size, weight, loss in STEP.findall(out)]


def test_a_lost_rank_comes_back_and_the_numbers_are_those_of_a_whole_job(tmp_path: Path) -> None:
    script = program(tmp_path, "os.kill(os.getpid(), 9)")
    result = jaxrun(tmp_path, "-n", "3", "--keep-survivors", "--max-restarts", "2", script, *FIRST[:2], "1000000")
    assert result.code == 0, result
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

def is_time(rank, step, dying=((2, 20), (0, 50), (2, 10), (2, 30))):
    number = len(os.listdir("deaths"))
    return number < len(dying) and (rank, step) == dying[number]

while step < last:
"""
    code = TRAINING.format(fails="dies()").replace("\nwhile step < last:\n", trouble)
    code = code.replace('rank == 2 and step == 20 and not os.path.exists("failed")', "is_time(rank, step)")
    code = code.replace('open("failed", "w")', 'open(f"deaths/{time.time()}", "w")')
    code = code.replace("len(devices) == 3 and step >= 20", "False")
    code = code.replace("    step, weight = step + 1, after", "    step, weight = step + 1, after\n    time.sleep(0.05)")
    (tmp_path / "deaths").mkdir()
    words = ("-n", "3", "--keep-survivors", "--max-restarts", "2", write(tmp_path, code), "0", "0x0p+0", "60")
    result = jaxrun(tmp_path, *words)
    assert result.code == 0 and "2 restarts)" in result.err, result
    told = re.findall(r"it is started again \(\d of 2\)|rank \d failed; .*?;|is back|attempt \d of \d failed", result.err)
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


def test_a_rank_may_end_early_and_a_program_that_does_not_handle_a_loss_ends_with_its_cause(tmp_path: Path) -> None:
    early = jaxrun(tmp_path, "-n", "3", "--keep-survivors", program(tmp_path, "sys.exit(0)"), *FIRST)
    assert early.code == 0 and "was lost" not in early.err and len(STEP.findall(early.out)) == 40, early
    code = TRAINING.format(fails="os.kill(os.getpid(), 9)").replace("        continue\n", "        raise\n")
    unhandled = tmp_path / "unhandled"
    unhandled.mkdir()
    result = jaxrun(unhandled, "-n", "3", "--keep-survivors", write(unhandled, code), *FIRST)
    assert result.code == 137 and "rank 2 of 3 was killed by SIGKILL (9)" in str(result.verdict()["headline"]), result
    assert result.verdict()["culprits"] == [2]


def test_a_program_that_sets_the_option_of_jax_itself_is_told_of_ours(tmp_path: Path) -> None:
    code = "import jax\njax.config.update('jax_enable_recoverability', True)\n"
    result = jaxrun(tmp_path, "-n", "1", write(tmp_path, code))
    assert (
        "sets jax_enable_recoverability, which JAX has read already; too late here: use --keep-survivors" in result.err
    )
    code += "jax.distributed.initialize(heartbeat_timeout_seconds=10)\n"
    second = tmp_path / "second"
    second.mkdir()
    told = jaxrun(second, "-n", "2", "--keep-survivors", write(second, code))
    assert told.code == 0 and "too late" not in told.err, told
    assert told.err.count("heartbeat_timeout_seconds=10 has no effect: jaxrun itself tells the ranks of a loss") == 1
