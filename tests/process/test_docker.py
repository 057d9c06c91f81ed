"""docker/ agrees with itself and with the checkout; that the images build and run, docker/README.md says."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from jaxrun.job.hosts import expand_node_list

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(path for path in DOCKER.glob("Dockerfile*") if path.suffix != ".dockerignore")
COMPOSE = (DOCKER / "compose.yaml").read_text()
README = (DOCKER / "README.md").read_text()
COMMANDS = re.findall(r"(?:^\$ |`)(docker [^`\n]+)", README, re.MULTILINE)
by_name = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


def instructions(dockerfile: Path) -> list[tuple[str, list[str]]]:
    """Each instruction with its words; comments are left out, continued lines joined."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(words[0], words[1:]) for words in map(str.split, joined.splitlines()) if words]


def allowed(dockerfile: Path) -> list[str]:
    """What the build context of the Dockerfile is limited to."""
    lines = dockerfile.with_name(f"{dockerfile.name}.dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    return [line.removeprefix("!") for line in lines if line.startswith("!")]


def section(title: str) -> str:
    """The indented lines of a top-level entry of compose.yaml."""
    found = re.search(rf"^{title}:\n((?: .*\n|\n)+)", COMPOSE, re.MULTILINE)
    assert found, title
    return found[1]


def entries(title: str) -> list[str]:
    return re.findall(r"^  (\w+):", section(title), re.MULTILINE)


@by_name
def test_every_source_of_a_copy_is_in_the_checkout_and_in_the_build_context(dockerfile: Path) -> None:
    copies = [words for name, words in instructions(dockerfile) if name == "COPY"]
    sources = [source for words in copies if not words[0].startswith("--from=") for source in words[:-1]]
    assert {"pyproject.toml", "README.md", "launcher", "runtime"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(Path(source).is_relative_to(path) for path in allowed(dockerfile)), source


def test_the_services_are_the_controller_and_the_nodes_of_slurm_conf_by_their_host_names() -> None:
    conf = dict(re.findall(r"^(\w+)=(\S+)", (DOCKER / "slurm/slurm.conf").read_text(), re.MULTILINE))
    nodes = list(expand_node_list(conf["NodeName"]))
    services = entries("services")
    assert services == [conf["SlurmctldHost"], *nodes]
    assert re.findall(r"hostname: (\w+)", COMPOSE) == services
    waits = {tuple(words) for words in map(shlex.split, re.findall(r"command: \[(.*)\]", COMPOSE))}
    assert waits == {("slurmctld,", *(f"{node}," for node in nodes[:-1]), nodes[-1]), ("slurmd,", services[0])}


def test_the_commands_of_the_readme_name_files_services_and_programs_that_exist() -> None:
    assert len(COMMANDS) >= 10
    for command in COMMANDS:
        words = shlex.split(command)
        for before, word in pairwise(words):
            if before == "--file":
                assert (ROOT / word).is_file(), command
            elif before == "exec":
                assert word in entries("services"), command
            elif before == "-m":
                assert (ROOT / "runtime" / f"{word.replace('.', '/')}.py").is_file(), command
