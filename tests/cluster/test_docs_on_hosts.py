"""The cluster commands of docs/clusters.md, run on the hosts that their prompts name, print what the page shows."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from cluster_fixture import Bed
from launch_modes import ENGINES, OPEN_MPI_5

pytestmark = pytest.mark.extended

PAGE = (Path(__file__).parents[2] / "docs/clusters.md").read_text()
FILES = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
BLOCKS = re.findall(r"^```console\n((?:login|h1)\$ .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    found
    for block in BLOCKS
    for found in re.findall(r"^(login|h1)\$ (.*)\n((?:(?!(?:login|h1)\$ ).*\n)*)", block, re.MULTILINE)
]


def without_numbers(line: str) -> str:
    """A line without what differs from run to run."""
    return re.sub(r"\d+", "#", line)


def test_the_page_shows_every_way_to_a_cluster() -> None:
    text = " ".join(command for _, command, _ in COMMANDS)
    assert all(word in text for word in ("--backend mpirun", "salloc", "--submit", "--sbatch", "mpirun ", "srun "))


@pytest.mark.parametrize(("prompt", "command", "shown"), COMMANDS, ids=[command for _, command, _ in COMMANDS])
def test_the_command_prints_what_the_page_shows(
    bed: Bed, tmp_path: Path, prompt: str, command: str, shown: str
) -> None:
    if "mpirun" in command and (reason := OPEN_MPI_5.missing()):
        pytest.skip(reason)
    for name, text in FILES.items():
        (tmp_path / name).write_text(f"# {name}\n{text}")
    words = shlex.split(command)
    words[words.index("jaxrun") : words.index("jaxrun") + 1] = [sys.executable, "-m", "jaxrun"]
    env = {"PATH": f"{ENGINES / OPEN_MPI_5.name / 'bin'}:{os.environ['PATH']}", "NO_COLOR": "1"}
    with bed.typed({"login": "ctl"}.get(prompt, prompt), *words, directory=tmp_path, env=env) as job:
        result = job.result()
        job.gone(within=5)
    expected = int(found[1]) if (found := re.search(r"^exit (\d+)$", shown, re.MULTILINE)) else 0
    assert result.code == expected, result
    # Under mpirun, the output is a terminal's.
    lines = {without_numbers(re.sub(r"\x1b\[\d*m", "", line)) for line in (result.out + result.err).splitlines()}
    for line in shown.replace("…\n", "").splitlines():
        assert without_numbers(line) in lines, (line, result)
