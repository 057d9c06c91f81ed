"""--stall-timeout: what hangs is stopped with the stacks of all ranks; what works or speaks is left alone."""

import re
import time

import pytest
from harness import MISBEHAVE, TIME_LIMIT, extended, jaxrun, started

pytestmark = pytest.mark.jax_version

BUSY = """\
import sys, time
import jax

def work():
    sum(range(10_000)) if jax.process_index() else time.sleep(0.3)

def speak():
    print("here", flush=True)
    time.sleep(0.3)

for deed in (work, speak):
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        deed()
"""


@pytest.mark.parametrize("how", [("--loop-until", "never"), extended(("--hang",))], ids=["in Python", "asleep"])
def test_a_job_that_hangs_is_stopped_with_its_stacks(tmp_path, how):
    result = jaxrun(tmp_path, "-n", "2", "--stall-timeout", "2", MISBEHAVE, "--rank", "1", *how)
    assert result.code == 124 and result.verdict()["outcome"] == "stall", result
    assert "no progress" in result.err and "misbehave.py" in result.err and "2 groups" in result.err
    assert result.err.count("the job is stopped after 2 s of it (--stall-timeout)") == 1


def test_a_stall_is_told_with_its_cause_and_the_job_goes_on(tmp_path):
    arguments = ("-n", "2", "--stall-notice", "0.5", MISBEHAVE, "--steps", "7", "--loop-until", "go")
    with started(tmp_path, *arguments) as job:
        job.wait_for_output("ready", 2)
        deadline = time.monotonic() + TIME_LIMIT
        while not any(event["event"] == "stall_notice" for event in job.events()):
            assert time.monotonic() < deadline and job.process.poll() is None, job.process.communicate()
            time.sleep(0.05)
        (tmp_path / "go").touch()
        result = job.result()
    assert result.code == 0, result
    notice = next(line for line in result.err.splitlines() if "no progress for" in line)
    assert re.search(r"no progress for \d+ s: .*misbehave\.py:\d+ main.* · more: jaxrun stacks run$", notice), notice


def test_work_and_output_are_signs_of_life(tmp_path):
    (tmp_path / "lives.py").write_text(BUSY)
    result = jaxrun(tmp_path, "-n", "2", "--stall-timeout", "1.5", "lives.py")
    assert result.code == 0 and "no output" not in result.err, result


def test_where_ci_is_set_it_is_on_and_0_turns_it_off():
    from jaxrun.cli.make_job import make_job

    given = {"program": ("train.py",)}
    assert make_job(given, {"CI": "true"}).stall_timeout == 300.0
    assert make_job({**given, "stall_timeout": 0.0}, {"CI": "true"}).stall_timeout == 0.0
    assert make_job(given, {"CI": "false"}).stall_timeout is None and make_job(given, {}).stall_timeout is None
