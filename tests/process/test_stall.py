"""--stall-timeout: what hangs is stopped with the stacks of all ranks; what works or speaks is left alone."""

import pytest
from harness import MISBEHAVE, jaxrun

pytestmark = pytest.mark.jax_version

BUSY = """\
import sys, time
import jax
until = time.monotonic() + 4
while time.monotonic() < until:
    {deed}
print("through")
"""


def test_a_job_that_hangs_is_stopped_with_its_stacks(tmp_path):
    result = jaxrun(tmp_path, "-n", "2", "--stall-timeout", "2", MISBEHAVE, "--rank", "1", "--hang")
    assert result.code == 124 and result.verdict()["outcome"] == "stall", result
    assert "no progress" in result.err and "misbehave.py" in result.err and "2 groups" in result.err
    assert result.err.count("no output, no call and no CPU time in any rank for") == 1


@pytest.mark.parametrize(
    "deed",
    [
        "sum(range(10_000)) if jax.process_index() else time.sleep(0.3)",
        "print('here', flush=True); time.sleep(0.3)",
    ],
    ids=["work", "output"],
)
def test_it_is_a_sign_of_life(tmp_path, deed):
    (tmp_path / "lives.py").write_text(BUSY.format(deed=deed))
    result = jaxrun(tmp_path, "-n", "2", "--stall-timeout", "1.5", "lives.py")
    assert result.code == 0 and "no output" not in result.err, result


def test_where_ci_is_set_it_is_on_and_0_turns_it_off():
    from jaxrun.cli.make_job import make_job

    given = {"program": ("train.py",)}
    assert make_job(given, {"CI": "true"}).stall_timeout == 300.0
    assert make_job({**given, "stall_timeout": 0.0}, {"CI": "true"}).stall_timeout == 0.0
    assert make_job(given, {"CI": "false"}).stall_timeout is None and make_job(given, {}).stall_timeout is None
