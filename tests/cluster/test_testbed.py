"""scripts/testbed, for real: hosts, Slurm and mpirun on this machine as root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import launch_modes
import pytest
from cluster_fixture import HOSTS, TESTBED, Bed
from harness import TIME_LIMIT

pytestmark = pytest.mark.extended

CONNECT = """
import socket, sys, time
began = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 9), timeout=2)
except ConnectionRefusedError:
    print(time.monotonic() - began)
except OSError:
    pass
"""


def answer_time(bed: Bed, source: str, target: str) -> float | None:
    """Seconds until `target` has answered `source`; None if it does not."""
    output = bed.inside(source, sys.executable, "-c", CONNECT, target).strip()
    return float(output) if output else None


def traces(bed: Bed) -> tuple[object, ...]:
    """What a testbed of two hosts could leave on the machine, besides processes and its own directory."""
    devices = {"br0", "h1", "h2"} & set(os.listdir("/sys/class/net"))
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(bed.root) in line]
    return devices, mounts, Path("/etc/hosts").read_text()


def test_hosts_are_hosts_of_their_own(bed: Bed) -> None:
    look = 'hostname; cat /proc/sys/kernel/random/boot_id; getent hosts "$(hostname)"; ls /sys/class/net'
    seen = {host: bed.inside(host, "sh", "-c", look).split() for host in ("h1", "h2", "h3")}
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for number, (host, (name, boot_id, address, canonical, *devices)) in enumerate(seen.items(), start=1):
        assert (name, address, canonical, devices) == (host, f"10.77.0.{number}", host, ["eth0", "lo"])
        assert boot_id == bed.row(host)[2]
    assert len({machine, *(words[1] for words in seen.values())}) == 4


def test_a_command_keeps_its_status_directory_arguments_and_environment(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTBED_WORD", "two  words")
    script = 'printf "%s|" "$TESTBED_WORD" "$PWD" "$@"; exit 7'
    output = bed.inside("h2", "sh", "-c", script, "sh", "a b", "", "--", "$HOME", status=7)
    assert output == f"two  words|{os.getcwd()}|a b||--|$HOME|"


def test_each_host_has_temporary_files_of_its_own(bed: Bed) -> None:
    for host in ("ctl", "h1", "h2"):
        place = bed.inside(host, "sh", "-c", 'file=$(mktemp) && echo "${file%/*}"').strip()
        assert place == str(bed.root / "hosts" / host / "tmp")


def test_up_again_changes_nothing(bed: Bed) -> None:
    before = bed.run("status")
    assert bed.run("up") == ""
    assert bed.run("status") == before
    refusal = bed.run("up", "-H", "5", status=2)
    assert "up with 3 hosts, not 5" in refusal and "down, then scripts/testbed up -H 5" in refusal


@pytest.mark.usefixtures("mended")
def test_cut_and_mend(bed: Bed) -> None:
    bed.run("cut", "h2")
    assert bed.row("h2")[3] == "cut"
    assert "connect to host h2" in bed.inside("h1", "ssh", "h2", "true", status=255)
    assert answer_time(bed, "h2", "ctl") is None and answer_time(bed, "h1", "h3") is not None
    bed.run("mend", "h2")
    assert bed.row("h2")[3] == "up"
    # A question that was asked during the cut may still spoil the first one after it, as on a real network.
    assert any(answer_time(bed, "h1", "h2") is not None for _ in range(10))


def test_ssh_starts_afresh_on_the_other_host(bed: Bed) -> None:
    words = ("ssh", "-x", "-p", "22", "root@h2", "hostname;", "pwd;", "echo", "$CALLER'$A  b'; exit 5")
    assert bed.inside("h1", "env", "CALLER=1", *words, status=5) == "h2\n/root\n$A  b\n"
    assert "is not a host" in bed.run("ssh", "h9", "true", status=255)


def test_mpirun_reaches_the_hosts(bed: Bed) -> None:
    if reason := launch_modes.OPEN_MPI_5.missing():
        pytest.skip(reason)
    command = (launch_modes.OPEN_MPI_5.mpirun, "--allow-run-as-root", "--host", "h1,h2,h3")
    assert _hosts_in(bed.inside("h1", *command, "hostname")) == ["h1", "h2", "h3"]
    agent = ("--prtemca", "plm_ssh_agent", f"{TESTBED} ssh")
    environment = ("env", f"JAXRUN_TESTBED_DIR={bed.root}")
    assert _hosts_in(bed.inside("ctl", *environment, *command, *agent, "hostname")) == ["h1", "h2", "h3"]


def _hosts_in(text: str) -> list[str]:
    """The lines that are a host's name, sorted: under load mpirun adds warnings, and srun that it had to wait."""
    return sorted(line for line in text.splitlines() if line in HOSTS)


@pytest.mark.usefixtures("mended")
def test_off_ends_a_job_and_up_brings_the_host_back_as_a_new_boot(bed: Bed) -> None:
    first_boot = bed.row("h2")[2]
    job = bed.start("exec", "ctl", "--", "srun", "-N3", "sleep", "300")
    while sum(process.command == "sleep" for process in bed.job_processes()) < 3:  # Slurm calls it running before that
        assert job.poll() is None
        time.sleep(0.01)
    bed.run("off", "h2")
    assert bed.row("h2")[2:] == ["-", "off", bed.row("h2")[4], "-"]
    assert "h2 is off" in bed.inside("h2", "true", status=69)
    _, errors = job.communicate(timeout=TIME_LIMIT)
    assert job.returncode != 0 and "Node failure on h2" in errors
    bed.run("up")
    assert bed.row("h2")[3:5] == ["up", "idle"] and bed.row("h2")[2] not in ("-", first_boot)


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
