"""The commands of docs/clusters.md and docs/clusters/, run on the hosts of their prompts, print what the page shows."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster_fixture import Bed
from harness import TIME_LIMIT
from launch_modes import ENGINES, OPEN_MPI_5, OPENSSH
from pages import ROOT, Example, examples, files

pytestmark = pytest.mark.extended

FIRST_PAGE = ROOT / "docs/clusters.md"  # which has the program of all of them
PAGES = [FIRST_PAGE, *sorted((ROOT / "docs/clusters").glob("*.md"))]
SHOWN = [example for page in PAGES for example in examples(page, ["login$", "h1$", "h2$"])]
ON_EACH_HOST = [example for example in SHOWN if "--host-rank" in example.command]  # which need each other
EXAMPLES = [example for example in SHOWN if example not in ON_EACH_HOST]
# For 1 GiB of small files to two hosts: 1 to 3 minutes alone on two cores, and more beside other tests.
STAGING_LIMIT_S = 600


def test_the_pages_show_every_way_to_a_cluster() -> None:
    text = " ".join(example.command for example in EXAMPLES)
    ways = ("--backend mpirun", "--backend ssh", "salloc", "--submit", "--sbatch", "mpirun ", "srun ")
    assert all(word in text for word in ways)


def _is_staged(example: Example) -> bool:
    return "--stage venv" in example.command


SLOW = pytest.mark.timeout(STAGING_LIMIT_S + 60)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(one, marks=pytest.mark.timeout(STAGING_LIMIT_S + 60)) if _is_staged(one) else one
        for one in EXAMPLES
    ],
    ids=str,
)
def test_the_command_prints_what_the_page_shows(
    request: pytest.FixtureRequest, bed: Bed, tmp_path: Path, example: Example
) -> None:
    if "--backend sge" in example.command:
        request.getfixturevalue("cell")
    if "mpirun" in example.command and (reason := OPEN_MPI_5.missing()):
        pytest.skip(reason)
    for name, text in files(FIRST_PAGE.read_text()).items():
        (tmp_path / name).write_text(text)
    words = shlex.split(example.command)
    words[words.index("jaxrun") : words.index("jaxrun") + 1] = [sys.executable, "-m", "jaxrun"]
    ssh = OPENSSH.env() if "--backend ssh" in example.command else {}
    env = {**ssh, "PATH": f"{ENGINES / OPEN_MPI_5.name / 'bin'}:{os.environ['PATH']}", "NO_COLOR": "1"}
    host = {"login$": "ctl", "h1$": "h1"}[example.prompt]
    with bed.typed(host, *words, directory=tmp_path, env=env) as job:
        result = job.result(STAGING_LIMIT_S if _is_staged(example) else TIME_LIMIT)
        job.gone()
    assert result.code == example.exit_code, result
    assert not list(example.missing(result.out + result.err)), result


def test_the_commands_of_all_hosts_print_what_the_page_shows(bed: Bed, tmp_path: Path) -> None:
    assert [example.prompt for example in ON_EACH_HOST] == ["h1$", "h2$"]
    with ExitStack() as stack:
        jobs = []
        for example in ON_EACH_HOST:
            folder = tmp_path / example.prompt.strip("$")
            folder.mkdir()
            for name, text in files(FIRST_PAGE.read_text()).items():
                (folder / name).write_text(text)
            words = [sys.executable, "-m", *shlex.split(example.command)]
            env = {"NO_COLOR": "1", "JAXRUN_TOKEN": "7" * 64}
            jobs.append(stack.enter_context(bed.typed(folder.name, *words, directory=folder, env=env)))
        results = [job.result() for job in jobs]
        jobs[0].gone()
    for example, result in zip(ON_EACH_HOST, results, strict=True):
        assert result.code == 0, results
        assert not list(example.missing(result.out + result.err)), results
