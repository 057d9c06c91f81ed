"""Ctrl-C, SIGTERM and SIGHUP at the launcher of a job that runs; should_stop and saved, with and without jaxrun.

Who gets which signal when, and what else may happen then, is in tests/unit/test_interruption.py, test_head_signals.py
and test_stop_agreement.py.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness import MISBEHAVE, Result, extended, jaxrun, started
from harness_worker import environment

import jaxrun_runtime

pytestmark = pytest.mark.jax_version

# ---- Ctrl-C

# Ctrl-C finds rank 0 in Python, rank 1 in a call that waits for rank 0, and rank 2 in endless C++ code.
INTERRUPTED = """\
import atexit
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

rank = jax.process_index()
both = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec("x"))
total = jax.jit(lambda x: x.sum())


def total_of_ranks_0_and_1():
    return float(total(jax.make_array_from_callback((2,), both, lambda _: np.ones(1))))


def endless():
    loop(jnp.float32(1)).block_until_ready()


atexit.register(print, "exit handler")
if rank < 2:
    total_of_ranks_0_and_1()
loop = jax.jit(lambda x: jax.lax.while_loop(lambda y: y > -1, lambda y: y * 0.5, x)).lower(jnp.float32(1)).compile()
# All is compiled: long before the half second is over, each rank is where it is to be.
threading.Timer(0.5, lambda: print("ready", flush=True)).start()
try:
    if rank == 0:
        time.sleep(600)
    if rank == 1:
        total_of_ranks_0_and_1()
    endless()
except KeyboardInterrupt:
    print("caught", flush=True)
    if rank == 0:
        time.sleep(1)  # until the signal is in rank 1, too: it is sent to one after the other
    raise
finally:
    print("finally")
"""


def test_ctrl_c_is_keyboard_interrupt_in_every_rank_that_it_reaches(tmp_path: Path, script) -> None:
    with started(tmp_path, "-n", "3", "--grace", "10", str(script(INTERRUPTED, "interrupted.py"))) as job:
        job.wait_for_output("ready", 3)
        job.process.send_signal(signal.SIGINT)
        result = job.end()
    assert result.code == 130, result
    # Rank 0 leaves the call that rank 1 waits in, so that rank 1 returns to Python, with an error of the call.
    caught = ["ready", "caught", "finally", "exit handler"]
    assert _written(result, 0) == caught, result
    assert _written(result, 1) == (caught if sys.version_info >= (3, 12) else [caught[0], *caught[2:]]), result
    assert _written(result, 2) == ["ready"], result
    assert "Ctrl-C: KeyboardInterrupt in ranks 0-2" in result.err
    assert "rank 2 did not end within 10 s; sent SIGTERM and SIGKILL" in result.err
    headline = str(result.verdict()["headline"])
    assert "rank 2 did not end in time (stuck at interrupted.py:20 endless, in JAX: " in headline
    assert "Traceback" not in result.err and "preemption_notifier" not in result.err
    log = (result.run_dir / "rank-0000.err").read_text()
    assert log.endswith("KeyboardInterrupt\n") and "jaxrun_runtime" not in log


def _written(result: Result, rank: int) -> list[str]:
    lines = (result.run_dir / f"rank-{rank:04d}.out").read_text().splitlines()
    return [line for line in lines if not line.startswith("[Gloo]")]


# ---- SIGTERM


def test_sigterm_is_jaxs_preemption_notice(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "2", MISBEHAVE, "--until-preempted") as job:
        job.wait_for_output("listening", 2)
        job.process.terminate()
        result = job.result()
    assert result.code == 75, result
    assert result.out.count("preempted") == 2
    assert "SIGTERM: asked ranks 0-1 to end (SIGTERM); SIGKILL follows in 30 s" in result.err
    assert "preemption_notifier" not in result.err
    # One rank's notifier, which looks once a second, is enough for all to end.
    assert any("preemption_notifier" in path.read_text() for path in result.run_dir.glob("rank-*.err"))


OWN_HANDLER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.extended
def test_a_programs_own_handler_of_sigterm_is_run(tmp_path: Path, script) -> None:
    with started(tmp_path, "-n", "1", str(script(OWN_HANDLER))) as job:
        job.wait_for_output("ready")
        job.process.terminate()
        assert job.result().code == 75
        assert len(job.events("SignalRanks")) == 1, "it ran at the first signal, for which the main thread woke"


@pytest.mark.extended
def test_sigterm_that_nobody_listens_to_ends_the_job_at_once(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "1", "--grace", "600", MISBEHAVE, "--rank", "0", "--hang") as job:
        job.wait_for_output("ready")
        job.process.terminate()
        result = job.end()
    assert result.code == 143
    assert "no rank listens to SIGTERM, so 1 rank was killed at once" in result.err


TEARS_DOWN = """
import os, pathlib, signal, sys, time, jaxrun_runtime as jr
from jax.experimental.multihost_utils import sync_global_devices

def tear_down(*_):
    pathlib.Path(f"torn down.{jr.rank}").touch()
    if jr.rank == 2:
        os._exit(3)
    sys.exit(f"rank {jr.rank} has torn down")

signal.signal(signal.SIGTERM, tear_down)
sync_global_devices("all handle it")
if jr.rank == 1:
    raise ValueError("bad record")
time.sleep(600)
"""


@pytest.mark.extended
def test_with_grace_ranks_that_handle_sigterm_may_end_when_another_fails(tmp_path: Path, script) -> None:
    result = jaxrun(tmp_path, "-n", "3", "--grace", "200", str(script(TEARS_DOWN)))
    assert sorted(path.name for path in tmp_path.glob("torn down.*")) == ["torn down.0", "torn down.2"], result
    assert result.code == 1 and result.verdict()["culprits"] == [1] and "SIGKILL follows in 200 s" in result.err, result


# ---- should_stop

# A program with a warm-up, training and evaluations, which asks in all of them whether it should stop. As orbax does
# in each save, it also asks JAX whether it is being preempted. Rank 1 is late now and then.
STOPPING = """
import sys
import time

