"""GPUs are counted as CUDA would enumerate them, from lists that are values here."""

import sys
from types import ModuleType

import pytest

from jaxrun.spec.job import devices
from jaxrun.spec.job.devices import GpuCard, probe_machine

_EIGHT = tuple(GpuCard(f"GPU-{i}aaaa-bbbb", f"H{i}") for i in range(8))
_MIG = (GpuCard("GPU-0aaa", "A100"), GpuCard("GPU-1bbb", "A100", ("MIG-1111", "MIG-1222")))


def _ordinals(value: str | None) -> list[int]:
    return [int(name[1:]) for _, name in devices.visible_devices(_EIGHT, value)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("", []),
        ("-1", []),
        ("3, 2,-1,1", [3, 2]),
        ("0,8,1", [0]),
        ("0,,1", [0]),
        ("1,2,1", []),
        ("GPU-5,GPU-0aa", [5, 0]),
        ("GPU-", []),
        ("GPU-1,GPU-x,GPU-2", [1]),
        ("GPU-1,GPU-1aaaa", []),
        ("MIG-1", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(value, expected):
    assert _ordinals(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ["MIG-1111"]),
        ("0", ["GPU-0aaa"]),
        ("1", ["MIG-1111"]),
        ("0,1", ["MIG-1111"]),
        ("MIG-1222", ["MIG-1222"]),
        ("MIG-1", []),
    ],
)
def test_a_process_sees_one_mig_device_and_then_no_whole_gpu(value, expected):
    assert [uuid for uuid, _ in devices.visible_devices(_MIG, value)] == expected


def test_the_first_probe_that_answers_counts():
    probes = {"NVML": lambda: None, "nvidia-smi": lambda: _EIGHT}
    assert devices.cuda_gpus({"CUDA_VISIBLE_DEVICES": "2,3"}, probes) == devices.Gpus(
        ("H2", "H3"), "nvidia-smi", "CUDA_VISIBLE_DEVICES=2,3", ("GPU-2aaaa-bbbb", "GPU-3aaaa-bbbb")
    )


def test_without_a_driver_there_are_no_gpus_but_one_that_does_not_answer_is_not_missing():
    assert devices.cuda_gpus({}, {}) == devices.Gpus((), "no NVIDIA driver was found", "")
    gpus = devices.cuda_gpus({}, {"NVML": lambda: None, "nvidia-smi": lambda: None})
    assert gpus.names == () and "NVML and nvidia-smi" in gpus.source


def test_nvidia_smi_lists_gpus_and_their_mig_devices():
    listing = (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)\n"
        "  MIG 1g.5gb      Device  1: (UUID: MIG-GPU-5d5ba0d6/7/0)\n"
        "GPU 1: NVIDIA H200 (SXM) (UUID: GPU-1)\n"
        "something else\n"
    )
    assert devices.parse_smi(listing) == (
        GpuCard(
            "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77",
            "NVIDIA A100-SXM4-40GB",
            ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-GPU-5d5ba0d6/7/0"),
        ),
        GpuCard("GPU-1", "NVIDIA H200 (SXM)"),
    )


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ('[ "$1" = -L ] && echo "GPU 0: Fake (UUID: GPU-0)"', (GpuCard("GPU-0", "Fake"),)),
        ("echo 'GPU 0: Fake (UUID: GPU-0)'; exit 9", None),
    ],
)
def test_nvidia_smi_on_the_path_is_used_unless_it_fails(tmp_path, script, found):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    assert devices.nvidia_probes({"PATH": f"{tmp_path}:/usr/bin:/bin"})["nvidia-smi"]() == found


class _Driver(ModuleType):
    """NVML as nvidia-ml-py spells it, with a whole GPU and one that has a MIG device in its slot 2."""

    class NVMLError(Exception):
        pass

    def __init__(self, answers: bool) -> None:
        super().__init__("pynvml")
        self.answers = answers
        self.open = 0
        self.nvmlDeviceGetCount = lambda: 2
        self.nvmlDeviceGetHandleByIndex = "GPU-{}".format
        self.nvmlDeviceGetUUID = str
        self.nvmlDeviceGetName = lambda handle: b"NVIDIA Thing"

    def nvmlInit(self):
        if not self.answers:
            raise self.NVMLError("no library")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        if handle == "GPU-0":
            raise self.NVMLError("not supported")
        return 4

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index != 2:
            raise self.NVMLError("not found")
        return f"MIG-{index}"


@pytest.fixture
def has_driver(tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{tmp_path}:/bin"}


def test_nvml_lists_gpus_and_their_mig_devices(monkeypatch, has_driver):
    driver = _Driver(answers=True)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    cards = devices.nvidia_probes(has_driver)["NVML"]()
    assert cards == (GpuCard("GPU-0", "NVIDIA Thing"), GpuCard("GPU-1", "NVIDIA Thing", ("MIG-2",)))
    assert driver.open == 0


@pytest.mark.parametrize("module", [None, _Driver(answers=False)], ids=["not installed", "does not answer"])
def test_without_nvml_the_next_probe_is_used(monkeypatch, has_driver, module):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert devices.nvidia_probes(has_driver)["NVML"]() is None


def test_probing_for_the_cpu_uses_no_driver(monkeypatch, has_driver):
    monkeypatch.setitem(sys.modules, "pynvml", _Driver(answers=True))
    assert probe_machine(["cpu"], has_driver).gpus == {}
    found = probe_machine(["cuda", "cpu"], {**has_driver, "CUDA_VISIBLE_DEVICES": "0"})
    assert found.gpus == {"cuda": devices.Gpus(("NVIDIA Thing",), "NVML", "CUDA_VISIBLE_DEVICES=0", ("GPU-0",))}
    assert found.cores and found.host


def test_amd_gpus_are_the_nodes_with_simd_units(tmp_path):
    for node, simd, unique in ((0, 0, 0), (2, 304, 255), (10, 304, 4096)):
        (tmp_path / str(node)).mkdir()
        text = f"cpu_cores_count 0\nsimd_count {simd}\nunique_id {unique}\n"
        (tmp_path / str(node) / "properties").write_text(text)
    (tmp_path / "3").mkdir()
    assert [card.uuid for card in devices.amd_cards(f"{tmp_path}/*")] == ["GPU-ff", "GPU-1000"]


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
    def listing(pattern: str) -> list[str]:
        return [file for file in files if file.startswith(pattern.split("[")[0])]

    assert devices.has_tpu(environ, listing) is expected
