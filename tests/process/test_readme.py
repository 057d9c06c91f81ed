"""Every command of the README is run as it stands there, and what it shows is what comes out."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
FILES = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
COMMANDS = [
    (command, shown)
    for block in BLOCKS
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]
# A row of the matrix of what was tried on several hosts.
ROW = re.compile(r'^@row\("(.*?)", ', re.MULTILINE)
# It is what runs this test.
NOT_HERE = "scripts/test"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the README's programs; the commands run in it one after the other."""
    path = tmp_path_factory.mktemp("readme")
    for name, text in FILES.items():
        (path / name).write_text(f"# {name}\n{text}")
    return path


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    if words[0] in ("jaxrun", "pytest"):
        words[:1] = [sys.executable, "-m", words[0]]
    elif words[0] == "python":
        words[0] = sys.executable
    elif words[0] == "scripts/jaxrun":
        # The same job; that the script makes its environment is tested where there is time for it.
        words[:1] = [sys.executable, "-m", "jaxrun"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, env=dict(os.environ))


def shape(line: str) -> str:
    """A line without what differs from run to run: numbers, and the directory."""
    return re.sub(r"\d+", "#", re.sub(r'File ".*/', 'File "', line))


@pytest.mark.parametrize(("command", "shown"), COMMANDS)
def test_the_command_does_what_the_readme_shows(command: str, shown: str, folder: Path) -> None:
    if command == NOT_HERE:
        assert (ROOT / command).stat().st_mode & 0o111
        return
    if command.startswith("jaxrun explain") and not (folder / "jaxrun-runs").exists():
        run(COMMANDS[2][0], folder)
    done = run(command, folder)
    expected = int(found[1]) if (found := re.search(r"^exit (\d+)$", shown, re.MULTILINE)) else 0
    assert done.returncode == expected, done
    lines = {shape(line) for line in (done.stdout + done.stderr).splitlines()}
    for line in shown.replace("…\n", "").splitlines():
        if line == f"exit {expected}" and command.startswith("pytest"):
            continue  # jaxrun says it itself
        assert shape(line) in lines, (line, done.stdout, done.stderr)


def test_the_readme_has_commands_and_programs() -> None:
    assert len(COMMANDS) >= 8 and {"hello.py", "train.py", "who.py"} <= FILES.keys()


def test_every_file_that_the_readme_names_exists() -> None:
    for name in re.findall(r"`((?:launcher|runtime|scripts|tests)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"scripts/(?:jaxrun|test|bench)\b", README):
        assert (ROOT / name).exists(), name


def test_the_matrix_has_every_row_that_is_tried_and_no_failure() -> None:
    tried = [row for path in sorted((ROOT / "tests/cluster").glob("*.py")) for row in ROW.findall(path.read_text())]
    matrix = README.partition("<!-- matrix -->")[2].partition("<!-- end of matrix -->")[0]
    assert len(tried) > 15
    for row in tried:
        assert f"| {row} |" in matrix, f"{row} is missing: scripts/matrix writes the table from the tests' report"
    cells = "".join(line for line in matrix.splitlines() if line.startswith("|"))
    assert "✓" in cells and "✗" not in cells and "?" not in cells
