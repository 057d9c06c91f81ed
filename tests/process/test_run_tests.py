"""scripts/run_tests.py: ended while its tests run, and failed tests that are run again."""

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


FAILING = """
from pathlib import Path

def test_once():
    marker = Path({marker!r})
    first = not marker.exists()
    marker.touch()
    assert not first

def test_passes():
    pass
"""


def run_tests(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Runs scripts/run_tests.py over one file of tests with real processes, as it seems."""
    path = tmp_path / "tests" / "process" / "test_it.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    command = [sys.executable, SCRIPT, "-p", "no:hypothesispytest", f"--rootdir={tmp_path}", path]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.extended
def test_a_test_that_passes_alone_counts_and_is_named(tmp_path: Path) -> None:
    result = run_tests(tmp_path, FAILING.format(marker=str(tmp_path / "marker")))
    assert result.returncode == 0, result
    assert "failed beside others, passed alone: tests.process.test_it test_once" in result.stdout
    assert result.stdout.splitlines()[-1] == "2 passed, 0 failed, 1 passed only alone"


@pytest.mark.extended
def test_a_test_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    result = run_tests(tmp_path, "def test_always():\n    assert False\n\ndef test_passes():\n    pass\n")
    assert result.returncode == 1, result
    assert "failed: tests.process.test_it test_always" in result.stdout
    assert result.stdout.splitlines()[-1] == "1 passed, 1 failed"
