"""A lowered program: its text, the hash of it, and the text packed for reports.

The hash is the same on all ranks that lower the same program, whatever their caches, source locations or
process-specific keys.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_MAX_CONSTANT_ELEMENTS = 64  # larger constants are left out of the text
_MAX_PRINTED_ELEMENTS = 2**24  # of a constant whose content can only be had by printing it
_MAX_HLO_CHARACTERS, _MAX_PACKED_BYTES = 2 * 2**20, 2**16
_PACKING_SHARE, _PACKING_START_S = 0.02, 0.05  # of the run time, and seconds besides, may go into packing
# Addresses in the process's memory, by which XLA calls back.
_ADDRESSES = re.compile(
    r'(@(?:InspectSharding|CustomSPMDPartitioning)\(.*?backend_config = |backend_config = (?="\d{12}))"[^"]*"'
)
# jax.pmap without axis_name names its axis after an object in memory, in JAX 0.8 and 0.9.
_UNNAMED_AXIS = re.compile(r"<axis 0x[0-9a-f]+>")
_ELIDED = "dense_resource<__elided__>"
# Element types of constants; to ask for the buffer of any other ends the process, in JAX 0.8.
_BUFFERED = ("f16", "f32", "f64", "i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64")


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """A program of several processes as it was lowered.

    devices:  their ids, in the mesh's order
    code:     hash of the lowered program
    text:     the lowered program, packed; may be empty
    """

    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    code: str
    text: str


class HloPacker:
    """Packs the texts of programs, as long as that takes next to no time; `started_at` is of time.monotonic."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._spent_s = 0.0

    def pack(self, text: str) -> str:
        """Compress `text`, and write it in base64; an empty text if it is too long, or the time is used up."""
        started = time.monotonic()
        if len(text) > _MAX_HLO_CHARACTERS or self._spent_s > _PACKING_START_S + _PACKING_SHARE * (
            started - self._started_at
        ):
            return ""
        packed = zlib.compress(text.encode())
        kept = base64.b64encode(packed).decode() if len(packed) <= _MAX_PACKED_BYTES else ""
        self._spent_s += time.monotonic() - started
        return kept


def lowered_program(module: Any, devices: Iterable[Any], texts: HloPacker) -> LoweredProgram:
    """Describe a program by `module`, its StableHLO, and the `devices` of its mesh, in order."""
    devices = tuple(devices)
    ranks = tuple(sorted({device.process_index for device in devices}))
    text = without_addresses(module_text(module, _MAX_CONSTANT_ELEMENTS))
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    if _ELIDED in text:
        for content in _constant_bytes(module, _MAX_CONSTANT_ELEMENTS, _MAX_PRINTED_ELEMENTS):
            digest.update(content)
    return LoweredProgram(ranks, tuple(device.id for device in devices), digest.hexdigest(), texts.pack(text))


def without_addresses(text: str) -> str:
    """Write `text` as every process writes it."""
    return _UNNAMED_AXIS.sub("<axis>", _ADDRESSES.sub(r'\1""', text))


def module_text(module: Any, long: int) -> str:
    """Write a lowered module without source locations, and with _ELIDED for constants of more than `long` elements."""
    return str(module.operation.get_asm(enable_debug_info=False, large_elements_limit=long))


def _constant_bytes(module: Any, long: int, printable: int) -> Iterator[bytes | memoryview]:
    """Yield the contents of the constants of more than `long` bytes, in order, unless all their elements are equal.

    Element types that Python's buffers do not know can only be printed: up to `printable` elements of each constant.
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
