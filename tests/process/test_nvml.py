"""What NVML says of GPUs, by a stand-in for the driver; jaxrun asks in a thread, as a driver may be stuck."""

import importlib.util
import sys
import threading
from pathlib import Path

import pytest

from jaxrun.node.agent import gpus
from jaxrun.node.agent.gpus import GpuWatch
from jaxrun.node.agent.spawn import WorkerSetup
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.probe_messages import Gpus
from jaxrun.spec.job import nvml
from jaxrun.spec.job.devices import probe_machine
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.layout import decide_layout
from jaxrun.spec.job.nvml import GpuCard, GpuUsage, NvmlReading, ask_nvml

GIB = 2**30
LIMIT_S = 60.0
MADE_NVML = Path(__file__).parents[1] / "nvml/pynvml.py"


@pytest.fixture
def driver(monkeypatch):
    """The made NVML, with a whole GPU and one that is divided; its settings may be changed."""
    spec = importlib.util.spec_from_file_location("pynvml", MADE_NVML)
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pynvml", made)
    spec.loader.exec_module(made)
    mig = made.Device("MIG-2", load=None, memory=(2 * GIB, 10 * GIB))
    whole = made.Device("GPU-0", "NVIDIA Thing", 97.0, (GIB, 80 * GIB), pci="00000001:3B:00.0")
    made.cards = [whole, made.Device("GPU-1", load=None, memory=None, slots=[None, None, mig, None])]
    yield made
    made.goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "jaxrun-nvml":
            thread.join()


def test_nvml_tells_gpus_their_mig_devices_and_what_is_used_of_them(driver):
    assert ask_nvml(LIMIT_S) == NvmlReading(
        driver.DRIVER,
        (GpuCard("GPU-0", "NVIDIA Thing", pci="0001:3b:00.0"), GpuCard("GPU-1", "NVIDIA H200", ("MIG-2",))),
        {"GPU-0": GpuUsage(97.0, GIB, 80 * GIB), "GPU-1": GpuUsage(), "MIG-2": GpuUsage(-1.0, 2 * GIB, 10 * GIB)},
    )
    assert driver.is_open == 0


def test_why_nvml_does_not_answer_is_one_line_and_a_stuck_driver_is_not_waited_for(driver, monkeypatch):
    driver.trouble = driver.NVMLError(driver.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert ask_nvml(LIMIT_S).trouble == nvml.NO_DRIVER
    driver.trouble = driver.NVMLError(18, "Driver/library version mismatch")
    assert ask_nvml(LIMIT_S).trouble == "NVML does not answer: Driver/library version mismatch"
    driver.goes_on.clear()
    assert ask_nvml(0.01).trouble == "NVML has not answered within 0.01 s"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert ask_nvml(LIMIT_S).trouble == "the package nvidia-ml-py is not installed"


def test_for_the_cpu_no_driver_is_asked_and_automatically_only_one_of_which_there_is_a_sign(driver, monkeypatch):
    assert probe_machine(["cpu"], {}).gpus == {}
    monkeypatch.setattr(nvml, "_DRIVER_FILES", ())
    assert probe_machine(["cuda", "cpu"], {}).gpus == {"cuda": Gpus(trouble=nvml.NO_DRIVER)}
    found = {"cuda": Gpus(("NVIDIA Thing",), "NVML", "CUDA_VISIBLE_DEVICES=0", ("GPU-0",), cores=("",))}
    assert probe_machine(["cuda"], {"CUDA_VISIBLE_DEVICES": "0"}).gpus == found
    monkeypatch.setattr(nvml, "_DRIVER_FILES", ("/",))
    assert probe_machine(["cuda", "cpu"], {"CUDA_VISIBLE_DEVICES": "0"}).gpus == found


def test_a_driver_that_does_not_answer_is_reported_instead_of_the_gpus(driver, monkeypatch):
    monkeypatch.setattr(nvml, "_DRIVER_FILES", ("/",))
    driver.trouble = driver.NVMLError(18, "version mismatch")
    layout = decide_layout(Job(program=("a.py",)), probe_machine(["cuda", "cpu"], {}), {})
    assert layout.platform == "cpu"
    assert layout.notes == ("running on CPU: there is an NVIDIA driver, but NVML does not answer: version mismatch",)


def test_nobody_waits_for_how_busy_gpus_are_and_a_stuck_driver_is_asked_once(driver, monkeypatch):
    setup = WorkerSetup((), {}, (WorkerEnv("ab" * 16, 3, 4, 0, 1, "h1", local_device_ids=(0,)),))
    now = [100.0]
    monkeypatch.setattr(gpus.time, "monotonic", lambda: now[0])
    watch = GpuWatch(setup)
    driver.cards = driver.cards[:1]
    driver.goes_on.clear()
    for _ in range(3):
        assert watch.load_by_rank() == {}
        now[0] += 3.0
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "jaxrun-nvml")
    driver.goes_on.set()
    thread.join()
    assert watch.load_by_rank() == {3: (97.0, GIB)}
    watch.close()
    now[0] += 60.0
    assert watch.load_by_rank() == {}  # the last answer is too old
    watch.close()
