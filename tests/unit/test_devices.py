"""GPUs, counted as CUDA does, how busy and how full they are, by a driver that is made here; their cores."""

import os

import pytest

from jaxrun.node.agent import gpus
from jaxrun.node.agent.gpus import GpuMemory, loads_of_ranks
from jaxrun.spec.job import devices
from jaxrun.spec.job.devices import probe_machine
from jaxrun.spec.job.nvml import GpuCard, GpuUsage, NvmlReading

GIB = 2**30
_EIGHT = tuple(GpuCard(f"GPU-{i}aaaa-bbbb", f"H{i}") for i in range(8))
_MIG = (GpuCard("GPU-0aaa", "A100"), GpuCard("GPU-1bbb", "A100", ("MIG-1111", "MIG-1222")))


@pytest.mark.parametrize(
    ("cards", "value", "expected"),
    [
        (_EIGHT, None, "GPU-0 GPU-1 GPU-2 GPU-3 GPU-4 GPU-5 GPU-6 GPU-7"),
        (_EIGHT, "", ""),
        (_EIGHT, "-1", ""),
        (_EIGHT, "3, 2,-1,1", "GPU-3 GPU-2"),
        (_EIGHT, "0,8,1", "GPU-0"),
        (_EIGHT, "0,,1", "GPU-0"),
        (_EIGHT, "1,2,1", ""),
        (_EIGHT, "GPU-5,GPU-0aa", "GPU-5 GPU-0"),
        (_EIGHT, "GPU-", ""),
        (_EIGHT, "GPU-1,GPU-x,GPU-2", "GPU-1"),
        (_EIGHT, "GPU-1,GPU-1aaaa", ""),
        (_EIGHT, "MIG-1", ""),
        (_MIG, None, "MIG-1111"),  # a process sees one MIG device, and then no whole GPU
        (_MIG, "0", "GPU-0"),
        (_MIG, "1", "MIG-1111"),
        (_MIG, "0,1", "MIG-1111"),
        (_MIG, "MIG-1222", "MIG-1222"),
        (_MIG, "MIG-1", ""),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(cards, value, expected):
    assert " ".join(uuid.partition("aaa")[0] for uuid, _ in devices.visible_devices(cards, value)) == expected


def test_amd_gpus_are_the_nodes_with_simd_units_which_say_where_they_are(tmp_path):
    for node, simd, unique in ((0, 0, 0), (2, 304, 255), (10, 304, 4096)):
        (tmp_path / str(node)).mkdir()
        text = f"cpu_cores_count 0\nsimd_count {simd}\nunique_id {unique}\nlocation_id 55551\ndomain {node}\n"
        (tmp_path / str(node) / "properties").write_text(text)
    (tmp_path / "3").mkdir()
    found = [(card.uuid, card.pci) for card in devices.amd_cards(f"{tmp_path}/*")]
    assert found == [("GPU-ff", "0002:d8:1f.7"), ("GPU-1000", "000a:d8:1f.7")]


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 8),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7"}, 4),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "0,3"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "4", "HIP_VISIBLE_DEVICES": "4"}, 0),
        ({"HIP_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_the_variables_of_rocm_select_one_after_the_other(environ, count):
    gpus = devices.rocm_gpus(environ, _EIGHT)
    assert len(gpus.names) == count
    assert gpus.visible == " ".join(f"{name}={value}" for name, value in environ.items())


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        ({}, [], False),
        ({}, ["/dev/accel0"], True),
        ({}, ["/dev/vfio/0"], False),
        ({"TPU_WORKER_ID": "0"}, ["/dev/vfio/0"], True),
        ({"TPU_WORKER_ID": "0"}, [], False),
    ],
)
def test_a_tpu_host_is_known_by_its_devices(environ, files, expected):
    def listing(pattern):
        return [file for file in files if file.startswith(pattern.split("[")[0])]

    assert devices.has_tpu(environ, listing) is expected


# ---- GPUs: the next attempt waits until they are as free as before the first


@pytest.fixture
def wait(monkeypatch):
    """wait(USED…) → (seconds that were waited for, what was said); the used GiB of GPU-1, one for each look."""

    def run(*used, stopped=lambda: False):
        now, said, left = [0.0], [], list(used)

        def ask():
            count = left.pop(0) if len(left) > 1 else left[0]
            return NvmlReading("", (GpuCard("GPU-1", "H"),), {"GPU-1": GpuUsage(0.0, int(count * GIB), 80 * GIB)})

        monkeypatch.setattr(gpus.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(gpus.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
        GpuMemory({}, ask).wait_until_free(said.append, stopped)
        return now[0], said

    return run


def test_memory_left_by_an_attempt_is_awaited_for_a_while_without_a_message(wait):
    assert wait(0, 0) == (0.0, [])
    assert wait(30, 30.5) == (0.0, [])  # others hold it
    assert wait(1, 61, stopped=lambda: True) == (0.0, [])
    seconds, said = wait(0, 60, 60, 60, 1)
    assert 0.1 < seconds < 0.2 and said == []


def test_a_long_wait_is_reported_once_and_ends(wait):
    seconds, said = wait(1, 61)
    assert 30 < seconds < 31
    assert said == [
        "waiting until the GPU memory of the previous attempt is free: 60.0 GiB of GPU-1",
        "GPU memory is still not free after 30 s: 60.0 GiB of GPU-1; the next attempt starts nevertheless",
    ]


@pytest.mark.parametrize(
    "reading", [NvmlReading(trouble="no driver"), NvmlReading("", (GpuCard("G", "H"),), {"G": GpuUsage()})]
)
def test_what_does_not_tell_its_memory_is_not_waited_for(reading):
    GpuMemory({}, lambda: reading).wait_until_free(pytest.fail, lambda: False)


@pytest.mark.parametrize(
    ("visible", "loads"),
    [
        ("0,1", {0: (97.0, 2**30), 1: (3.0, 2**20), 2: (50.0, 2**30 + 2**20)}),
        ("1", {0: (3.0, 2**20), 1: (-1.0, -1), 2: (3.0, 2**20)}),
        ("MIG-d", {0: (-1.0, 2**21), 1: (-1.0, -1), 2: (-1.0, 2**21)}),
    ],
)
def test_each_rank_has_the_figures_of_its_own_gpus(visible, loads):
    used = {"GPU-aa": (97.0, GIB), "GPU-bb": (3.0, 2**20), "GPU-cc": (-1.0, 2**31), "MIG-d": (-1.0, 2**21)}
    cards = (GpuCard("GPU-aa", "H"), GpuCard("GPU-bb", "H"), GpuCard("GPU-cc", "H", ("MIG-d",)))
    reading = NvmlReading("", cards, {uuid: GpuUsage(*known) for uuid, known in used.items()})
    assert loads_of_ranks(reading, visible, {0: (0,), 1: (1,), 2: (0, 1)}) == loads


@pytest.fixture
def pci(tmp_path):
    """A made /sys/bus/pci/devices with a device on each NUMA node."""
    for address, cores in (("0000:3b:00.0", "0-7"), ("0001:d8:1f.7", "8-15")):
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
    assert devices.cuda_gpus({"CUDA_VISIBLE_DEVICES": "3,2,0"}, reading, pci).cores == ("", "", "0-7")
    assert devices.cuda_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1"}, reading, pci).cores == ("8-15",)
    assert devices.rocm_gpus({"ROCR_VISIBLE_DEVICES": "1,0"}, cards[::2], pci).cores == ("", "0-7")


@pytest.mark.parametrize(
    ("siblings", "expected"), [("0", (0, 1, 2, 3)), ("0-1", (0, 1, 2, 3)), ("0,2", (0, 2, 1, 3)), ("", (0, 1, 2, 3))]
)
def test_hardware_threads_of_a_core_are_side_by_side(tmp_path, monkeypatch, siblings, expected):
    (tmp_path / "siblings").write_text(siblings)
    monkeypatch.setattr(devices, "_SIBLINGS", str(tmp_path / "siblings"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert probe_machine(["cpu"], {}).cores == expected
