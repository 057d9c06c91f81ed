"""scripts/gpu on a machine without GPUs: what it says, and that the checks which need none run."""

import shutil
import subprocess
from pathlib import Path

import pytest
from harness import TIME_LIMIT

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu"


def gpu(*words):
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, timeout=3 * TIME_LIMIT)


def test_a_check_that_does_not_exist_is_refused_with_the_names_of_those_that_do():
    done = gpu("--platform", "cpu", "--only", "selfchek")
    assert done.returncode == 2
    assert "selfchek" in done.stderr and "selfcheck" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have GPUs")
def test_a_machine_without_gpus_is_told_so():
    done = gpu()
    assert done.returncode == 69
    assert "no NVIDIA GPU here" in done.stderr and "--platform cpu" in done.stderr


@pytest.mark.extended
def test_the_checks_that_need_no_gpu_run_on_cpus_and_the_others_are_said_not_to():
    done = gpu("--platform", "cpu", "--only", "selfcheck", "waits-for-rank", "visible")
    assert done.returncode == 0, done.stderr
    first, second, third = [line for line in done.stdout.splitlines() if line.startswith("| ")][-3:]
    assert "| not run | needs 2 GPUs, this machine has 0 GPUs" in " ".join((first, second, third))
    assert "psum, all_gather and ppermute are right" in done.stdout
    assert "exit 124: 1 rank 1 endless.py" in done.stdout
