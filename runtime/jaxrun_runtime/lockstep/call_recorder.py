"""Records the cross-process calls of this rank. In strict mode, a call waits until all its ranks are about to make it.

A cross-process program has devices of several processes; other programs are not touched. The first call of each program
is announced to the head, which compares the ranks. If the program must be compiled first, the call is announced before
the compilation, because compilers may wait for each other, too. JAX's Python code makes the first call, and all calls
in strict mode. Its C++ dispatch makes the others, which are recorded when their results are built. An error in this
module must not disturb the program: then less is recorded, and the recorder says why.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.flight_file import COMPILATIONS, COMPILE, EVERY_CALL, FIRST_CALLS, LOCKSTEP_STRICT, ORDERS_WORD
from jaxrun.protocol.worker_messages import Call, CallMismatch
from jaxrun.text import format_ranges
from jaxrun_runtime import agent_channel, joint_calls, stack_dumps
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected
from jaxrun_runtime.exceptions import DivergenceError
from jaxrun_runtime.lockstep import call_hooks
from jaxrun_runtime.lockstep.call_profiler import CallProfiler
from jaxrun_runtime.lockstep.call_sites import CallEntries, CallSites
from jaxrun_runtime.lockstep.flight_recorder import FlightRecorder, RecordedProgram
from jaxrun_runtime.lockstep.program_facts import Lowering
from jaxrun_runtime.lockstep.program_table import ProgramTable

if TYPE_CHECKING:
    from jaxrun_runtime.lockstep.program_signature import LoweredProgram

_installed: CallRecorder | None = None


def install(env: WorkerEnv, channel: AgentChannel) -> CallRecorder | None:
    """Start recording. If the recorder's file cannot be written, prints why and returns None."""
    global _installed
    level = call_hooks.probe_level()
    strict = env.lockstep == LOCKSTEP_STRICT and level == EVERY_CALL
    try:
        recorder = FlightRecorder(env.flight_fd, env.rank, level=level, strict=strict)
    except (OSError, ValueError) as error:
        print(
            f"jaxrun: rank {env.rank} has no flight recorder, and --lockstep does not see its calls: {error}",
            file=sys.stderr,
        )
        return None
    profiler = CallProfiler(env, channel, recorder.words)
    calls = CallRecorder(env.rank, channel, recorder, profiler, strict)
    _installed = calls
    calls.note_joint_calls()
    call_hooks.hook_compilations(calls.on_compilation_start, calls.on_stage_end)
    if level >= FIRST_CALLS:
        call_hooks.hook_lowering(calls.on_lowering, calls.on_lowered)
        call_hooks.hook_executions(calls.execute, (__file__, agent_channel.__file__))
    if level >= EVERY_CALL:
        call_hooks.hook_fast_dispatch(calls.find_program, calls.on_dispatched, refuse=strict)
        stack_dumps.observe_main_thread(calls.on_stacks)
    os.register_at_fork(after_in_child=calls.detach)
    return calls


def call_counts() -> dict[str, int]:
    """Return how many cross-process calls this rank has dispatched, by group ("0-3"); empty if none are recorded."""
    return _installed.recorder.call_counts() if _installed is not None else {}


def count_on(calls: Mapping[str, int]) -> None:
    """Let the calls of these groups, if they are recorded, count on from these numbers."""
    if _installed is not None:
        _installed.recorder.count_on(calls)


def end_profile() -> None:
    """Write the profile that is being taken, if any, because the program has ended."""
    if _installed is not None:
        _installed.profiler.end()


def call_chains() -> dict[str, int]:
    """Return the hash of these calls by group, equal for equal calls; empty if the code of a program is unknown."""
    return _installed.recorder.call_chains() if _installed is not None else {}


class _Compilation(NamedTuple):
    """A program that is being compiled. `ticket`: the ticket of the call that needs it, or None."""

    lowered: LoweredProgram
    ticket: object | None


