"""`jaxrun doctor` on three hosts: nothing is found where nothing is wrong, and each fault is named with its host."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cluster_fixture import HOSTS, Bed, JobRunner
from harness import MADE_NVML, Result, extended, write_fake_runtime
from launch_modes import BASIC, LAUNCHED, MPICH, OPEN_MPI_5, LaunchMode
from state import address

IS_GPU = "run('gpu'); done()"
CPU_IS_GPU = """
from jaxrun_runtime import nccl_network
watch = nccl_network.watch
nccl_network.watch = lambda env, platform: watch(env, "gpu")
"""
WRITES_AS_NCCL = """
import os, threading
from jax.experimental import multihost_utils
multihost_utils.process_allgather(1)
with open(os.environ.get("NCCL_DEBUG_FILE", os.devnull), "w") as file:
    print("n1:1:2 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)", file=file)
    print("n1:1:2 [0] NCCL INFO Using network AWS Libfabric", file=file)
for thread in threading.enumerate():
    if thread.name == "jaxrun-nccl":
        thread.join()
"""
MakeRunner = Callable[[LaunchMode], JobRunner]
BY_MPICH, BY_OPEN_MPI = LaunchMode(MPICH, LAUNCHED), LaunchMode(OPEN_MPI_5, LAUNCHED)


def examine(runner: JobRunner, *words: str) -> Result:
    """Run the doctor, which leaves nothing: neither on any host nor in its directory."""
    command = runner.mode.command(HOSTS, *words)
    command.insert(command.index("jaxrun") + 1, "doctor")
    before = set(runner.directory.iterdir())
    with runner.bed.typed(runner.mode.host, *command, directory=runner.directory, env={"COLUMNS": "80"}) as job:
        result = job.result()
        job.gone()
    assert set(runner.directory.iterdir()) - before <= {runner.directory / "out", runner.directory / "err"}
    return result


def found(result: Result) -> list[tuple[str, str, str]]:
    """Check, level and text of what is not as it should be, besides the fault handler of the Python that tests us."""
    content: dict[str, Any] = json.loads(result.out)
    assert content["exit_code"] == result.code
    bad = [one for one in content["findings"] if one["level"] != "ok"]
    return [(one["check"], one["level"], one["text"]) for one in bad if "fault handler" not in one["text"]]


@pytest.mark.extended
@pytest.mark.parametrize("mode", [BASIC[0], extended(BASIC[1])], ids=[str(mode) for mode in BASIC])
def test_nothing_is_found_on_three_hosts_that_are_alike(make_runner: MakeRunner, mode: LaunchMode) -> None:
    result = examine(make_runner(mode), "--json")
    assert result.code == 0 and found(result) == [], result
    content = json.loads(result.out)
    assert list(content["hosts"]) == list(HOSTS)
    assert {(way["from"], way["to"], way["interface"]) for way in content["connections"]} == {
        (one, other, "eth0") for one in HOSTS for other in HOSTS if one != other
    }
    names = [timing["collective"] for timing in content["collectives"]]
    assert set(names) == {"psum", "all_gather", "ppermute"}


@pytest.mark.extended
def test_each_host_with_a_fault_is_named_with_it(bed: Bed, make_runner: MakeRunner, tmp_path: Path) -> None:
    """On h1 its own name, on h2 a full disk and few open files, on h3 another version and no shared directory."""
    wrapper = tmp_path.parent / f"{tmp_path.name}-ssh"
    wrapper.write_text('#!/bin/sh\ncase "$*" in *h2*) ulimit -n 64 ;; esac\nexec ssh "$@"\n')
    wrapper.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(wrapper.unlink)
        stack.enter_context(
            replaced(bed, "h1", Path("/etc/hosts"), lambda text: text.replace(f"{address('h1')} h1", ""))
        )
        stack.enter_context(full_disk(bed, "h2", f"{bed.root}/hosts/h1/tmp"))
        stack.enter_context(
            replaced(bed, "h3", jaxlib_metadata(), lambda text: text.replace("\nVersion: ", "\nVersion: 9."))
        )
        stack.enter_context(mounted(bed, "h3", "-t", "tmpfs", "tmpfs", str(tmp_path)))
        result = examine(make_runner(BY_MPICH), "--json", "--mpi-args", f"-launcher-exec {wrapper}")
    version = metadata.version("jaxlib")
    assert result.code == 69, result
    assert [(check, level, text.partition(", where")[0]) for check, level, text in found(result)] == [
        ("versions", "failure", f"jaxlib differs: {version} on h1, h2; 9.{version} on h3"),
        ("names", "warning", "h1: its own name has no address"),
        ("storage", "warning", f"h3: the files of a job in {tmp_path} are not seen there"),
        ("storage", "failure", f"h2: nothing can be written to {bed.root}/hosts/h1/tmp: No space left on device"),
        ("limits", "failure", "h2: a process may open 64 files"),
    ]


@pytest.mark.extended
def test_a_host_that_nobody_knows_is_named(make_runner: MakeRunner) -> None:
    result = examine(make_runner(BY_OPEN_MPI), "-H", "h1:1,h9:1", "-n", "2", "--json")
    assert result.code == 69, result
    assert found(result)[0] == ("start", "failure", "h9 cannot be reached from here: its name does not resolve"), result


@pytest.mark.extended
def test_two_hosts_that_do_not_reach_each_other_are_named_before_a_job_hangs_on_them(
    bed: Bed, make_runner: MakeRunner
) -> None:
    bed.inside("h2", "ip", "route", "add", "blackhole", f"{address('h3')}/32")
    try:
        result = examine(make_runner(BY_OPEN_MPI), "--json")
    finally:
        bed.inside("h2", "ip", "route", "del", "blackhole", f"{address('h3')}/32")
    assert result.code == 69, result
    checks = {check: text for check, _, text in found(result)}
    assert checks["start"].startswith("the hosts cannot all connect to each other")
    assert "h2 cannot connect to h3" in checks["network"] and "h1" not in checks["network"]


@pytest.mark.extended
@pytest.mark.parametrize("mode", [BASIC[0], extended(BASIC[1])], ids=[str(mode) for mode in BASIC])
def test_a_job_of_gpu_hosts_says_by_which_network_nccl_will_send(
    bed: Bed, make_runner: MakeRunner, mode: LaunchMode
) -> None:
    """The GPUs are made, the interface and its name are real: a fabric whose devices a container would hide."""
    runner = make_runner(mode)
    given = write_fake_runtime(runner.directory)
    variables = {"PYTHONPATH": f"{given['PYTHONPATH']}:{MADE_NVML}", "JAX_PROCESS_INDEX": "0"}
    options = ("--platform", "cuda", "--env", "NCCL_SOCKET_IFNAME=ib", "by_hand.py")
    with ExitStack() as stack:
        for number, host in enumerate(HOSTS, 1):
            stack.enter_context(interface(bed, host, "hsn0", f"10.78.0.{number}/24"))
        result = runner.jaxrun(*options, *[IS_GPU] * 3, env=variables)
    assert result.code == 0, result
    (line,) = (line for line in result.err.splitlines() if line.startswith("jaxrun: fabric"))
    found = line.removeprefix("jaxrun: fabric: ").split("; ")
    assert found == [
        "1 NIC (hsn0), no net plugin",
        "h1, h2, h3: hsn0 exists, but neither /sys/class/cxi nor /sys/class/infiniband does: NCCL uses TCP",
        "h1, h2, h3: NCCL_SOCKET_IFNAME=ib names no interface of this host",
        "JAX_PROCESS_INDEX: 0 in all ranks, as $SLURM_PROCID is in a batch script",
        "jaxrun doctor says what to do",
    ]


@pytest.mark.extended
def test_the_network_that_nccl_uses_is_reported_after_the_first_collective(make_runner: MakeRunner) -> None:
    """Real ranks on the CPU that take it for a GPU, and write what NCCL would."""
    runner = make_runner(BASIC[0])
    (runner.directory / "sitecustomize.py").write_text(CPU_IS_GPU)
    (runner.directory / "program.py").write_text(WRITES_AS_NCCL)
    result = runner.jaxrun("program.py", env={"PYTHONPATH": str(runner.directory)})
    assert result.code == 0, result
    lines = [line for line in result.err.splitlines() if "NCCL" in line]
    assert lines == ["[0] jaxrun: NCCL's network between hosts: AWS Libfabric (cxi)"] and result.out == "", result


@contextmanager
def interface(bed: Bed, host: str, name: str, address: str) -> Iterator[None]:
    """Let a host have a network interface with an address, which leads nowhere."""
    bed.inside(host, "ip", "link", "add", name, "type", "veth", "peer", "name", "far-end")
    try:
        bed.inside(host, "ip", "address", "add", address, "dev", name)
        for end in (name, "far-end"):
            bed.inside(host, "ip", "link", "set", end, "up")
        yield
    finally:
        bed.inside(host, "ip", "link", "del", name)


def jaxlib_metadata() -> Path:
    """What says which version of jaxlib is installed."""
    (path,) = (file for file in metadata.files("jaxlib") or () if file.name == "METADATA")
    return Path(str(path.locate()))


@contextmanager
def mounted(bed: Bed, host: str, *words: str) -> Iterator[None]:
    """mount WORDS on a host, and nowhere else; the last word is where."""
    bed.inside(host, "mount", *words)
    try:
        yield
    finally:
        bed.inside(host, "umount", words[-1])


@contextmanager
def replaced(bed: Bed, host: str, path: Path, change: Callable[[str], str]) -> Iterator[None]:
    """Let a host see another text in a file."""
    text = change(bed.inside(host, "cat", str(path)))
    other = bed.root / f"{host}-{path.name}"
    other.write_text(text)
    with mounted(bed, host, "--bind", str(other), str(path)):
        yield
    other.unlink()


@contextmanager
def full_disk(bed: Bed, host: str, path: str) -> Iterator[None]:
    """Let a directory of a host be on a disk without room."""
    with mounted(bed, host, "-t", "tmpfs", "-o", "size=64k", "tmpfs", path):
        bed.inside(host, "sh", "-c", f"cat /dev/zero >{path}/all 2>/dev/null || true")
        yield
