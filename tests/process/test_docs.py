"""Every command of the README and of docs/ is run as it stands there, and prints what the page shows.

What the commands of docs/ do has tests of its own, so that these are run in the large size only.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import notebooks
import pytest
from harness import MISBEHAVE, TIME_LIMIT, started, wait_until
from pages import ROOT, Example, examples, files

import jaxrun
import jaxrun_runtime
from jaxrun.cli.main import main
from jaxrun.cli.run_dir_commands import COMMANDS
from jaxrun.frontends.pytest_plugin import fixtures as pytest_fixtures
from jaxrun.frontends.pytest_plugin.plugin import MARKER
from jaxrun.job_client.running_job import find_running_job
from jaxrun.protocol.codec import message_types
from jaxrun.protocol.job_messages import SOCKET_VERSION, FromClient, Request, StacksRequest, ToClient
from jaxrun.records.event_log.event_log import LOGGED_TYPES

PAGES = [
    ROOT / "README.md",
    *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")),
    *sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/clusters").glob("*.md")]),
]
MATRIX_ROW = re.compile(r'^@row\("(.*?)", ', re.MULTILINE)
NOT_RUN = "scripts/test"  # which runs this test
# In a pytest of an example, importing hypothesis would take longer than all the rest.
ENVIRON = {**os.environ, "PYTEST_ADDOPTS": "-p no:hypothesispytest"}
EXAMPLES = [example for page in PAGES for example in examples(page, ["$"])]  # those of named hosts: tests/cluster
QUICK = [example for example in EXAMPLES if example.page == PAGES[0] or "--dry-run" in example.command]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """A directory for each page that holds its programs; the page's commands run in it one after the other."""
    made = {}
    for page in PAGES:
        made[page] = tmp_path_factory.mktemp(page.stem)
        for name, text in files(page.read_text()).items():
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


@pytest.mark.parametrize(
    "example",
    [pytest.param(example, marks=() if example in QUICK else pytest.mark.extended) for example in EXAMPLES],
    ids=str,
)
def test_the_command_prints_what_the_page_shows(example: Example, folders: dict[Path, Path]) -> None:
    if example.command == NOT_RUN:
        assert (ROOT / example.command).stat().st_mode & 0o111
        return
    done = run(example.command, folders[example.page])
    assert done.returncode == example.exit_code, done
    missing = list(example.missing(done.stdout + done.stderr))
    if example.command.startswith("pytest") and example.exit_code:
        missing.remove(f"exit {example.exit_code}")  # jaxrun prints its exit code, pytest does not
    assert not missing, (missing, done.stdout, done.stderr)


def test_an_ellipsis_on_a_page_stands_for_any_text_of_a_line() -> None:
    example = Example(PAGES[0], "$", "x", "rank 1 of 3 … after 12 s\n…\n[0] hello\nexit 7\n")
    assert list(example.missing("rank 0 of 4 was lost after 9 s\n[1] hello\nexit 7\n")) == []
    assert list(example.missing("rank 0 of 4 was lost\n[0] hello you\nexit 1\n")) == [
        "rank 1 of 3 … after 12 s",
        "[0] hello",
    ]


def test_line_numbers_of_programs_count_and_other_numbers_do_not() -> None:
    example = Example(PAGES[0], "$", "x", 'rank 2 is at train.py:13 after 4 s\n  File "/a/train.py", line 13, in f\n')
    assert list(example.missing('rank 1 is at train.py:13 after 9 s\n  File "/b/train.py", line 13, in f\n')) == []
    assert len(list(example.missing('rank 2 is at train.py:14 after 4 s\n  File "train.py", line 12, in f\n'))) == 2


