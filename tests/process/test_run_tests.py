"""scripts/run_tests.py, which is ended while its tests run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.py"
LASTING = """
import time
from pathlib import Path
import pytest

@pytest.fixture(scope="session")
def cluster():
    Path({started!r}).touch()
    yield
    Path({ended!r}).touch()

def test(cluster):
    time.sleep(60)
"""


@pytest.mark.extended
def test_sigterm_lets_the_fixtures_of_the_tests_end_what_they_have_started(tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    (tmp_path / "test_lasting.py").write_text(LASTING.format(started=str(started), ended=str(ended)))
    command = [sys.executable, SCRIPT, "-p", "no:hypothesispytest", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while not started.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.terminate()
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 143, out
    assert ended.exists(), out
