"""A made NVML, in the place of the package nvidia-ml-py: one H200, or the GPUs that a test puts into `cards`.

Folders of tests that start processes put this one into their PYTHONPATH.
"""

import threading
from dataclasses import dataclass, field
from operator import attrgetter
from types import SimpleNamespace

NVML_ERROR_LIBRARY_NOT_FOUND = 12
DRIVER = "580.159.04"


class NVMLError(Exception):
    def __init__(self, value, text="not supported"):
        super().__init__(text)
        self.value = value


@dataclass
class Device:
    """A GPU, or a MIG device; `load`, `memory` (used, all) and `pci` are None where NVML does not know them."""

    uuid: str
    name: str = "NVIDIA H200"
    load: float | None = 0.0
    memory: tuple[int, int] | None = (0, 141 * 2**30)
    slots: list["Device | None"] = field(default_factory=list)  # for MIG devices
    pci: str | None = None


cards = [Device("GPU-11111111-0000-0000-0000-000000000000")]
trouble = None  # an NVMLError, by which NVML refuses to start
goes_on = threading.Event()  # NVML answers only while this is set
goes_on.set()
is_open = 0


def nvmlInit():
    global is_open
    goes_on.wait()
    if trouble is not None:
        raise trouble
    is_open += 1


def nvmlShutdown():
    global is_open
    is_open -= 1


def known(value):
    if value is None:
        raise NVMLError(3)
    return value


def nvmlDeviceGetMigDeviceHandleByIndex(device, index):
    return known(device.slots[index])


def nvmlDeviceGetUtilizationRates(device):
    return SimpleNamespace(gpu=known(device.load))


def nvmlDeviceGetMemoryInfo(device):
    used, total = known(device.memory)
    return SimpleNamespace(used=used, total=total)


def nvmlDeviceGetPciInfo(device):
    return SimpleNamespace(busId=known(device.pci).encode())


def nvmlDeviceGetMaxMigDeviceCount(device):
    return len(known(device.slots or None))


def nvmlDeviceGetCount():
    return len(cards)


def nvmlDeviceGetHandleByIndex(index):
    return cards[index]


def nvmlSystemGetDriverVersion():
    return DRIVER


def nvmlDeviceGetName(device):
    return device.name.encode()  # as nvidia-ml-py 11 returns it


nvmlDeviceGetUUID = attrgetter("uuid")
