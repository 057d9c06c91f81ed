"""This machine's cores and accelerators, counted without importing jax.

NVML, nvidia-smi or sysfs list the cards; pure functions decide which of them the environment leaves visible.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

CUDA_VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ROCM_VISIBLE_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_NVIDIA_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
_KFD_NODES = "/sys/class/kfd/kfd/topology/nodes/*"
_SMI_TIMEOUT_S = 30

# GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
#   MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
_SMI_CARD = re.compile(r"GPU \d+: (?P<name>.*) \(UUID: (?P<uuid>[^)]+)\)")
_SMI_MIG = re.compile(r"\s+MIG .*\(UUID: (?P<uuid>[^)]+)\)")


@dataclass(frozen=True, slots=True)
class GpuCard:
    """A GPU as the driver lists it; `mig` holds the UUIDs of its MIG devices."""

    uuid: str
    name: str
    mig: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that a process sees, by ordinal.

    source:   what counted them ("NVML"), or why there are none
    visible:  the setting that limits them, "CUDA_VISIBLE_DEVICES=2,3"; empty if nothing does
    ids:      UUIDs, which tell them apart on their host
    """

    names: tuple[str, ...] = ()
    source: str = ""
    visible: str = ""
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """What a job may use on this machine.

    cores:        the cores that this process may run on
    gpus:         the visible GPUs by platform ("cuda", "rocm"); a platform that was not probed is left out
    tpu:          whether there are TPU chips
    cuda_plugin:  whether JAX's plugin for CUDA is installed
    """

    host: str
    cores: tuple[int, ...]
    gpus: Mapping[str, Gpus] = field(default_factory=dict)
    tpu: bool = False
    cuda_plugin: bool = True


Probe = Callable[[], tuple[GpuCard, ...] | None]


def probe_machine(platforms: Iterable[str], environ: Mapping[str, str]) -> Machine:
    """Find this machine's cores and the devices of `platforms`, and no others: asking a driver takes time."""
    wanted = set(platforms)
    gpus = {}
    if "cuda" in wanted:
        gpus["cuda"] = cuda_gpus(environ, nvidia_probes(environ))
    if "rocm" in wanted:
        gpus["rocm"] = rocm_gpus(environ, amd_cards())
    return Machine(
        host=os.uname().nodename,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        gpus=gpus,
        tpu="tpu" in wanted and has_tpu(environ),
        cuda_plugin="cuda" in wanted and _has_cuda_plugin(),
    )


def _has_cuda_plugin() -> bool:
    """Whether the namespace package `jax_plugins`, in which JAX looks for its plugins, holds one for CUDA."""
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("jax_plugins")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return any(name.startswith("xla_cuda") for folder in folders for name in os.listdir(folder))


def cuda_gpus(environ: Mapping[str, str], probes: Mapping[str, Probe]) -> Gpus:
    """Return the NVIDIA GPUs that `environ` leaves visible, counted by the first of `probes` that can."""
    value = environ.get(CUDA_VISIBLE_VARIABLE)
    setting = "" if value is None else f"{CUDA_VISIBLE_VARIABLE}={value}"
    for source, probe in probes.items():
        cards = probe()
        if cards is not None:
            seen = visible_devices(cards, value)
            return Gpus(tuple(name for _, name in seen), source, setting, tuple(uuid for uuid, _ in seen))
    silent = f"{' and '.join(probes)} did not answer" if probes else "no NVIDIA driver was found"
    return Gpus((), silent, setting)


def rocm_gpus(environ: Mapping[str, str], cards: tuple[GpuCard, ...]) -> Gpus:
    """Return the AMD GPUs that `environ` leaves visible; each variable selects among what the one before it leaves."""
    settings = []
    for variable in _ROCM_VISIBLE_VARIABLES:
        if variable in environ:
            settings.append(f"{variable}={environ[variable]}")
            cards = tuple(GpuCard(uuid, name) for uuid, name in visible_devices(cards, environ[variable]))
    names, ids = tuple(card.name for card in cards), tuple(card.uuid for card in cards)
    return Gpus(names, "kfd", " ".join(settings), ids)


