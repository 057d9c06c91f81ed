"""What tells cross-process programs apart, and what a person is told of them: values and text, no hooks.

`code` is the hash of a program as it was lowered, before any cache is asked for the compiled one: it is the same on
all ranks that lower the same program, whatever their caches, locations in the source or process-specific keys are.
It is unknown only for executables that were loaded from elsewhere. `key` is the hash of all that must be alike for
the ranks to meet in a call: weak types need not be, nor names of arguments.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrun_runtime.lockstep import jax_facts, jax_hooks

_LONG_CONSTANT = 64  # elements; longer ones are left out of the text
_PRINTABLE_CONSTANT = 2**24  # elements, of one that can only be printed
_TEXT_CHARACTERS, _PACKED_BYTES = 2 * 2**20, 2**16
_SHARE, _HEAD_START = 0.02, 0.05  # how much of the time, and seconds besides, may go into keeping texts
_LISTED = 4096  # arguments, and results
_IDS = 32
# Addresses in the process's memory, by which XLA calls back.
_ADDRESSES = re.compile(
    r'(@(?:InspectSharding|CustomSPMDPartitioning)\(.*?backend_config = |backend_config = (?="\d{12}))"[^"]*"'
)
_ORDINARY_MEMORY = (None, "device", "unpinned_host")


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """A program of several processes as it was lowered; `devices` are ids, in the mesh's order."""

    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    code: str
    text: str


ProgramRecord = tuple[LoweredProgram, jax_facts.ArgumentInfo]


class HloPacker:
    """Packs the programs' texts, as long as that takes next to no time."""

    def __init__(self, since: float) -> None:
        """`since`: when the program began (of time.monotonic)."""
        self._since = since
        self._spent = 0.0

    def pack(self, text: str) -> str:
        """`text` compressed and in base64; empty if it is too long, or the time is used up."""
        started = time.monotonic()
        if len(text) > _TEXT_CHARACTERS or self._spent > _HEAD_START + _SHARE * (started - self._since):
            return ""
        packed = zlib.compress(text.encode())
        kept = base64.b64encode(packed).decode() if len(packed) <= _PACKED_BYTES else ""
        self._spent += time.monotonic() - started
        return kept


def lowered_program(module: Any, devices: Iterable[Any], texts: HloPacker) -> LoweredProgram:
    """`module` is the program's StableHLO, `devices` are those of its mesh, in order."""
    devices = tuple(devices)
    ranks = tuple(sorted({device.process_index for device in devices}))
    text = _ADDRESSES.sub(r'\1""', jax_facts.module_text(module, _LONG_CONSTANT))
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    if jax_facts.ELIDED in text:
        for content in jax_facts.constant_bytes(module, _LONG_CONSTANT, _PRINTABLE_CONSTANT):
            digest.update(content)
    return LoweredProgram(ranks, tuple(device.id for device in devices), digest.hexdigest(), texts.pack(text))


def signature_fields(
    executed: Any, args: Sequence[Any], note: ProgramRecord | None
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The ranks that take part in a call, and the fields of the program's line in the recorder."""
    program, known = note or (None, None)
    facts = jax_facts.call_info(executed, args, known)
    shardings = [*facts.in_shardings, *facts.out_shardings]
    ranks = program.ranks if program else tuple(sorted(jax_hooks.ranks_of(executed)))
    texts: dict[int, str] = {}
    arguments = [[_aval(a), _sharding(s, texts)] for a, s in zip(facts.in_avals, facts.in_shardings, strict=False)]
    results = [[_aval(a), _sharding(s, texts)] for a, s in zip(facts.out_avals, facts.out_shardings, strict=False)]
    devices = program.devices if program else _devices(shardings)
    mesh = _meshes(shardings) + _ids(devices)
    weak = [", weak" if getattr(aval, "weak_type", False) else "" for aval in facts.in_avals]
    fields = {
        "key": _hash([facts.name, ranks, arguments, results, mesh]),
        "code": program.code if program else "",
        "name": facts.name,
        "source": facts.source,
        "arguments": [
            [name, kind + more, where] for name, (kind, where), more in zip(facts.names, arguments, weak, strict=False)
        ][:_LISTED],
        "results": [["", kind, where] for kind, where in results[:_LISTED]],
        "mesh": mesh,
        "text": program.text if program else "",
    }
    return ranks, fields


def _hash(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def _aval(aval: Any) -> str:
    """ "float32[32,128]"."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    return str(aval) if shape is None or dtype is None else f"{dtype}[{','.join(map(str, shape))}]"


def _sharding(sharding: Any, known: dict[int, str]) -> str:
    if id(sharding) not in known:
        memory = getattr(sharding, "memory_kind", None)
        spec = getattr(sharding, "spec", None)
        text = repr(sharding) if spec is None else _spec(spec)
        known[id(sharding)] = text if memory in _ORDINARY_MEMORY else f"{text}, {memory}"
    return known[id(sharding)]


def _spec(spec: Any) -> str:
    """ "P('data',)"; None at the end means nothing, and is left out."""
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return str(spec).replace("PartitionSpec", "P")
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return f"P{tuple(parts)!r}"


def _meshes(shardings: Iterable[Any]) -> str:
    """ "data=4, model=2: ", for each mesh there is."""
    meshes = (getattr(sharding, "mesh", None) for sharding in shardings)
    axes = (", ".join(f"{name}={size}" for name, size in mesh.shape.items()) for mesh in meshes if mesh is not None)
    named = "; ".join(dict.fromkeys(text for text in axes if text))
    return f"{named}: " if named else ""


def _ids(ids: Sequence[int]) -> str:
    if len(ids) <= _IDS:
        return ",".join(map(str, ids))
    shown = ",".join(map(str, ids[: _IDS // 4]))
    return f"{shown},… ({len(ids)} devices, {_hash(ids)})"


def _devices(shardings: Iterable[Any]) -> tuple[int, ...]:
    """In the order of a mesh, if there is one."""
    shardings = list(shardings)
    for sharding in shardings:
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and mesh.devices.size:
            return tuple(device.id for device in mesh.devices.flat)
    found = (getattr(sharding, "device_set", ()) for sharding in shardings)
    return tuple(sorted(device.id for device in next((devices for devices in found if devices), ())))
