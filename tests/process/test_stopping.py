"""should_stop and saved, in jobs of jaxrun and in processes that something else has started."""

from __future__ import annotations

import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import HERE, Result, extended, jaxrun, started
from harness_worker import environment

pytestmark = pytest.mark.jax_version
STOPPING = str(HERE / "stopping.py")


def _stops(result: Result) -> list[str]:
    return re.findall(r"stops in .*", result.out)


@pytest.mark.parametrize(
    ("signum", "warm_up"), [(signal.SIGTERM, 3), extended(signal.SIGHUP, 3), extended(15, 100_000)]
)
def test_all_ranks_stop_at_the_same_step_wherever_they_ask(tmp_path: Path, signum: int, warm_up: int) -> None:
    with started(tmp_path, "-n", "3", STOPPING, str(warm_up)) as job:
        if warm_up < 10:
            job.wait_for_output("ready", 3)
            time.sleep(random.uniform(0, 0.3))
        else:
            job.wait_for_output("warm", 3)
        job.process.send_signal(signum)
        result = job.result()
    assert result.code == 75, result
    where = _stops(result)
    assert len(where) == 3 and len(set(where)) == 1, result
    step = int(where[0].split()[-1])
    assert result.verdict()["headline"] == (
        f"preempted: the program ended with status 0 as should_stop told it ({signal.Signals(signum).name}); "
        f"the job may be resumed from step {step}."
    )
    assert [event["step"] for event in result.events("saved")] == [step]
    assert "Traceback" not in result.err


def test_a_job_is_asked_to_stop_before_its_time_limit(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "1", "--timeout", "30", "--save-time", "28.5", STOPPING, "3")
    assert result.code == 75, result
    assert re.search(r"^jaxrun: rank 0 stops", result.err, re.MULTILINE)  # with its step, unless it evaluates
    assert re.search(
        r"\(time limit in 28.5 s\); the job may be resumed from step \d+", str(result.verdict()["headline"])
    )


def test_a_child_that_the_program_has_forked_is_not_asked(tmp_path: Path, script) -> None:
    program = script("""
import os, signal, time, jaxrun_runtime as jr
assert not jr.should_stop()
if os.fork() == 0:
    os._exit(1 if jr.should_stop() else 0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
os.kill(os.getppid(), signal.SIGTERM)
while not jr.should_stop():
    time.sleep(0.01)
""")
    assert jaxrun(tmp_path, "-n", "1", str(program)).code == 75


# ---- without jaxrun


def _python(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *arguments], stdout=pipe, stderr=pipe, text=True, env=environment())


def test_one_process_alone_stops_at_sigterm_and_its_own_handler_is_run() -> None:
    process = _python(
        "-c",
        """
import os, signal, jaxrun_runtime as jr
signal.signal(signal.SIGTERM, lambda *_: print("handler", flush=True))
print(jr.attempt(), jr.should_stop(), jr.saved(3))
os.kill(os.getpid(), signal.SIGTERM)
print(jr.should_stop(7), jr.should_stop())
""",
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out == "AttemptInfo(number=1, size=1, reason='') False None\nhandler\nTrue True\n"


def test_processes_that_something_else_has_started_agree_by_jax() -> None:
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        code = f"""
import os, signal, sys, jax
rank = int(sys.argv[1])
jax.distributed.initialize({address!r}, 2, rank)
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
        processes = [_python("-c", code, str(rank)) for rank in range(2)]
        outputs = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    stops = [re.findall(r"stops at \d+ True", out) for out, _ in outputs]
    assert len(stops[0]) == 1 and stops[0] == stops[1], outputs


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_a_step_that_cannot_have_been_saved_is_an_error(step: float, error: type[Exception]) -> None:
    import jaxrun_runtime as jr

    with pytest.raises(error):
        jr.saved(step)  # type: ignore[arg-type]