from jax.experimental import multihost_utils

import jaxrun_runtime as jr


def work(name):
    time.sleep(0.002 if jr.rank else 0.001)
    multihost_utils.sync_global_devices(name)


def stop(where, step):
    if jr.rank == 0:
        jr.saved(step)
    print(f"stops in {where} at {step}", flush=True)
    sys.exit()


for step in range(int(sys.argv[1])):
    work("warm-up")
    if jr.should_stop():
        stop("warm-up", step)
    if step == 2:
        print("warm", flush=True)
print("ready", flush=True)
for step in range(100_000):
    work("step")
    assert not multihost_utils.reached_preemption_sync_point(step)
    if jr.should_stop(step):
        stop("training", step)
    for _ in range(3 if step % 10 == 0 else 0):
        work("evaluation")
        if jr.should_stop():
            assert jr.should_stop() and jr.should_stop(step)
            stop("evaluation", step)
"""


@pytest.mark.parametrize(("warm_up", "begun"), [(3, "ready"), extended(100_000, "warm")])
def test_all_ranks_stop_at_the_same_step_wherever_they_ask(tmp_path: Path, script, warm_up: int, begun: str) -> None:
    with started(tmp_path, "-n", "2", str(script(STOPPING)), str(warm_up)) as job:
        job.wait_for_output(begun, 2)
        job.process.terminate()
        result = job.result()
    assert result.code == 75, result
    where = re.findall(r"stops in .*", result.out)
    assert len(where) == 2 and len(set(where)) == 1, result
    step = int(where[0].split()[-1])
    assert result.verdict()["headline"] == (
        "preempted: the program ended with status 0 as should_stop had asked (SIGTERM); "
        f"the job may be resumed from step {step}."
    )
    assert [event["step"] for event in result.events("CheckpointSaved")] == [step]
    assert "Traceback" not in result.err


SIGTERM_TO_RANK_1 = """
import os, signal, sys, jaxrun_runtime as jr
from jax.experimental.multihost_utils import sync_global_devices
jr.should_stop()
sync_global_devices("all poll")
if jr.rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
for step in range(10**6):
    if jr.should_stop(step):
        print("stops at", step)
        sys.exit()
    sync_global_devices("step")
"""


@pytest.mark.extended
def test_sigterm_to_one_rank_stops_all_that_poll_at_the_same_step(tmp_path: Path, script) -> None:
    result = jaxrun(tmp_path, "-n", "2", str(script(SIGTERM_TO_RANK_1)))
    assert result.code == 75 and len(set(re.findall(r"stops at \d+", result.out))) == 1, result
    assert "SIGTERM to rank 1, not by jaxrun: asked ranks 0-1 to stop (should_stop)" in result.err, result


ASKS_IN_A_CHILD = """
import os, time, jaxrun_runtime as jr
before = jr.should_stop()  # which is true where the start took that long
if os.fork() == 0:
    os._exit(1 if jr.should_stop() and not before else 0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
jr.saved(3)
while not jr.should_stop(4):
    time.sleep(0.01)
"""


@pytest.mark.extended
def test_a_job_is_asked_to_stop_before_its_time_limit_but_not_its_children(tmp_path: Path, script) -> None:
    limits = ("--timeout", "90", "--save-time", "88")
    result = jaxrun(tmp_path, "-n", "1", *limits, str(script(ASKS_IN_A_CHILD)))
    assert result.code == 75, result
    assert re.search(r"^jaxrun: rank 0 stops", result.err, re.MULTILINE)  # at step 4, unless it was asked before
    assert "(time limit in 88 s); the job may be resumed from step 3" in str(result.verdict()["headline"])


# ---- without jaxrun


def _python(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *arguments], stdout=pipe, stderr=pipe, text=True, env=environment())


ALONE = """
import os, signal, jaxrun_runtime as jr
signal.signal(signal.SIGTERM, lambda *_: print("handler", flush=True))
print(jr.attempt(), jr.should_stop(), jr.saved(3))
os.kill(os.getpid(), signal.SIGTERM)
print(jr.should_stop(7), jr.should_stop())
"""


def test_one_process_alone_stops_at_sigterm_and_its_own_handler_is_run() -> None:
    process = _python("-c", ALONE)
    out, err = process.communicate(timeout=90)
    assert (process.returncode, err) == (0, "")
    assert out == "AttemptInfo(number=1, size=1, reason='') False None\nhandler\nTrue True\n"


TOGETHER = """
import os, signal, sys, jax
address, rank = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, rank)
from jax.experimental import multihost_utils
import jaxrun_runtime as jr
for step in range(3000):
    multihost_utils.sync_global_devices("step")
    if step == 20 and rank:
        os.kill(os.getpid(), signal.SIGTERM)
    if jr.should_stop():
        print("stops at", step, jr.should_stop())
        break
"""


@pytest.mark.extended
def test_processes_that_something_else_has_started_agree_by_jax() -> None:
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        processes = [_python("-c", TOGETHER, address, str(rank)) for rank in range(2)]
        outputs = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    stops = [re.findall(r"stops at \d+ True", out) for out, _ in outputs]
    assert len(stops[0]) == 1 and stops[0] == stops[1], outputs


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_a_step_that_cannot_have_been_saved_is_an_error(step: float, error: type[Exception]) -> None:
    with pytest.raises(error):
        jaxrun_runtime.saved(step)  # type: ignore[arg-type]
