"""docker/ agrees with itself and with the checkout; that the images build and run, docker/README.md says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from jaxrun.job.hosts import expand_node_list

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(path for path in DOCKER.glob("Dockerfile*") if path.suffix != ".dockerignore")
SCRIPTS = sorted(path for path in DOCKER.rglob("*") if path.is_file() and path.read_text().startswith("#!"))
COMPOSE = (DOCKER / "compose.yaml").read_text()
README = (DOCKER / "README.md").read_text()
COMMANDS = re.findall(r"(?:^\$ |`)(docker [^`\n]+)", README, re.MULTILINE)
by_name = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


def instructions(dockerfile: Path) -> list[tuple[str, list[str]]]:
    """Each instruction with its words; comments are left out, continued lines joined."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(words[0], words[1:]) for words in map(str.split, joined.splitlines()) if words]


def stages(dockerfile: Path) -> list[str]:
    return [words[2] for name, words in instructions(dockerfile) if name == "FROM"]


def arguments(dockerfile: Path) -> dict[str, str]:
    return dict(words[0].split("=", 1) for name, words in instructions(dockerfile) if name == "ARG")


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


def section_of_readme(start: str) -> str:
    return README[README.index(start) :].split("\n## ")[0]


@by_name
def test_every_source_of_a_copy_is_in_the_checkout_and_in_the_build_context(dockerfile: Path) -> None:
    copies = [words for name, words in instructions(dockerfile) if name == "COPY"]
    sources = [source for words in copies if not words[0].startswith("--from=") for source in words[:-1]]
    assert {"pyproject.toml", "README.md", "launcher", "runtime"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(Path(source).is_relative_to(path) for path in allowed(dockerfile)), source


@by_name
def test_every_stage_is_made_before_it_is_used_and_begins_with_the_base_that_was_asked_for(dockerfile: Path) -> None:
    made: list[str] = []
    for name, words in instructions(dockerfile):
        if name == "FROM":
            assert words[0] in ("${BASE}", *made) and words[1] == "AS"
            made.append(words[2])
        elif name == "COPY" and words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in made
    assert "install" in made and made[-1] == "jaxrun"


@by_name
def test_the_last_user_of_every_image_is_not_root(dockerfile: Path) -> None:
    user: dict[str, str] = {}
    stage = ""
    for name, words in instructions(dockerfile):
        if name == "FROM":
            stage = words[2]
            user[stage] = user.get(words[0], "root")
        elif name == "USER":
            user[stage] = words[0]
    assert {user[stage] for stage in stages(dockerfile) if stage in ("jaxrun", "cluster")} == {"1000"}


@by_name
def test_the_files_have_what_a_plain_builder_understands(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert "# syntax=" not in text and "<<" not in text
    assert next(name for name, _ in instructions(dockerfile)) == "ARG"  # BASE can be chosen


@by_name
def test_the_extras_that_are_installed_exist(dockerfile: Path) -> None:
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().split("optional-dependencies]")[1], re.M)
    assert set(arguments(dockerfile)["EXTRAS"].split(",")) <= set(known)


def test_the_readme_tells_the_build_arguments_and_their_defaults() -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section_of_readme("What can be chosen"), re.MULTILINE))
    assert set(table) == {name for dockerfile in DOCKERFILES for name in arguments(dockerfile)}
    for dockerfile in DOCKERFILES:
        for name, value in arguments(dockerfile).items():
            assert f"`{value}`" in table[name], (dockerfile.name, name)


def test_the_services_run_a_stage_of_the_dockerfile_and_use_volumes_that_are_declared() -> None:
    found = re.search(r"dockerfile: (\S+)\n +target: (\S+)\n", COMPOSE)
    assert found and found[2] in stages(ROOT / found[1])
    mounts = re.findall(r"^ +- (\w+):(/\S+)$", COMPOSE, re.MULTILINE)
    assert sorted(volume for volume, _ in mounts) == sorted(entries("volumes"))
    dockerfile = (ROOT / found[1]).read_text()
    assert all(f" {path}" in dockerfile for _, path in mounts)  # made there, so that the user may write there
    assert f"BASE: ${{BASE:-{arguments(ROOT / found[1])['BASE']}}}" in COMPOSE


def test_the_services_are_the_controller_and_the_nodes_of_slurm_conf_by_their_host_names() -> None:
    conf = dict(re.findall(r"^(\w+)=(\S+)", (DOCKER / "slurm/slurm.conf").read_text(), re.MULTILINE))
    nodes = list(expand_node_list(conf["NodeName"]))
    services = entries("services")
    assert services == [conf["SlurmctldHost"], *nodes]
    assert re.findall(r"hostname: (\w+)", COMPOSE) == services
    waits = {tuple(words) for words in map(shlex.split, re.findall(r"command: \[(.*)\]", COMPOSE))}
    assert waits == {("slurmctld,", *(f"{node}," for node in nodes[:-1]), nodes[-1]), ("slurmd,", services[0])}


def test_every_anchor_that_compose_refers_to_is_defined_before() -> None:
    for use in re.finditer(r"<<: \*(\w+)", COMPOSE):
        assert re.search(rf": &{use[1]}$", COMPOSE[: use.start()], re.MULTILINE), use[1]
    assert "\t" not in COMPOSE


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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_may_be_run_and_shellcheck_finds_nothing_in_it(script: Path) -> None:
    assert os.access(script, os.X_OK)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    assert shellcheck, "it comes with: pip install jaxrun[test]"
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_entry_point_is_a_script_of_these() -> None:
    assert [script.name for script in SCRIPTS] == ["node"]
    assert 'ENTRYPOINT ["node"]' in (DOCKER / "Dockerfile").read_text()