def test_the_tutorial_shows_what_its_programs_have() -> None:
    """Each piece of Python stands in a program, wherever its lines begin, but for the two that are whole files."""

    def squeezed(code: str) -> str:
        return "".join(f"{line.strip()}\n" for line in code.splitlines() if line.strip())

    text = (ROOT / "docs" / "tutorial.md").read_text()
    programs = squeezed("".join(path.read_text() for path in (ROOT / "runtime/jaxrun_runtime/programs").glob("*.py")))
    pieces = re.findall(r"^```python\n(?!# )(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(pieces) >= 10
    assert [piece for piece in pieces if squeezed(piece) not in programs] == []


def test_the_pages_have_commands_and_programs_and_the_readme_fits_a_few_screens() -> None:
    readme = PAGES[0].read_text()
    assert len(EXAMPLES) >= 15
    assert {"hello.py", "train.py", "functions.py"} <= files(readme).keys()
    assert len(readme.splitlines()) <= 150 and max(map(len, readme.splitlines())) <= 100


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docker/README.md"], ids=lambda page: page.name)
def test_every_file_and_every_heading_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`((?:launcher|runtime|scripts|tests|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    for name, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in anchors(target.read_text()), f"{name}#{anchor}"


def anchors(text: str) -> set[str]:
    """The names of a page's headings in links, as GitHub makes them, and those that the page gives itself."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = [title.replace("`", "").lower() for title in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles} | set(
        re.findall(r'id="([^"]+)"', text)
    )


@pytest.mark.extended
def test_the_notebook_of_the_gallery_runs_and_is_what_the_page_shows(tmp_path: Path) -> None:
    cells = [cell["source"] for cell in json.loads((ROOT / "docs/gallery.ipynb").read_text())["cells"]]
    assert "\n\n".join(cells) in (ROOT / "docs/gallery.md").read_text()
    start, sums, ranks, stop = notebooks.execute(tmp_path, dict(enumerate(cells))).values()
    assert not (start.error or sums.error or ranks.error or stop.error), (start, sums, ranks, stop)
    assert "sum over 4 ranks: 28.0" in sums.text and ranks.result == "(0, 1, 2, 3)"


def test_every_module_that_how_it_works_names_is_one_file() -> None:
    files = [str(path) for package in ("launcher", "runtime") for path in (ROOT / package).rglob("*.py")]
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    names = set(re.findall(r"[\w/]*\w\.py\b", text)) - {"train.py", "_messages.py"}
    assert len(names) > 30
    found = {name: [file for file in files if file.endswith(f"/{name}")] for name in names}
    assert {name: places for name, places in found.items() if not places or ("/" in name and len(places) > 1)} == {}


def test_the_page_of_the_api_has_each_public_name_and_no_other() -> None:
    """The site has the docstrings; the page itself has what is no function or class."""
    page = (ROOT / "docs" / "api.md").read_text()
    functions = {f"{module.__name__}.{name}" for module in (jaxrun, jaxrun_runtime) for name in dir(module)}
    directives = set(re.findall(r"^\.\. auto\w+:: (\S+)$", page, re.MULTILINE))
    tables = {f"jaxrun_runtime.{name}" for name in re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)}
    public = {name for name in functions if "._" not in name}
    assert public - tables - directives == set() and directives <= public
    fixtures = re.findall(r"^def (\w+)\(", inspect.getsource(pytest_fixtures), re.MULTILINE)
    assert {name for name in fixtures if hasattr(getattr(pytest_fixtures, name), "name")} <= set(
        re.findall(r"`(\w+)`", page)
    )
    assert MARKER.partition(": ")[0] in page


def test_what_a_docstring_says_of_each_name_is_a_definition_on_the_site() -> None:
    convert = runpy.run_path(str(ROOT / "docs/site/docstrings.py"))["convert"]
    docstring = "Runs it.\n\nrank, host:  of the first\n             rank\nsize:  of all\n\nRaises X: if not."
    made = "Runs it.\n\n``rank, host``\n    of the first\n    rank\n``size``\n    of all\n\nRaises X: if not.\n"
    assert "\n".join(convert(docstring.splitlines())) == made


