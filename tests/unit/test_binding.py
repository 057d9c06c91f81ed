"""Which cores each rank of a host stays on: next to its GPUs, a share of its own, or all."""

import os

import pytest
from simulation import make_registry, report

from jaxrun.protocol.probe_messages import Gpus, Machine
from jaxrun.spec.backends.local import plan
from jaxrun.spec.job import devices
from jaxrun.spec.job.binding import RankCores, choose_cores
from jaxrun.spec.job.devices import amd_cards, cuda_gpus, rocm_gpus
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.nvml import GpuCard, NvmlReading
from jaxrun.spec.job.render import render_plan
from jaxrun.text import format_ranges

# Two NUMA nodes of eight cores with two hardware threads each, a GPU near each; the threads of a core side by side.
LEFT, RIGHT = "0-7,16-23", "8-15,24-31"
ALL = tuple(core for first in range(16) for core in (first, first + 16))
ON_LEFT, ON_RIGHT, UNKNOWN = RankCores(ALL, (LEFT,)), RankCores(ALL, (RIGHT,)), RankCores(ALL, ("",))


def chosen(mode, *ranks, on_cpu=False, all_cores=32):
    return [format_ranges(cores, ",") for cores in choose_cores(mode, ranks, on_cpu=on_cpu, all_cores=all_cores)]


@pytest.mark.parametrize(
    ("mode", "ranks", "expected"),
    [
        ("auto", (ON_LEFT, ON_LEFT, ON_RIGHT), [LEFT, LEFT, RIGHT]),
        ("gpu", (ON_LEFT, ON_RIGHT), [LEFT, RIGHT]),
        ("cores", (ON_LEFT, ON_RIGHT), [LEFT, RIGHT]),
        ("cores", (ON_LEFT, ON_LEFT, ON_RIGHT), ["0-3,16-19", "4-7,20-23", RIGHT]),
        ("none", (ON_LEFT, ON_RIGHT), ["", ""]),
        ("auto", (RankCores(ALL, (LEFT, RIGHT)),), [""]),  # its GPUs are on both nodes
        ("auto", (RankCores(ALL, ("0-31",)), UNKNOWN), ["", ""]),  # one node, or a kernel that does not say
        ("auto", (RankCores(ALL[:8], (LEFT,)), RankCores(ALL[8:], (LEFT,))), ["", ""]),  # Slurm has bound them
        ("gpu", (RankCores(ALL[8:], (LEFT,)),), ["4-7,20-23"]),
        ("gpu", (RankCores((0, 16), (RIGHT,)),), [""]),  # which may use none of those
        ("cores", (RankCores(ALL),) * 2, ["0-7,16-23", "8-15,24-31"]),
        ("cores", (RankCores((0, 1, 2)),) * 2, ["0", "1-2"]),
        ("cores", (RankCores((4, 5)),) * 3, ["4", "5", "4"]),
        ("cores", (RankCores((0, 1)), RankCores((2, 3))), ["", ""]),
    ],
)
def test_a_rank_gets_the_cores_of_the_mode(mode, ranks, expected):
    assert chosen(mode, *ranks) == expected


def test_cpu_ranks_get_one_core_each_where_they_outnumber_those_that_they_share():
    shared = (RankCores((0, 1)),)
    assert chosen("auto", *shared * 3, on_cpu=True) == ["0", "1", "0"]
    assert chosen("auto", *shared * 2, on_cpu=True) == ["", ""]
    assert chosen("none", *shared * 3, on_cpu=True) == [""] * 3
    assert chosen("auto", RankCores((0,)), RankCores((1,)), on_cpu=True) == ["", ""]


@pytest.fixture
def pci(tmp_path):
    """A made /sys/bus/pci/devices with a device on each NUMA node."""
    for address, cores in (("0000:3b:00.0", LEFT), ("0001:d8:1f.7", RIGHT)):
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(f"{cores}\n")
    return str(tmp_path)


def test_the_kernel_says_which_cores_are_next_to_each_visible_gpu(pci):
    cards = (
        GpuCard("GPU-0", "H", pci="0000:3b:00.0"),
        GpuCard("GPU-1", "H", ("MIG-1",), pci="0001:d8:1f.7"),
        GpuCard("GPU-2", "H", pci="0000:99:00.0"),
        GpuCard("GPU-3", "H"),
    )
    reading = NvmlReading("580", cards)
    assert cuda_gpus({"CUDA_VISIBLE_DEVICES": "3,2,0"}, reading, pci).cores == ("", "", LEFT)
    assert cuda_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1"}, reading, pci).cores == (RIGHT,)
    assert rocm_gpus({"ROCR_VISIBLE_DEVICES": "1,0"}, cards[::2], pci).cores == ("", LEFT)


def test_the_place_of_an_amd_gpu_is_read_from_its_node(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "properties").write_text("simd_count 304\nunique_id 255\nlocation_id 55551\ndomain 1\n")
    assert [card.pci for card in amd_cards(f"{tmp_path}/*")] == ["0001:d8:1f.7"]


@pytest.mark.parametrize(
    ("siblings", "expected"), [("0", (0, 1, 2, 3)), ("0-1", (0, 1, 2, 3)), ("0,2", (0, 2, 1, 3)), ("", (0, 1, 2, 3))]
)
def test_hardware_threads_of_a_core_are_side_by_side(tmp_path, monkeypatch, siblings, expected):
    (tmp_path / "siblings").write_text(siblings)
    monkeypatch.setattr(devices, "_SIBLINGS", str(tmp_path / "siblings"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert devices.probe_machine(["cpu"], {}).cores == expected


def test_the_plan_of_one_machine_shows_the_cores_of_each_rank():
    machine = Machine("box", ALL, {"cuda": Gpus(("H",) * 2, "NVML", cores=(LEFT, RIGHT))}, all_cores=32)
    made = plan(Job(program=("a.py",)), {}, "0" * 32, machine)
    rows = [line.split()[-1] for line in render_plan(made, {}).splitlines() if line.startswith(("0  ", "1  "))]
    assert rows == [LEFT, RIGHT]
    (unbound,) = plan(Job(program=("a.py",), bind="none", processes=1), {}, "0" * 32, machine).workers
    assert unbound.cpus == ()


def test_agents_are_told_which_cores_their_ranks_stay_on():
    def cores(bind, **changes):
        registry = make_registry(4, bind=bind, platform="auto")
        more = {"cores": ALL, "all_cores": 32, "gpu_cores": (LEFT, RIGHT), **changes}
        for rank, host in enumerate(("h1", "h1", "h2", "h2")):
            registry.add(report(rank, host, 4, gpus=(0, 1), **more))
        return [format_ranges(start.worker.cpus, ",") for start in registry.assign().starts]

    assert cores("auto") == [LEFT, RIGHT, LEFT, RIGHT]
    assert cores("none") == [""] * 4
    assert cores("auto", all_cores=64) == [""] * 4
    assert cores("gpu", all_cores=64) == [LEFT, RIGHT, LEFT, RIGHT]
    assert cores("auto", gpu_cores=()) == [""] * 4
