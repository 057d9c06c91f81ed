"""The cross-process programs of this rank, from lowering through compilation to the first call.

The table holds the objects that JAX dispatches weakly. A loaded executable cannot be held weakly: the table holds it as
long as something else does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from jaxrun.text import format_ranges
from jaxrun_runtime.identity_dict import IdentityDict
from jaxrun_runtime.lockstep import call_hooks, program_facts
from jaxrun_runtime.lockstep.call_sites import is_internal_source
from jaxrun_runtime.lockstep.flight_recorder import FlightRecorder, RecordedProgram

if TYPE_CHECKING:
    from jaxrun_runtime.lockstep.program_signature import LoweredProgram, ProgramRecord

_LoweredIdentity = tuple[tuple[int, ...], tuple[int, ...], str, str, str]  # ranks, devices, code, name, source


class ProgramTable:
    """Finds the program of an executable, and describes each new program to the recorder. May raise any error."""

    # program_signature.py is imported when needed: it would take 2 ms of a job's start.

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._records: WeakKeyDictionary[Any, ProgramRecord] = WeakKeyDictionary()
        self._programs: WeakKeyDictionary[Any, RecordedProgram | None] = WeakKeyDictionary()
        self._by_loaded: IdentityDict[RecordedProgram] = IdentityDict()
        self._by_identity: dict[tuple[str, str, str], RecordedProgram] = {}
        self._announced: dict[_LoweredIdentity, RecordedProgram] = {}
        self._adding = threading.RLock()

    def describe_lowering(self, lowering: program_facts.Lowering) -> LoweredProgram | None:
        """Describe a program that is about to be compiled, for `add_lowered`; None if it belongs to one process."""
        if len({device.process_index for device in lowering.devices}) < 2:
            return None
        from jaxrun_runtime.lockstep import program_signature

        return program_signature.lowered_program(lowering.module, lowering.devices)

    def find_called(self, lowering: program_facts.Lowering, lowered: LoweredProgram) -> RecordedProgram | None:
        """Return the program if it is about to be compiled for a call that other ranks must make, too.

        Returns None if that is uncertain: for a program of replicated values, only the compilation shows whether it
        exchanges data.
        """
        if not lowering.is_for_call or not program_facts.is_sharded(lowering):
            return None
        from jaxrun_runtime.lockstep import program_signature

        facts = program_facts.lowering_info(lowering)
        identity = (lowered.ranks, lowered.devices, lowered.code, facts.name, facts.source)
        with self._adding:
            if identity not in self._announced:
                group = self._recorder.add_group(format_ranges(lowered.ranks))
                fields = program_signature.lowering_fields(facts, lowered)
                self._announced[identity] = self._recorder.add_program(group, fields)
            return self._announced[identity]

    def add_lowered(self, compiled: Any, lowered: LoweredProgram) -> None:
        """Remember the description of a program that has been compiled, until its first call."""
        record = (lowered, program_facts.argument_info(compiled))
        call_hooks.on_loaded(compiled, lambda executed: self._records.__setitem__(executed, record))

    def find_or_add(self, executed: Any, args: Sequence[Any]) -> tuple[RecordedProgram | None, bool]:
        """Return the program about to be dispatched, and whether it is new.

        The program is None if its calls do not matter to other ranks: it belongs to one process, or it exchanges
        nothing and is already known.
        """
        with contextlib.suppress(KeyError):
            return self._programs[executed], False
        with self._adding:
            before = len(self._by_identity)
            program = self._describe(executed, args)
            is_new = len(self._by_identity) > before
            recorded = program if program is not None and program.communicates else None
            self._programs[executed] = recorded
            if recorded is not None:
                self._by_loaded.set(program_facts.loaded_executable(executed), recorded)
            return (program, True) if is_new else (recorded, False)

    def find_loaded(self, loaded: Any) -> RecordedProgram | None:
        """Return the program of a loaded executable that Python has just dispatched."""
        return self._by_loaded.get(loaded)

    def _describe(self, executed: Any, args: Sequence[Any]) -> RecordedProgram | None:
        record = self._records.get(executed)
        if record is None and len(program_facts.ranks_of(executed)) < 2:
            return None
        from jaxrun_runtime.lockstep import program_signature

        communicates = program_facts.communicates(executed)
        if not communicates and record is not None and is_internal_source(record[1].source):
            return None  # such as jnp.exp
        ranks, fields = program_signature.signature_fields(executed, args, record)
        identity = (fields["key"], fields["code"], fields["source"])  # equal for a program that was compiled again
        if identity not in self._by_identity:
            group = self._recorder.add_group(format_ranges(ranks))
            before = self._find_announced(record, fields)
            self._by_identity[identity] = self._recorder.add_program(
                group, fields, communicates=communicates, announced=before
            )
        self._records.pop(executed, None)
        return self._by_identity[identity]

    def _find_announced(self, record: ProgramRecord | None, fields: Mapping[str, Any]) -> RecordedProgram | None:
        """Return the program that `find_called` described before it was compiled, or None."""
        if record is None:
            return None
        lowered = record[0]
        identity = (lowered.ranks, lowered.devices, lowered.code, fields["name"], fields["source"])
        return self._announced.get(identity)
