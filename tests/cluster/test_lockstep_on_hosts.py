"""Ranks on three hosts that diverge: the report, whichever engine has started them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, TESTBED, JobRunner
from divergences import CASES, STUCK, check_report, place
from harness import HERE
from launch_modes import ANY, LAUNCHED, OPEN_MPI_5, PYTHON, SLURM, LaunchMode, row
from pages import files

pytestmark = pytest.mark.extended

_OF_HOSTS = re.compile(r" \((?:h\d(?:, )?)+\)")
PAGE = Path(__file__).parents[2] / "docs/lockstep.md"
DIVERGE = str(HERE / "diverge.py")
KINDS = {case.kind: case for case in CASES}
MPIRUN, SRUN = LaunchMode(OPEN_MPI_5, LAUNCHED), LaunchMode(SLURM, LAUNCHED)


def on_one_host(report: str) -> str:
    """The report less the hosts of the ranks, all of which it must name."""
    assert all(host in report for host in HOSTS), report
    return _OF_HOSTS.sub("", report)


@row("out of step: recorded and told", *ANY)
def test_record_reports_the_divergence_and_the_job_goes_on(runner: JobRunner) -> None:
    result = runner.jaxrun(DIVERGE, "static-argument")
    assert result.code == 0, result
    report = str(result.verdict()["divergence"])
    check_report(KINDS["static-argument"], len(HOSTS), on_one_host(report))
    assert report in result.err and "may be wrong" in result.err, result


@row("out of step: `--lockstep strict` raises it", *ANY)
def test_strict_raises_the_divergence_on_every_host(runner: JobRunner) -> None:
    case = KINDS["set-order"]
    result = runner.jaxrun("--lockstep", "strict", DIVERGE, case.kind)
    assert result.code != 0 and result.verdict()["exit_code"] == 1, result
    for rank in range(len(HOSTS)):
        error = (result.run_dir / f"rank-{rank:04d}.err").read_text().rpartition("DivergenceError: ")[2]
        check_report(case, len(HOSTS), on_one_host(error))


def test_the_example_of_the_docs_runs_on_hosts_and_its_mesh_lies_over_them(make_runner, tmp_path: Path) -> None:
    program = tmp_path / "drift.py"
    program.write_text(files(PAGE.read_text())["drift.py"])
    result = make_runner(SRUN).jaxrun(str(program))
    assert result.code == 0, result
    assert "jaxrun: mesh over 3 hosts: data=3, hosts along data;" in result.err, result
    report = " ".join(on_one_host(str(result.verdict()["divergence"])).split())
    assert "argument batch is float32[96]@P('data') on ranks 0-1 float32[93]@P('data') on rank 2" in report


@pytest.mark.parametrize(
    ("kind", "mode"), [("branch", MPIRUN), ("last-batch-phase", SRUN), ("closed-over", MPIRUN)], ids=str
)
def test_what_a_rank_did_is_read_on_its_host(make_runner, kind: str, mode: LaunchMode) -> None:
    case = KINDS[kind]
    result = make_runner(mode).jaxrun("--lockstep", "record", "--stall-timeout", "2", DIVERGE, kind)
    assert result.code == case.ends, result
    check_report(case, len(HOSTS), on_one_host(str(result.verdict()["divergence"])))


def test_a_rank_that_is_stuck_is_named_with_its_host(make_runner) -> None:
    result = make_runner(MPIRUN).jaxrun("--stall-timeout", "3", "--stall-notice", "0.5", DIVERGE, "lock")
    assert not STUCK["lock"] and result.code == 124, result
    assert re.search(
        r"no progress for \d s: rank 2 \(h3\) .*, and ranks 0-1 wait for it .* · more: jaxrun stacks", result.err
    )
    shown = result.err.rpartition("no progress")[2]
    assert re.search(rf"^  1 rank +2 \(h3\) +{place('lock')} .*after call #\d+ jit", shown, re.MULTILINE), result


def test_stacks_of_all_hosts_say_how_far_each_has_come(make_runner) -> None:
    with make_runner(SRUN).started(DIVERGE, "stopped") as job:
        job.wait_until(lambda: (job.run_dir / "rank-0002.flight").exists(), "recorder")
        text = ""
        deadline = time.monotonic() + 20
        while "no answer: stopped by a signal" not in text and time.monotonic() < deadline:
            asked = job.bed.start("exec", SRUN.host, "--", PYTHON, "-m", "jaxrun", "stacks", str(job.run_dir))
            text = asked.communicate(timeout=30)[0]
        assert re.search(
            r"^  1 rank +2 \(h3\) +no answer: stopped by a signal .*after call #\d+ jit\(step\)", text, re.M
        )
        assert re.search(r"^  2 ranks +0-1 .*after call #\d+ jit\(step\)", text, re.M), text
        job.process.terminate()
        job.result()


def test_a_job_that_was_killed_from_outside_left_its_recorders(make_runner) -> None:
    """kill -9 of the launcher: no verdict, but what each rank had called can still be shown."""
    with make_runner(MPIRUN).started(DIVERGE, "rank-0-only") as job:
        job.wait_for_output("mean", 1)
        time.sleep(1)  # the others go on to meet the wrong call
        os.kill(job.launcher(), signal.SIGKILL)
        job.process.wait(10)
        job.gone()
        command = [TESTBED, "exec", MPIRUN.host, "--", PYTHON, "-m", "jaxrun", "explain", str(job.run_dir)]
        environ = {**os.environ, "JAXRUN_TESTBED_DIR": str(job.bed.root)}
        shown = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30).stdout
    assert "no verdict" in shown and not (job.run_dir / "verdict.json").exists(), shown
    report = shown[shown.index("the processes disagree") :].partition("\n\n")[0]
    check_report(KINDS["rank-0-only"], len(HOSTS), on_one_host(report))
