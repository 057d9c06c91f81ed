"""Asks NVML, the library of NVIDIA's driver, for the GPUs of this machine; no other module does.

A driver in trouble may never answer. So a thread asks it, and callers wait only for a limited time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct, field

NO_DRIVER = "no NVIDIA driver was found"
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
_UNKNOWN = -1


class GpuCard(Struct, frozen=True):
    """A GPU as the driver lists it; `mig` has the UUIDs of its MIG devices, `pci` its address, "0000:3b:00.0"."""

    uuid: str
    name: str
    mig: tuple[str, ...] = ()
    pci: str = ""


class GpuUsage(Struct, frozen=True):
    """The load and memory of a GPU; -1 if unknown, for example the load of a GPU that is divided by MIG."""

    busy_percent: float = _UNKNOWN
    used_bytes: int = _UNKNOWN
    all_bytes: int = _UNKNOWN


class NvmlReading(Struct, frozen=True):
    """The answer of NVML.

    driver:   its version, "580.159.04"
    cards:    in the driver's order
    usage:    by the UUID of a card or of a MIG device
    trouble:  why there is no answer; empty if there is one
    """

    driver: str = ""
    cards: tuple[GpuCard, ...] = ()
    usage: Mapping[str, GpuUsage] = field(default_factory=dict)
    trouble: str = ""


class NvmlQuestion:
    """A question to NVML, asked at its creation in a thread of its own, which may outlive its caller."""

    def __init__(self) -> None:
        from threading import Thread

        self._reading: NvmlReading | None = None
        self._thread = Thread(target=self._ask, name="jaxrun-nvml", daemon=True)
        self._thread.start()

    def wait(self, limit_s: float) -> NvmlReading | None:
        """Return the answer; None if it has not come within `limit_s` seconds."""
        self._thread.join(limit_s)
        return self._reading

    def _ask(self) -> None:
        self._reading = _read_nvml()


def ask_nvml(limit_s: float) -> NvmlReading:
    """Ask NVML, and wait at most `limit_s` seconds."""
    return NvmlQuestion().wait(limit_s) or NvmlReading(trouble=f"NVML has not answered within {limit_s:g} s")


def has_driver() -> bool:
    """Whether there is a driver to ask; this check is faster than asking."""
    return any(map(os.path.exists, _DRIVER_FILES))


def _read_nvml() -> NvmlReading:
    try:
        import pynvml
    except ImportError:
        return NvmlReading(trouble="the package nvidia-ml-py is not installed")
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        is_missing = getattr(error, "value", None) == nvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return NvmlReading(trouble=NO_DRIVER if is_missing else f"NVML does not answer: {error}")
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        migs = [tuple(_mig_devices(nvml, handle)) for handle in handles]
        devices = [*handles, *(device for found in migs for device in found)]
        return NvmlReading(
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            cards=tuple(_card(nvml, handle, mig) for handle, mig in zip(handles, migs, strict=True)),
            usage={_uuid(nvml, device): _usage(nvml, device) for device in devices},
        )
    except nvml.NVMLError as error:
        return NvmlReading(trouble=f"NVML does not answer: {error}")
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _card(nvml: Any, handle: Any, mig: tuple[Any, ...]) -> GpuCard:
    name = _text(nvml.nvmlDeviceGetName(handle))
    return GpuCard(_uuid(nvml, handle), name, tuple(_uuid(nvml, device) for device in mig), _pci_address(nvml, handle))


def _pci_address(nvml: Any, handle: Any) -> str:
    """Return a PCI address in the kernel's form (NVML prints 00000000:3B:00.0); empty if there is none."""
    with suppress(nvml.NVMLError):
        domain, _, rest = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower().partition(":")
        return f"{int(domain, 16):04x}:{rest}"
    return ""


def _mig_devices(nvml: Any, handle: Any) -> Iterator[Any]:
    slots = 0
    with suppress(nvml.NVMLError):  # except for a card that cannot be divided
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    for index in range(slots):
        with suppress(nvml.NVMLError):  # except for an empty slot
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)


def _usage(nvml: Any, device: Any) -> GpuUsage:
    busy, used, total = float(_UNKNOWN), _UNKNOWN, _UNKNOWN
    with suppress(nvml.NVMLError):  # except for a MIG device, for example
        busy = float(nvml.nvmlDeviceGetUtilizationRates(device).gpu)
    with suppress(nvml.NVMLError):  # except for a GPU without memory of its own, for example
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        used, total = int(memory.used), int(memory.total)
    return GpuUsage(busy, used, total)


def _uuid(nvml: Any, device: Any) -> str:
    return _text(nvml.nvmlDeviceGetUUID(device))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bytes before nvidia-ml-py 12
