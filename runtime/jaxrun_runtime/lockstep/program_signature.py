"""Identifies and describes a cross-process program, for comparisons and reports: values and text, no hooks.

`code` is the hash of the lowered program. It is equal on all ranks that lower the same program, whatever their caches,
source locations or process-specific keys. It is unknown only for executables that were loaded from elsewhere. `key` is
the hash of everything that must be equal for the ranks to meet in a call, so without weak types and argument names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from jaxrun_runtime.lockstep import program_facts

_MAX_CONSTANT_ELEMENTS = 64  # larger constants are left out of the text
_MAX_PRINTED_ELEMENTS = 2**24  # of a constant whose content must be printed to be read
_MAX_HLO_CHARACTERS, _MAX_PACKED_BYTES = 2 * 2**20, 2**16
# Addresses in the process's memory, which XLA uses for callbacks.
_ADDRESSES = re.compile(
    r'(@(?:InspectSharding|CustomSPMDPartitioning)\(.*?backend_config = |backend_config = (?="\d{12}))"[^"]*"'
)
# jax.pmap without axis_name names its axis after an object in memory, in JAX 0.8 and 0.9.
_UNNAMED_AXIS = re.compile(r"<axis 0x[0-9a-f]+>")
_ELIDED = "dense_resource<__elided__>"
# Element types of constants. In JAX 0.8, asking for the buffer of any other type ends the process.
_BUFFERED = ("f16", "f32", "f64", "i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64")
_MAX_ARRAYS = 4096  # the most arguments that are listed, and the most results
_MAX_DEVICE_IDS = 32
_ORDINARY_MEMORY = (None, "device", "unpinned_host")


class LoweredProgram(Struct, frozen=True):
    """A lowered program of several processes.

    ranks:    the processes whose devices it uses
    devices:  ids of its devices, in the mesh's order
    code:     hash of the lowered program
    text:     the lowered program, packed; may be empty
    """

    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    code: str
    text: str


def pack(text: str) -> str:
    """Return the text of a program, compressed, in base64; empty if it is too long."""
    packed = zlib.compress(text.encode(), 1) if len(text) <= _MAX_HLO_CHARACTERS else b""
    return base64.b64encode(packed).decode() if len(packed) <= _MAX_PACKED_BYTES else ""


def lowered_program(module: Any, devices: Iterable[Any]) -> LoweredProgram:
    """Describe a program. `module`: its StableHLO; `devices`: the devices of its mesh, in order."""
    devices = tuple(devices)
    ranks = tuple(sorted({device.process_index for device in devices}))
    text = without_addresses(module_text(module, _MAX_CONSTANT_ELEMENTS))
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    if _ELIDED in text:
        for content in _constant_bytes(module, _MAX_CONSTANT_ELEMENTS, _MAX_PRINTED_ELEMENTS):
            digest.update(content)
    return LoweredProgram(ranks, tuple(device.id for device in devices), digest.hexdigest(), pack(text))


def without_addresses(text: str) -> str:
    """Return `text` without parts that differ between processes."""
    return _UNNAMED_AXIS.sub("<axis>", _ADDRESSES.sub(r'\1""', text))


def module_text(module: Any, long: int) -> str:
    """Return a lowered module as text, without source locations; _ELIDED for constants of over `long` elements."""
    return str(module.operation.get_asm(enable_debug_info=False, large_elements_limit=long))


def _constant_bytes(module: Any, long: int, printable: int) -> Iterator[bytes | memoryview]:
    """Yield the contents of the constants of more than `long` bytes, in order, unless all their elements are equal.

    Constants whose element types Python's buffers do not know are printed, up to `printable` elements each.
    """
    from jaxlib.mlir import ir

    found: list[Any] = []

    def visit(operation: Any) -> Any:
        if operation.name.endswith(".constant"):
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for operation in found:
        if str(operation.results[0].type.element_type) in _BUFFERED:
            content = memoryview(operation.attributes["value"])
            if content.nbytes > long and content.contiguous:
                yield content
        else:
            text = operation.get_asm(enable_debug_info=False, large_elements_limit=printable)
            if len(text) > long:
                yield text.encode()


# ---- the fields of a program


ProgramRecord = tuple[LoweredProgram, program_facts.ArgumentInfo]


def signature_fields(
    executed: Any, args: Sequence[Any], record: ProgramRecord | None
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the ranks that take part in a call, and the fields of the program's line in the recorder."""
    program, known = record or (None, None)
    facts = program_facts.call_info(executed, args, known)
    ranks = program.ranks if program else tuple(sorted(program_facts.ranks_of(executed)))
    devices = program.devices if program else _devices([*facts.in_shardings, *facts.out_shardings])
    arguments, results, mesh = _arrays(facts, devices)
    key = _hash([facts.name, ranks, arguments, results, mesh])
    return ranks, {"key": key, **_fields(facts, program, arguments, results, mesh)}


