"""--keep-survivors: a program with JAX's live_devices goes on when a rank dies, with the numbers of a smaller job."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import jaxrun
from survivor_programs import FIRST, HAS_LIVE_DEVICES, NEEDS_LIVE_DEVICES, STEP, TRAINING, program, steps_of, write

pytestmark = pytest.mark.extended


def needs_live_devices(test: Callable[..., None]) -> Callable[..., None]:
    for mark in NEEDS_LIVE_DEVICES:
        test = mark(test)
    return test


@needs_live_devices
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
    assert {size for _, size, *_ in steps[20:]} == {2} and result.out.count("] lost ") == 2
    failed_at = float(re.findall(r"failing at ([\d.]+)", result.out)[0])
    assert min(float(at) for at, step, *_ in STEP.findall(result.out) if int(step) == 20) - failed_at < 10.0

    first = tmp_path / "smaller"
    first.mkdir()
    smaller = jaxrun(first, "-n", "2", program(first, "pass"), "20", steps[20][2], "40")
    assert [tuple(found[1:]) for found in STEP.findall(smaller.out)] == [
        (str(step), str(size), weight, loss) for step, size, weight, loss in steps[20:]
    ]


@needs_live_devices
def test_a_rank_may_end_early_and_a_program_that_does_not_handle_a_loss_ends_with_its_cause(tmp_path: Path) -> None:
    early = jaxrun(tmp_path, "-n", "3", "--keep-survivors", program(tmp_path, "sys.exit(0)"), *FIRST)
    assert early.code == 0 and "was lost" not in early.err and len(STEP.findall(early.out)) == 40, early
    code = TRAINING.format(fails="os.kill(os.getpid(), 9)").replace("        continue\n", "        raise\n")
    unhandled = tmp_path / "unhandled"
    unhandled.mkdir()
    result = jaxrun(unhandled, "-n", "3", "--keep-survivors", write(unhandled, code), *FIRST)
    assert result.code == 137 and "rank 2 of 3 was killed by SIGKILL (9)" in str(result.verdict()["headline"]), result
    assert result.verdict()["culprits"] == [2]


@needs_live_devices
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


@pytest.mark.jax_version
@pytest.mark.skipif(HAS_LIVE_DEVICES, reason="this JAX has live_devices as --keep-survivors needs it")
def test_a_jax_without_live_devices_as_a_context_manager_is_refused(tmp_path: Path) -> None:
    words = ("-n", "2", "--keep-survivors", "--max-restarts", "2", write(tmp_path, "print('runs')"))
    result = jaxrun(tmp_path, *words)
    assert result.code == 2 and "runs" not in result.out and "Traceback" not in result.err, result
    assert "--keep-survivors needs `with live_devices(…) as devices:`, which jax 0.8" in result.err
    assert "install jax 0.8.1 or newer, or leave the option out" in result.err and "restarting" not in result.err
