"""The cores that ranks really stay on (--bind)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import TIME_LIMIT, jaxrun

PROGRAM = "import os\nprint(*sorted(os.sched_getaffinity(0)))\n"
CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--bind", "cores"), [CORES[: len(CORES) // 2], CORES[len(CORES) // 2 :]]),
        (("--bind", "cores", "--wrap", f"taskset -c {CORES[0]}"), [[CORES[0]], [CORES[0]]]),  # it counts for more
        ((), [CORES, CORES]),
    ],
)
def test_ranks_stay_on_their_cores_and_explain_shows_them(
    tmp_path: Path, options: tuple[str, ...], expected: list[list[int]]
) -> None:
    (tmp_path / "cores.py").write_text(PROGRAM)
    result = jaxrun(tmp_path, "-n", "2", *options, "cores.py")
    shown = [(tmp_path / f"run/rank-000{rank}.out").read_text().split() for rank in range(2)]
    assert result.code == 0 and shown == [list(map(str, cores)) for cores in expected], result
    command = [sys.executable, "-m", "jaxrun", "explain", str(result.run_dir)]
    explained = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT).stdout
    assert ("cores that ranks stay on" in explained) == (expected[0] != list(range(os.cpu_count() or 0))), explained


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cores.py").write_text(PROGRAM)
    result = jaxrun(tmp_path, "--bind", "numa", "cores.py")
    assert result.code == 2 and "--bind" in result.err and "auto, gpu, cores, none" in result.err.replace("'", ""), (
        result
    )
