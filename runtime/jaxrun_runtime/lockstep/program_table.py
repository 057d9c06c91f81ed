"""The cross-process programs that this rank knows: from lowering over compilation to the first call.

Executables are held weakly, or as the numbers that are their ids.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from jaxrun.text import format_ranges
from jaxrun_runtime.lockstep import jax_hooks
from jaxrun_runtime.lockstep.flight_recorder import FlightRecorder, RecordedProgram

if TYPE_CHECKING:
    from jaxrun_runtime.lockstep.program_signature import HloPacker, LoweredProgram, ProgramRecord


class ProgramTable:
    """Tells the recorder of each program that is new. Whatever is wrong with a program is raised."""

    # description.py and jaxfacts.py are imported when they are needed: they would take 2 ms of a job's start.

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._since = time.monotonic()
        self._texts: HloPacker | None = None
        self._notes: WeakKeyDictionary[Any, ProgramRecord] = WeakKeyDictionary()
        self._programs: WeakKeyDictionary[Any, RecordedProgram | None] = WeakKeyDictionary()
        self._loaded: dict[int, RecordedProgram] = {}
        self._alike: dict[tuple[str, str, str], RecordedProgram] = {}
        self._naming = threading.RLock()

    def describe_lowering(self, module: Any, devices: Any) -> LoweredProgram | None:
        """A program is about to be compiled; returns what `lowered` wants to know, None if it is of one process."""
        if len({device.process_index for device in devices}) < 2:
            return None
        from jaxrun_runtime.lockstep import program_signature

        self._texts = self._texts or program_signature.HloPacker(self._since)
        return program_signature.lowered_program(module, devices, self._texts)

    def add_lowered(self, compiled: Any, lowered: LoweredProgram) -> None:
        """It has been compiled."""
        from jaxrun_runtime.lockstep import jax_facts

        note = (lowered, jax_facts.argument_info(compiled))
        jax_hooks.on_loaded(compiled, lambda executed: self._notes.__setitem__(executed, note))

    def find_or_add(self, executed: Any, args: Sequence[Any]) -> tuple[RecordedProgram | None, bool]:
        """The program that Python is about to dispatch, None if it is of one process; and whether it is new."""
        with contextlib.suppress(KeyError):
            return self._programs[executed], False
        with self._naming:
            before = len(self._alike)
            program = self._programs[executed] = self._describe(executed, args)
            loaded = id(jax_hooks.loaded_executable(executed))
            if program is None:
                self._loaded.pop(loaded, None)
            else:
                self._loaded[loaded] = program
            return program, len(self._alike) > before

    def find_loaded(self, loaded: Any) -> RecordedProgram | None:
        """The program that a loaded executable is, which Python has just dispatched: its id is not an older one's."""
        return self._loaded.get(id(loaded))

    def _describe(self, executed: Any, args: Sequence[Any]) -> RecordedProgram | None:
        note = self._notes.get(executed)
        if note is None and len(jax_hooks.ranks_of(executed)) < 2:
            return None
        from jaxrun_runtime.lockstep import program_signature

        ranks, fields = program_signature.signature_fields(executed, args, note)
        alike = (fields["key"], fields["code"], fields["source"])  # as of one that was compiled again
        if alike not in self._alike:
            group = self._recorder.add_group(format_ranges(ranks))
            self._alike[alike] = self._recorder.add_program(group, fields)
        self._notes.pop(executed, None)
        return self._alike[alike]