class CallRecorder:
    """The hooks of one rank, and their state."""

    def __init__(
        self, rank: int, channel: AgentChannel, recorder: FlightRecorder, profiler: CallProfiler, strict: bool
    ) -> None:
        self._rank = rank
        self._channel = channel
        self.recorder = recorder
        self.profiler = profiler
        self._strict = strict
        self._on = True
        self._programs = ProgramTable(recorder)
        self._sites = CallSites(recorder.add_site)
        self._entries = CallEntries(recorder.words)
        self._one_at_a_time = threading.RLock()
        self._compiling_ranks: dict[int, str] = {}  # by thread: the ranks whose devices its program uses
        self._reported: set[str] = set()
        self.on_dispatched = self._make_dispatched()

    def note_joint_calls(self) -> None:
        """Let jaxrun's joint functions note their calls in this recorder, too."""
        joint_calls.connect(self.recorder, self._sites.find)

    # ---- programs

    def on_compilation_start(self, name: str) -> None:
        with self._reporting("what is being compiled is not known"):
            self.recorder.begin_compilation(name, self._compiling_ranks.get(threading.get_ident(), ""))

    def on_stage_end(self, stage: str, name: str, seconds: float) -> None:
        with self._reporting("what is being compiled is not known"):
            if stage == COMPILE:
                self.recorder.end_compilation()
            self.recorder.add_stage(stage, name, seconds)

    def on_lowering(self, lowering: Lowering) -> _Compilation | None:
        """Describe a program that is about to be compiled, and announce the call that needs it, if there is one.

        In strict mode, wait for the other ranks. Raises DivergenceError.
        """
        lowered = called = ticket = None
        site = 0
        with self._reporting("what a program computes is not known"):
            lowered = self._programs.describe_lowering(lowering) if self._on else None
            if lowered is not None:
                called = self._programs.find_called(lowering, lowered)
                if called is not None and (search := call_hooks.nan_search()):
                    self.recorder.begin_nan_search_call(search)
                site = self._sites.find(sys._getframe())
        if called is not None:
            self._announce_lowered(called, site)
            ticket = self.recorder.begin_call_compilation(called, site, time.time_ns())
        if lowered is None:
            return None
        self._compiling_ranks[threading.get_ident()] = format_ranges(lowered.ranks)
        return _Compilation(lowered, ticket)

    def on_lowered(self, compiled: Any, compilation: _Compilation) -> None:
        """Handle the end of a compilation; `compiled` is None if it failed."""
        self._compiling_ranks.pop(threading.get_ident(), None)
        if compilation.ticket is not None:
            self.recorder.end_call(compilation.ticket)
        with self._reporting("what a program computes is not known"):
            if compiled is not None:
                self._programs.add_lowered(compiled, compilation.lowered)

    def find_program(self, loaded: Any) -> RecordedProgram | None:
        return self._programs.find_loaded(loaded) if self._on else None

    # ---- calls

    def execute(self, original: Callable[..., Any], executed: Any, args: tuple[Any, ...]) -> Any:
        program, new, site = None, False, 0
        if self._on:
            try:
                program, new = self._programs.find_or_add(executed, args)
                site = self._sites.find(sys._getframe()) if program is not None else 0
            except Exception as error:
                self._give_up(error)
                program = None
        if program is None or not program.communicates:
            if program is not None:
                self._announce_alone(program, site)
            return original(executed, *args)
        if self._strict:
            with self._one_at_a_time:
                return self._run(original, executed, args, program, site, new)
        return self._run(original, executed, args, program, site, new)

    def _run(
        self,
        original: Callable[..., Any],
        executed: Any,
        args: tuple[Any, ...],
        program: RecordedProgram,
        site: int,
        new: bool,
    ) -> Any:
        if search := call_hooks.nan_search():
            self.recorder.begin_nan_search_call(search)
        entered = time.time_ns()
        ticket = self.recorder.begin_call(program, site, entered)
        try:
            if new or self._strict:
                self._announce(program, site)
            try:
                results = original(executed, *args)
            finally:  # even if it raises: the other ranks have counted the call
                self.recorder.record(program, site, entered)
            if self._on and self.recorder.words[ORDERS_WORD]:
                self.profiler.on_call(program.group, results)
            return results
        finally:
            self.recorder.end_call(ticket)
            if search:
                self.recorder.end_nan_search_call()

    def _announce(self, program: RecordedProgram, site: int, *, is_compiled: bool = True) -> None:
        """Announce the call to the head, and in strict mode wait for its answer. Raises DivergenceError."""
        group, number = program.group.ranks, program.group.made + 1
        call = self._call(program, site, number, waits_for_answer=self._strict, is_compiled=is_compiled)
        if not self._strict:
            with contextlib.suppress(AgentDisconnected):
                self._channel.send(call)
            return
        self._channel.send(call)
        answer = self._channel.receive_answer(group, number)
        if isinstance(answer, CallMismatch):
            program.group.made = number  # if the program continues, its next call has a new number
            raise DivergenceError(answer.reason)

    def _announce_lowered(self, program: RecordedProgram, site: int) -> None:
        """Announce the call for which a program is about to be compiled, as if the call were about to start."""
        if not self._strict:
            self._announce(program, site, is_compiled=False)
            return
        with self._one_at_a_time:
            ticket = self.recorder.begin_call(program, site, time.time_ns())
            try:
                self._announce(program, site, is_compiled=False)
            finally:
                self.recorder.end_call(ticket)

    def _announce_alone(self, program: RecordedProgram, site: int) -> None:
        """Announce a program that exchanges nothing with other ranks. They may or may not run an equal one."""
        with contextlib.suppress(AgentDisconnected):
            self._channel.send(self._call(program, site, 0, waits_for_answer=False))

    def _call(
        self, program: RecordedProgram, site: int, number: int, *, waits_for_answer: bool, is_compiled: bool = True
    ) -> Call:
        return Call(
            rank=self._rank,
            time=time.time(),
            group=program.group.ranks,
            number=number,
            program=program.number,
            key=program.key,
            code=program.code,
            name=program.name,
            source_line=self._sites.place(site),
            waits_for_answer=waits_for_answer,
            is_compiled=is_compiled,
        )

    def _make_dispatched(self) -> Callable[[Any, Any], Any]:
        """Return the hook for calls of the C++ dispatch. It runs at each call, so its names are looked up only once."""
        known, find, record, frame_at = self._sites.known, self._sites.find, self.recorder.record, sys._getframe
        cells, watch = self._entries.cells, self._entries.watch
        words, orders, on_order = self.recorder.words, ORDERS_WORD, self.profiler.on_call
        handled_exception, nan_search = sys.exception, call_hooks.nan_search

        def dispatched(program: RecordedProgram, results: Any) -> Any:
            try:
                frame = frame_at(1)
                place = id(frame.f_code), frame.f_lasti
                entered = 0
                if (cell := cells.get(place)) is not None:
                    entered, cell.entered = cell.entered, 0
                    if cell.is_shared and entered:
                        cell.add_dispatcher()
                else:
                    watch(frame.f_code, frame.f_lasti)
                search = nan_search() if handled_exception() is not None else 0
                if search:
                    self.recorder.begin_nan_search_call(search)
                record(program, known.get(place) or find(frame), entered)
                if search:
                    self.recorder.end_nan_search_call()
                if words[orders] and self._on:
                    on_order(program.group, results[0])
            except Exception as error:
                self._give_up(error)
            return results[0]

        return dispatched

    def on_stacks(self, frame: FrameType | None) -> None:
        """Note whether the main thread is in the C++ dispatch, before its stack is written.

        It is there if its innermost frame is at an instruction that has made a cross-process call in the C++ dispatch
        before, and now calls one of the functions that did. A program that is not compiled yet has frames of JAX below.
        """
        cell = self._entries.cells.get((id(frame.f_code), frame.f_lasti)) if self._on and frame is not None else None
        is_there = cell is not None and (not cell.dispatchers or cell.function in cell.dispatchers)
        self.recorder.note_standing(self._sites.find(frame) if is_there else 0)

    # ---- when something is wrong

    def detach(self) -> None:
        """Stop recording, in a process that the program has forked."""
        self._on = False
        self._entries.detach()
        self.recorder.detach()

    def _give_up(self, error: Exception) -> None:
        if not self._on:
            return
        self._on = False
        what = "cross-process calls are not recorded any more"
        self._report(what, error, COMPILATIONS)
        if self._strict:
            print(f"jaxrun: rank {self._rank}: {what}, and others may wait for it: {error!r}", file=sys.stderr)

    @contextlib.contextmanager
    def _reporting(self, lost: str) -> Iterator[None]:
        """Report an error of the block as the reason for the loss, described by `lost`, and continue."""
        try:
            yield
        except Exception as error:
            self._report(lost, error)

    def _report(self, lost: str, error: Exception, level: int | None = None) -> None:
        if lost in self._reported:
            return
        self._reported.add(lost)
        with contextlib.suppress(Exception):
            self.recorder.add_trouble(f"{lost}: {type(error).__name__}: {error}", level)
