"""scripts/testbed, for real: hosts, Slurm and mpirun on this machine as root."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from cluster_fixture import Bed

pytestmark = pytest.mark.extended


def traces(bed: Bed) -> tuple[object, ...]:
    """What a testbed of two hosts could leave on the machine, besides processes and its own directory."""
    devices = {"br0", "h1", "h2"} & set(os.listdir("/sys/class/net"))
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(bed.root) in line]
    return devices, mounts, Path("/etc/hosts").read_text()


def test_a_command_keeps_its_status_directory_arguments_and_environment(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTBED_WORD", "two  words")
    script = 'printf "%s|" "$TESTBED_WORD" "$PWD" "$@"; exit 7'
    output = bed.inside("h2", "sh", "-c", script, "sh", "a b", "", "--", "$HOME", status=7)
    assert output == f"two  words|{os.getcwd()}|a b||--|$HOME|"


def test_ssh_starts_afresh_on_the_other_host(bed: Bed) -> None:
    words = ("ssh", "-x", "-p", "22", "root@h2", "hostname;", "pwd;", "echo", "$CALLER'$A  b'; exit 5")
    assert bed.inside("h1", "env", "CALLER=1", *words, status=5) == "h2\n/root\n$A  b\n"
    assert "is not a host" in bed.run("ssh", "h9", "true", status=255)


@pytest.mark.parametrize("after", [0.1, 0.4, None])
def test_down_leaves_nothing_wherever_up_was_killed(machine: None, after: float | None) -> None:
    bed = Bed(Path(tempfile.mkdtemp(prefix="jrtb-")))
    before = traces(bed)
    starting = bed.start("up", "-H", "2")
    with suppress(subprocess.TimeoutExpired):
        starting.wait(after)
    if starting.poll() is None:
        os.kill(starting.pid, signal.SIGKILL)
    starting.communicate()
    if after is None:
        bed.run("cut", "h2")
        bed.run("off", "h2")
        # In a session of its own, without an environment that tells where it comes from.
        stray = ("env", "--ignore-environment", "setsid", "--fork", "sh", "-c", "sleep 300", str(bed.root))
        bed.inside("h1", "sh", "-c", '"$@" >/dev/null 2>&1', "sh", *stray)
        assert int(bed.row("h1")[5]) >= 2
    bed.run("down")
    assert bed.processes() == [] and not bed.root.exists()
    assert traces(bed) == before


def test_a_directory_with_other_files_is_left_alone(machine: None, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    bed = Bed(tmp_path)
    assert "holds other files" in bed.run("up", status=2)
    bed.run("down")
    assert (tmp_path / "etc").is_dir()