def test_every_page_is_in_the_contents_of_the_site() -> None:
    contents = runpy.run_path(str(ROOT / "docs/site/navigation.py"))["CONTENTS"]
    named = [ROOT / f"{name}.md" for pages in contents.values() for name in pages]
    assert sorted(named) == sorted([*PAGES[1:], ROOT / "docker/README.md"])


@pytest.mark.parametrize(("page", "lines"), [("llms.txt", 60), ("cheatsheet.md", 80)])
def test_the_short_pages_name_options_and_commands_that_exist(
    page: str, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert len(text.splitlines()) <= lines
    assert main(["--help-all"]) == 0
    known = capsys.readouterr().out
    for name, command in COMMANDS.items():
        known += f" {name} " + " ".join(" ".join(option.opts) for option in command.params)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) - {"--steps", "--lr"}  # the program's
    assert [option for option in sorted(named) if not re.search(rf"{option}(?![\w-])", known)] == []
    commands = set(re.findall(r"^(?:\| `)?jaxrun ([a-z]+)[ `]", text, re.MULTILINE)) - {"train"}
    assert commands >= {"list", "top", "stacks", "doctor"} and commands <= COMMANDS.keys() | {"doctor"}


def test_the_page_of_the_event_log_has_each_message_of_it() -> None:
    page = (ROOT / "docs" / "event-log.md").read_text()
    assert [name for name in LOGGED_TYPES if f"`{name}`" not in page] == []


@pytest.mark.extended
def test_the_program_that_follows_a_job_needs_no_jaxrun_and_prints_its_events_and_its_end(tmp_path: Path) -> None:
    text = files((ROOT / "docs" / "event-log.md").read_text())["follow.py"]
    assert "import jaxrun" not in text and len(text.splitlines()) <= 30
    (tmp_path / "follow.py").write_text(text)
    go, shown = tmp_path / "go", tmp_path / "shown"
    with (
        started(tmp_path, "-n", "2", MISBEHAVE, "--loop-until", str(go), "--steps", "9") as job,
        shown.open("w") as out,
    ):
        job.wait_for_output("ready", 2)
        words = [sys.executable, "-I", "-S", "follow.py", str(job.run_dir)]
        with subprocess.Popen(words, cwd=tmp_path, stdout=out) as follower:
            asking = find_running_job(job.run_dir, "jaxrun stacks")
            wait_until(lambda: asking.ask(StacksRequest()) and "StacksRequest" in shown.read_text())
            asking.close()
            go.touch()
            assert follower.wait(TIME_LIMIT) == 0
        job.end()
    printed = shown.read_text().splitlines()
    assert "Done 1" in printed and "WorkerExited 0" in printed and printed[-1] == "exit 0"


def test_the_page_of_the_socket_has_each_message_of_it() -> None:
    page = (ROOT / "docs" / "event-log.md").read_text()
    names = [*message_types(FromClient), *message_types(ToClient), *message_types(Request)]
    assert [name for name in names if f"`{name}`" not in page] == []
    assert f"version={SOCKET_VERSION})" in page and '"v": ' not in page


def test_the_example_of_an_engine_is_the_one_that_is_tested() -> None:
    assert (ROOT / "tests/unit/jsm_example.py").read_text() in (ROOT / "docs/contributing.md").read_text()


def test_the_matrix_has_every_row_that_is_tried_and_no_failure() -> None:
    tests = sorted((ROOT / "tests/cluster").glob("*.py"))
    tried = [row for path in tests for row in MATRIX_ROW.findall(path.read_text())]
    matrix = (
        (ROOT / "docs/evidence.md").read_text().partition("<!-- matrix -->")[2].partition("<!-- end of matrix -->")[0]
    )
    assert len(tried) > 10
    for row in tried:
        assert f"| {row} |" in matrix, f"{row} is missing: scripts/matrix writes the table from the tests' report"
    cells = "".join(line for line in matrix.splitlines() if line.startswith("|"))
    assert "✓" in cells and "✗" not in cells and "?" not in cells
