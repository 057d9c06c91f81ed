"""Counts this machine's cores and accelerators without importing jax.

NVML (nvml.py) or sysfs lists the cards; pure functions decide which of them the environment leaves visible.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Mapping

from jaxrun.protocol.probe_messages import Gpus, Machine
from jaxrun.spec.job.nvml import NO_DRIVER, GpuCard, NvmlReading, ask_nvml, has_driver

CUDA_VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ROCM_VISIBLE_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_KFD_NODES = "/sys/class/kfd/kfd/topology/nodes/*"
PCI_DEVICES = "/sys/bus/pci/devices"
_SIBLINGS = "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list"
_NVML_TIMEOUT_S = 30.0


def probe_machine(platforms: Iterable[str], environ: Mapping[str, str]) -> Machine:
    """Find this machine's cores and the devices of `platforms`, and no others, because asking a driver takes time.

    If the CPU would do and there is no sign of NVIDIA's driver, the driver is not asked.
    """
    wanted = set(platforms)
    gpus = {}
    if "cuda" in wanted:
        is_asked = "cpu" not in wanted or has_driver()
        gpus["cuda"] = cuda_gpus(environ, ask_nvml(_NVML_TIMEOUT_S) if is_asked else NvmlReading(trouble=NO_DRIVER))
    if "rocm" in wanted:
        gpus["rocm"] = rocm_gpus(environ, amd_cards())
    return Machine(
        host=os.uname().nodename,
        cores=_usable_cores(),
        gpus=gpus,
        tpu="tpu" in wanted and has_tpu(environ),
        cuda_plugin="cuda" in wanted and _has_cuda_plugin(),
        all_cores=os.cpu_count() or 0,
    )


def _usable_cores() -> tuple[int, ...]:
    """Return the usable cores with the hardware threads of one core side by side.

    Threads of one core have adjacent numbers or, on most PCs, numbers as far apart as the threads of core 0.
    """
    siblings = list(map(int, re.findall(r"[0-9]+", _read(_SIBLINGS))))
    apart = siblings[1] - siblings[0] if len(siblings) > 1 else 1
    cores = sorted(os.sched_getaffinity(0))
    return tuple(sorted(cores, key=lambda core: core % apart) if apart > 1 else cores)


def _cores_near(card: GpuCard, folder: str) -> str:
    """Return the cores on the card's NUMA node."""
    return _read(os.path.join(folder, card.pci, "local_cpulist")) if card.pci else ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _has_cuda_plugin() -> bool:
    """Whether the namespace package `jax_plugins`, in which JAX looks for plugins, contains one for CUDA."""
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("jax_plugins")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return any(name.startswith("xla_cuda") for folder in folders for name in os.listdir(folder))


def cuda_gpus(environ: Mapping[str, str], reading: NvmlReading, pci_devices: str = PCI_DEVICES) -> Gpus:
    """Return the NVIDIA GPUs that `environ` leaves visible; `pci_devices` is the kernel's directory of all devices."""
    if reading.trouble:
        return Gpus(trouble=reading.trouble)
    value = environ.get(CUDA_VISIBLE_VARIABLE)
    setting = "" if value is None else f"{CUDA_VISIBLE_VARIABLE}={value}"
    seen = visible_devices(reading.cards, value)
    cards = {uuid: card for card in reading.cards for uuid in (card.uuid, *card.mig)}
    cores = tuple(_cores_near(cards[uuid], pci_devices) for uuid, _ in seen)
    return Gpus(tuple(name for _, name in seen), "NVML", setting, tuple(uuid for uuid, _ in seen), cores=cores)


def rocm_gpus(environ: Mapping[str, str], cards: tuple[GpuCard, ...], pci_devices: str = PCI_DEVICES) -> Gpus:
    """Return the AMD GPUs that `environ` leaves visible; each variable selects among those left by the previous."""
    settings, places = [], {card.uuid: card for card in cards}
    for variable in _ROCM_VISIBLE_VARIABLES:
        if variable in environ:
            settings.append(f"{variable}={environ[variable]}")
            cards = tuple(GpuCard(uuid, name) for uuid, name in visible_devices(cards, environ[variable]))
    names, ids = tuple(card.name for card in cards), tuple(card.uuid for card in cards)
    cores = tuple(_cores_near(places[uuid], pci_devices) for uuid in ids)
    return Gpus(names, "kfd", " ".join(settings), ids, cores=cores)


def visible_devices(cards: tuple[GpuCard, ...], value: str | None) -> list[tuple[str, str]]:
    """Return (UUID, name) of each device that CUDA enumerates for `value` of CUDA_VISIBLE_DEVICES; None means unset.

    As in CUDA, the list ends at the first entry that is not a device, a repeated entry leaves no device, and a process
    that enumerates a MIG device sees only this one and no whole GPU.
    """
    chosen: list[tuple[str, str]] = []
    for entry in map(str, range(len(cards))) if value is None else value.split(","):
        device = _find_device(cards, entry.strip())
        if device is None:
            break
        if device in chosen:
            return []
        chosen.append(device)
    return [device for device in chosen if device[0].startswith("MIG-")][:1] or chosen


def _find_device(cards: tuple[GpuCard, ...], entry: str) -> tuple[str, str] | None:
    number = re.match(r"[0-9]+", entry)
    if number is not None:
        if int(number[0]) >= len(cards):
            return None
        card = cards[int(number[0])]
        return (card.mig[0], f"{card.name} MIG") if card.mig else (card.uuid, card.name)
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    devices = [(card.uuid, card.name) for card in cards if not card.mig]
    devices += [(uuid, f"{card.name} MIG") for card in cards for uuid in card.mig]
    named = [device for device in devices if device[0].startswith(entry)]
    return named[0] if len(named) == 1 else None


def amd_cards(pattern: str = _KFD_NODES) -> tuple[GpuCard, ...]:
    """Return the AMD GPUs that the kernel lists: the topology nodes that have SIMD units."""
    cards = []
    for node in sorted(glob.glob(pattern), key=lambda path: (len(path), path)):
        try:
            with open(os.path.join(node, "properties"), encoding="ascii", errors="replace") as file:
                properties = dict(line.split(maxsplit=1) for line in file if len(line.split()) > 1)
        except OSError:
            continue  # this container may not use the node
        if int(properties.get("simd_count", "0")) > 0:
            domain, place = (int(properties.get(name, "0")) for name in ("domain", "location_id"))
            pci = f"{domain:04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
            cards.append(GpuCard(f"GPU-{int(properties.get('unique_id', '0')):x}", "AMD GPU", pci=pci))
    return tuple(cards)


def has_tpu(environ: Mapping[str, str], listing: Callable[[str], list[str]] = glob.glob) -> bool:
    """Whether this host has TPU chips: accel devices or, if the environment has TPU_ variables, VFIO devices."""
    by_vfio = any(name.startswith("TPU_") for name in environ) and bool(listing("/dev/vfio/[0-9]*"))
    return by_vfio or bool(listing("/dev/accel[0-9]*"))