def lowering_fields(facts: program_facts.CallInfo, program: LoweredProgram) -> dict[str, Any]:
    """Return the same fields for a program that is not compiled yet, except the key."""
    return _fields(facts, program, *_arrays(facts, program.devices))


def _arrays(facts: program_facts.CallInfo, devices: Sequence[int]) -> tuple[list[list[str]], list[list[str]], str]:
    """Return the types and shardings of arguments and results, and the mesh."""
    texts: dict[int, str] = {}
    arguments = [[_aval(a), _sharding(s, texts)] for a, s in zip(facts.in_avals, facts.in_shardings, strict=False)]
    results = [[_aval(a), _sharding(s, texts)] for a, s in zip(facts.out_avals, facts.out_shardings, strict=False)]
    return arguments, results, _meshes([*facts.in_shardings, *facts.out_shardings]) + _ids(devices)


def _fields(
    facts: program_facts.CallInfo,
    program: LoweredProgram | None,
    arguments: list[list[str]],
    results: list[list[str]],
    mesh: str,
) -> dict[str, Any]:
    weak = [", weak" if getattr(aval, "weak_type", False) else "" for aval in facts.in_avals]
    return {
        "code": program.code if program else "",
        "name": facts.name,
        "source": facts.source,
        "arguments": [
            [name, kind + more, where] for name, (kind, where), more in zip(facts.names, arguments, weak, strict=False)
        ][:_MAX_ARRAYS],
        "results": [["", kind, where] for kind, where in results[:_MAX_ARRAYS]],
        "mesh": mesh,
        "text": program.text if program else "",
    }


def _hash(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def _aval(aval: Any) -> str:
    """Return an abstract value as text, `float32[32,128]`."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    return str(aval) if shape is None or dtype is None else f"{dtype}[{','.join(map(str, shape))}]"


def _sharding(sharding: Any, known: dict[int, str]) -> str:
    """Return a sharding as text; empty if it is left to XLA, in a program that is not compiled yet."""
    if not hasattr(sharding, "spec") and not hasattr(sharding, "device_set"):
        return ""
    if id(sharding) not in known:
        memory = getattr(sharding, "memory_kind", None)
        spec = getattr(sharding, "spec", None)
        if spec is None and sharding.is_fully_replicated:
            spec = ()
        text = without_addresses(repr(sharding) if spec is None else _spec(spec))
        known[id(sharding)] = text if memory in _ORDINARY_MEMORY else f"{text}, {memory}"
    return known[id(sharding)]


def _spec(spec: Any) -> str:
    """Return a spec as text, `P('data',)`, without trailing Nones, which mean nothing."""
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return str(spec).replace("PartitionSpec", "P")
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return f"P{tuple(parts)!r}"


def _meshes(shardings: Iterable[Any]) -> str:
    """Return the meshes as text, `data=4, model=2: `; empty if there is none."""
    meshes = (getattr(sharding, "mesh", None) for sharding in shardings)
    axes = (", ".join(f"{name}={size}" for name, size in mesh.shape.items()) for mesh in meshes if mesh is not None)
    named = "; ".join(dict.fromkeys(without_addresses(text) for text in axes if text))
    return f"{named}: " if named else ""


def _ids(ids: Sequence[int]) -> str:
    if len(ids) <= _MAX_DEVICE_IDS:
        return ",".join(map(str, ids))
    shown = ",".join(map(str, ids[: _MAX_DEVICE_IDS // 4]))
    return f"{shown},… ({len(ids)} devices, {_hash(ids)})"


def _devices(shardings: Iterable[Any]) -> tuple[int, ...]:
    """Return the ids of the devices, in the order of a mesh, if there is one."""
    shardings = list(shardings)
    for sharding in shardings:
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and mesh.devices.size:
            return tuple(device.id for device in mesh.devices.flat)
    found = (getattr(sharding, "device_set", ()) for sharding in shardings)
    return tuple(sorted(device.id for device in next((devices for devices in found if devices), ())))
