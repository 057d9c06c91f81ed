"""The cluster commands of docs/clusters.md, run on the hosts that their prompts name, print what the page shows."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from cluster_fixture import Bed
from launch_modes import ENGINES, OPEN_MPI_5
from pages import ROOT, Example, examples, files

pytestmark = pytest.mark.extended

EXAMPLES = examples(ROOT / "docs/clusters.md", ["login$", "h1$"])


def test_the_page_shows_every_way_to_a_cluster() -> None:
    text = " ".join(example.command for example in EXAMPLES)
    assert all(word in text for word in ("--backend mpirun", "salloc", "--submit", "--sbatch", "mpirun ", "srun "))


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_command_prints_what_the_page_shows(bed: Bed, tmp_path: Path, example: Example) -> None:
    if "mpirun" in example.command and (reason := OPEN_MPI_5.missing()):
        pytest.skip(reason)
    for name, text in files(example.page.read_text()).items():
        (tmp_path / name).write_text(text)
    words = shlex.split(example.command)
    words[words.index("jaxrun") : words.index("jaxrun") + 1] = [sys.executable, "-m", "jaxrun"]
    env = {"PATH": f"{ENGINES / OPEN_MPI_5.name / 'bin'}:{os.environ['PATH']}", "NO_COLOR": "1"}
    host = {"login$": "ctl", "h1$": "h1"}[example.prompt]
    with bed.typed(host, *words, directory=tmp_path, env=env) as job:
        result = job.result()
        job.gone(within=5)
    assert result.code == example.exit_code, result
    assert not list(example.missing(result.out + result.err)), result
