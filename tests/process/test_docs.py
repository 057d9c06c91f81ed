"""Every command of the README and of docs/ is run as it stands there, and prints what the page shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MATRIX_ROW = re.compile(r'^@row\("(.*?)", ', re.MULTILINE)
NOT_RUN = "scripts/test"  # which runs this test
# In a pytest of an example, importing hypothesis would take longer than all the rest.
ENVIRON = {**os.environ, "PYTEST_ADDOPTS": "-p no:hypothesispytest"}


@dataclass(frozen=True)
class Example:
    """A command of a page, and the lines that the page shows below it."""

    page: Path
    command: str
    shown: str

    def __str__(self) -> str:
        return f"{self.page.name}: {self.command}"


def python_files(text: str) -> dict[str, str]:
    """The files of a page by name: blocks of Python or TOML whose first line is `# NAME`."""
    blocks = re.findall(r"^```(?:python|toml)\n# ([\w-]+\.\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return {name: f"# {name}\n{body}" for name, body in blocks}


def examples(page: Path) -> list[Example]:
    """The commands of a page whose prompt is `$`; those of named hosts are run by the cluster tests."""
    blocks = re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    found = [pair for block in blocks for pair in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)]
    return [Example(page, command, shown) for command, shown in found]


EXAMPLES = [example for page in PAGES for example in examples(page)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """A directory for each page that holds its programs; the page's commands run in it one after the other."""
    made = {}
    for page in PAGES:
        made[page] = tmp_path_factory.mktemp(page.stem)
        for name, text in python_files(page.read_text()).items():
            (made[page] / name).write_text(text)
    return made


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    if words[0] in ("jaxrun", "pytest"):
        words[:1] = [sys.executable, "-m", words[0]]
    elif words[0] == "python":
        words[0] = sys.executable
    elif words[0] == "scripts/jaxrun":
        # The same job without the script's set-up of an environment, for which a test has no time.
        words[:1] = [sys.executable, "-m", "jaxrun"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, env=ENVIRON)


def without_numbers(line: str) -> str:
    """A line without what differs from run to run: numbers, and the directory."""
    return re.sub(r"\d+", "#", re.sub(r'File ".*/', 'File "', line))


def is_printed(shown: str, lines: list[str]) -> bool:
    """Whether one of the lines is the shown one, in which `…` stands for any text."""
    pattern = re.compile(".*".join(map(re.escape, without_numbers(shown).split("…"))))
    return any(pattern.fullmatch(without_numbers(line)) for line in lines)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_command_prints_what_the_page_shows(example: Example, folders: dict[Path, Path]) -> None:
    if example.command == NOT_RUN:
        assert (ROOT / example.command).stat().st_mode & 0o111
        return
    found = re.search(r"^exit (\d+)$", example.shown, re.MULTILINE)
    expected = int(found[1]) if found else 0
    done = run(example.command, folders[example.page])
    assert done.returncode == expected, done
    lines = (done.stdout + done.stderr).splitlines()
    for shown in example.shown.splitlines():
        if shown == "…" or (shown == f"exit {expected}" and example.command.startswith("pytest")):
            continue  # jaxrun prints its exit code, pytest does not
        assert is_printed(shown, lines), (shown, done.stdout, done.stderr)


def test_the_pages_have_commands_and_programs() -> None:
    assert len(EXAMPLES) >= 15
    assert {"hello.py", "train.py", "functions.py"} <= python_files(PAGES[0].read_text()).keys()


def test_the_readme_fits_a_few_screens() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 100


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docker/README.md"], ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`((?:launcher|runtime|scripts|tests|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (page.parent / name).exists(), name


def test_the_example_of_a_backend_is_the_one_that_is_tested() -> None:
    assert (ROOT / "tests/unit/pbs_example.py").read_text() in (ROOT / "docs/contributing.md").read_text()


def test_the_matrix_has_every_row_that_is_tried_and_no_failure() -> None:
    tests = sorted((ROOT / "tests/cluster").glob("*.py"))
    tried = [row for path in tests for row in MATRIX_ROW.findall(path.read_text())]
    matrix = (
        (ROOT / "docs/clusters.md").read_text().partition("<!-- matrix -->")[2].partition("<!-- end of matrix -->")[0]
    )
    assert len(tried) > 15
    for row in tried:
        assert f"| {row} |" in matrix, f"{row} is missing: scripts/matrix writes the table from the tests' report"
    cells = "".join(line for line in matrix.splitlines() if line.startswith("|"))
    assert "✓" in cells and "✗" not in cells and "?" not in cells