def visible_devices(cards: tuple[GpuCard, ...], value: str | None) -> list[tuple[str, str]]:
    """Return UUID and name of each device that CUDA enumerates for a CUDA_VISIBLE_DEVICES of `value`; None: unset.

    As in CUDA, the list ends at the first entry that is no device, an entry given twice leaves none, and
    one process enumerates a single MIG device and then no whole GPU.
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


def parse_smi(text: str) -> tuple[GpuCard, ...]:
    """Parse what `nvidia-smi -L` lists."""
    cards: list[GpuCard] = []
    for line in text.splitlines():
        if card := _SMI_CARD.fullmatch(line):
            cards.append(GpuCard(card["uuid"], card["name"]))
        elif (mig := _SMI_MIG.fullmatch(line)) and cards:
            last = cards[-1]
            cards[-1] = GpuCard(last.uuid, last.name, (*last.mig, mig["uuid"]))
    return tuple(cards)


def nvidia_probes(environ: Mapping[str, str]) -> dict[str, Probe]:
    """Return the ways to ask this machine's NVIDIA driver, best first; none where there is no driver."""
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    has_smi = any(os.access(os.path.join(folder, "nvidia-smi"), os.X_OK) for folder in folders)
    if not has_smi and not any(map(os.path.exists, _NVIDIA_FILES)):
        return {}
    return {"NVML": _nvml_cards, "nvidia-smi": lambda: _smi_cards(environ)}


def _nvml_cards() -> tuple[GpuCard, ...] | None:
    try:
        import pynvml
    except ImportError:
        return None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            return tuple(_nvml_card(nvml, handle) for handle in handles)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None


def used_gpu_memory(environ: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """The used and all bytes of each NVIDIA GPU that `environ` leaves visible, by its id; none without NVML."""
    try:
        import pynvml
    except ImportError:
        return {}
    nvml: Any = pynvml
    found = {}
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            cards = tuple(
                _nvml_card(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())
            )
            for uuid, _ in visible_devices(cards, environ.get(CUDA_VISIBLE_VARIABLE)):
                memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid))
                found[uuid] = int(memory.used), int(memory.total)
        finally:
            nvml.nvmlShutdown()
    return found


def _nvml_card(nvml: Any, handle: Any) -> GpuCard:
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    return GpuCard(_text(uuid), _text(name), tuple(_nvml_mig(nvml, handle)))


def _nvml_mig(nvml: Any, handle: Any) -> Iterator[str]:
    slots = 0
    with suppress(nvml.NVMLError):  # not a card that can be divided
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    for index in range(slots):
        with suppress(nvml.NVMLError):  # nothing in this slot
            yield _text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bytes before nvidia-ml-py 12


def _smi_cards(environ: Mapping[str, str]) -> tuple[GpuCard, ...] | None:
    import subprocess

    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_smi(listed.stdout)


def amd_cards(pattern: str = _KFD_NODES) -> tuple[GpuCard, ...]:
    """Return the AMD GPUs that the kernel lists: the nodes of its topology that have SIMD units."""
    cards = []
    for node in sorted(glob.glob(pattern), key=lambda path: (len(path), path)):
        try:
            with open(os.path.join(node, "properties"), encoding="ascii", errors="replace") as file:
                properties = dict(line.split(maxsplit=1) for line in file if len(line.split()) > 1)
        except OSError:
            continue  # a node that this container may not use
        if int(properties.get("simd_count", "0")) > 0:
            cards.append(GpuCard(f"GPU-{int(properties.get('unique_id', '0')):x}", "AMD GPU"))
    return tuple(cards)


def has_tpu(environ: Mapping[str, str], listing: Callable[[str], list[str]] = glob.glob) -> bool:
    """Whether this host has TPU chips: accel devices or, where the environment has TPU_ variables, VFIO devices."""
    by_vfio = any(name.startswith("TPU_") for name in environ) and bool(listing("/dev/vfio/[0-9]*"))
    return by_vfio or bool(listing("/dev/accel[0-9]*"))
