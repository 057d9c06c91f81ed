"""Parses the dumps of Python's fault handler: the stack of each thread, and which of its frames are the user's.

Dumps that a rank writes by itself have the same format, and lines about exceptions and waits (protocol/error_chain.py).
A dump holds one block per thread, newest thread first, so the main thread's is the last; the innermost frame
comes first. One text may hold several dumps; the last one counts.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Collection
from pathlib import PurePath

from msgspec import Struct

from jaxrun import stack_frames
from jaxrun.lazy_pattern import lazy_pattern
from jaxrun.protocol.error_chain import NO_NOTES, CoordinationWait, ThreadNotes, parse_notes
from jaxrun.protocol.flight_file import (
    GANG_ALLGATHER,
    GANG_BARRIER,
    GANG_BROADCAST,
    RESTORE,
    SHOULD_STOP,
    SNAPSHOT,
)

NATIVE_STACKS_TIMEOUT_S = 30.0  # for the C frames of one host's ranks

FATAL_ERROR = "Fatal Python error: "  # begins the dump of a fatal signal
# Samples: `Thread 0x00007f2c4e7fc6c0 [Loader-1] (most recent call first):`, `  File "a.py", line 88 in step`
_THREAD = lazy_pattern(
    r"^(Current thread|Thread) 0x[0-9a-f]+(?: \[(?P<name>.*?)(?P<daemon>, daemon)?\])? \(most recent call first\):"
)
_FRAME = lazy_pattern(r'^  File "(?P<file>.*)", line (?P<line>[0-9]{1,9}|\?\?\?) in (?P<function>.*)$')
# The functions in which a rank of a gang waits for its next call.
_GANG_MODULES = lazy_pattern(r"/jaxrun/protocol/\w+\.py$|/jaxrun_runtime/gang\w*[./]")
_GANG_RECEIVE = "_receive"
_CALLED_BY_TESTS = lazy_pattern(r"/jaxrun_runtime/(?:joint_calls|pytest/rank_gang)\.py$")  # barriers, debuggers
_COORDINATION_WAIT = lazy_pattern(r"/jaxrun_runtime/coordination_waits\.py$")
_JOINT_WAIT = lazy_pattern(r"/jaxrun_runtime/joint_calls\.py$")  # the runtime's frame in which ranks wait for others
_JOINT_FUNCTIONS = tuple(
    (function, lazy_pattern(rf"/jaxrun_runtime/(?:{module})\.py$"), function.rpartition(".")[2])
    for function, module in (
        (SNAPSHOT, "state_snapshots/snapshots"),
        (RESTORE, "state_snapshots/snapshots"),
        (SHOULD_STOP, "stopping"),
        (GANG_BARRIER, "pytest/rank_gang"),
        (GANG_ALLGATHER, "pytest/rank_gang"),
        (GANG_BROADCAST, "pytest/rank_gang"),
    )
)


class Frame(Struct, frozen=True):
    file: str
    line: int
    function: str

    @property
    def is_jax(self) -> bool:
        return stack_frames.is_jax(self.file)

    @property
    def is_scaffold(self) -> bool:
        """Whether the frame belongs to jaxrun, or to what Python itself puts around a program or a thread."""
        return stack_frames.is_scaffold(self.file)

    @property
    def library(self) -> str:
        """The package or standard module that the frame belongs to, such as "flax" or "queue"; else the file's name."""
        package = PurePath(stack_frames.find_package(self.file))
        return package.stem if package.name else PurePath(self.file).stem

    @property
    def is_wrapper(self) -> bool:
        """Whether this is the frame with which JAX hides its own frames from tracebacks."""
        return self.file.endswith("/traceback_util.py")

    @property
    def is_packages(self) -> bool:
        """Whether the frame belongs to an installed package other than JAX."""
        return stack_frames.is_packages(self.file)

    def __str__(self) -> str:
        if self.file == stack_frames.EXIT_HANDLER:
            return self.function
        return f"{PurePath(self.file).name}:{self.line} {self.function}"


class Ending(enum.Enum):
    """What a rank waits for after the main thread of its program has ended."""

    THREADS = enum.auto()  # that are not daemons
    CHILDREN = enum.auto()  # processes: non-daemonic ones of multiprocessing, or any that an exit handler waits for
    QUEUE = enum.auto()  # the thread of a multiprocessing.Queue holds data that no process reads
    HANDLER = enum.auto()  # a function that was registered with atexit
    FINALIZER = enum.auto()  # a finalizer (__del__) of an object
    MPI = enum.auto()  # MPI_Finalize, in which ranks wait for each other


# The functions of the runtime that wait for them.
_ENDINGS = {
    "_join_threads": Ending.THREADS,
    "_run_exit_handlers": Ending.HANDLER,
    "_finalize_program": Ending.FINALIZER,
    "_finalize_mpi": Ending.MPI,
}
_JOINS_CHILD = lazy_pattern(r"/(?:multiprocessing/process\.py join|subprocess\.py (?:wait|communicate))$")
_JOINS_QUEUE = lazy_pattern(r"/multiprocessing/queues\.py _finalize_join$")


class Stack(Struct, frozen=True):
    """The frames of one thread, innermost first; `current` marks the thread that received the signal.

    name, is_daemon:  the thread's name and kind, if the dump has them
    notes:            the exception that it handles, and its wait in JAX's coordination service
    """

    frames: tuple[Frame, ...] = ()
    current: bool = False
    name: str = ""
    is_daemon: bool = False
    notes: ThreadNotes = NO_NOTES

    @property
    def programs(self) -> tuple[Frame, ...]:
        """The program's frames; empty for a thread that only runs libraries."""
        return tuple(
            self.frames[index] for index in stack_frames.find_program_frames([one.file for one in self.frames])
        )

    @property
    def users(self) -> tuple[Frame, ...]:
        """The program's frames; if it has none, those that are not scaffold."""
        return self.programs or tuple(frame for frame in self.frames if not frame.is_scaffold) or self.frames

    @property
    def called(self) -> tuple[Frame, ...]:
        """The calls from which the program has not returned, innermost first, as far as they have Python frames."""
        first = self.users[0] if self.users else None
        return self.frames[: self.frames.index(first)] if first else ()

    def is_in_wrapper(self, places: Collection[str]) -> bool:
        """Whether a library's wrapper, such as flax's nnx.jit, runs native code for a line of `places`.

        `places` are program lines at which a rank has made cross-process calls, "train.py:88 train_step". Such a
        line most likely calls now what it has called there before.
        """
        called = self.called
        return bool(called) and all(frame.is_packages for frame in called) and str(self.users[0]) in places

    def is_in_jax(self, places: Collection[str] = ()) -> bool:
        """Whether the thread is in JAX, asleep or not, or waits for other ranks in a joint function of jaxrun.

        A thread that polls a GPU, or runs native code of another library for JAX, is in JAX. `places` is the same as in
        `is_in_wrapper`.
        """
        if self.waits_for_ranks or self.ending is not None:
            return self.waits_for_ranks
        if self.coordination_wait is not None:
            return True
        called = self.called
        if not self.frames or not called:
            return bool(self.programs)
        return any(frame.is_jax for frame in called) or self.is_in_wrapper(places)

    @property
    def ending(self) -> Ending | None:
        """What the program waits for after its main thread has ended; None before that, or if it calls JAX there."""
        if (at := self._shutdown_frame) is None or any(frame.is_jax for frame in self.frames[:at]):
            return None
        stage = _ENDINGS[self.frames[at].function]
        if stage is Ending.HANDLER:
            calls = [f"{frame.file} {frame.function}" for frame in self.frames[:at]]
            if any(map(_JOINS_CHILD.search, calls)):
                return Ending.CHILDREN
            if any(map(_JOINS_QUEUE.search, calls)):
                return Ending.QUEUE
        return stage

    @property
    def ending_frame(self) -> Frame | None:
        """The frame of the exit handler or finalizer that runs after the main thread's end; the program's if any."""
        inner = self.frames[: self._shutdown_frame or 0]
        return next((frame for frame in inner if stack_frames.is_programs(frame.file)), inner[-1] if inner else None)

    @property
    def _shutdown_frame(self) -> int | None:
        places = enumerate(self.frames)
        return next((n for n, frame in places if frame.is_scaffold and frame.function in _ENDINGS), None)

    @property
    def joint_function(self) -> str:
        """The joint function of jaxrun that the thread is in, "jaxrun_runtime.snapshot"; empty if it is in none."""
        for frame in self.frames:
            for function, file, name in _JOINT_FUNCTIONS:
                if frame.function == name and file.search(frame.file):
                    return function
        return ""

    @property
    def waits_for_ranks(self) -> bool:
        """Whether the thread waits for other ranks in a joint function."""
        return any(_JOINT_WAIT.search(frame.file) for frame in self.frames)

    @property
    def coordination_wait(self) -> CoordinationWait | None:
        """The call of JAX's coordination service in which the thread waits; without its name in the dump of a fault."""
        if self.notes.wait is not None:
            return self.notes.wait
        inner = self.frames[0] if self.frames else None
        if inner is None or not _COORDINATION_WAIT.search(inner.file):
            return None
        return CoordinationWait(inner.function)

    @property
    def is_idle(self) -> bool:
        """Whether a rank of a gang waits for its next call."""
        inner = list(itertools.takewhile(lambda frame: _GANG_MODULES.search(frame.file), self.frames))
        outer = self.frames[len(inner)] if len(inner) < len(self.frames) else None
        receives = any(frame.function == _GANG_RECEIVE for frame in inner)
        return receives and outer is not None and outer.is_scaffold and not _CALLED_BY_TESTS.search(outer.file)


def parse_dump(dump: str) -> tuple[Stack, ...]:
    """Return the threads of the last dump in the text, in the dump's order."""
    threads: list[tuple[re.Match[str], list[str]]] = []
    previous = ""
    for line in dump.splitlines():
        header = _THREAD.match(line)
        # Within a dump, an empty line precedes every thread except the first.
        if (header and previous) or line.startswith((FATAL_ERROR, "Timeout (")):
            threads.clear()
        if header:
            threads.append((header, []))
        elif threads:
            threads[-1][1].append(line)
        previous = line
    return tuple(_parse_thread(header, lines) for header, lines in threads)


def _parse_thread(header: re.Match[str], lines: list[str]) -> Stack:
    found = [match for line in lines if (match := _FRAME.match(line))]
    numbers = [int(match["line"]) if match["line"].isdigit() else 0 for match in found]
    frames = tuple(Frame(at["file"], line, at["function"]) for at, line in zip(found, numbers, strict=True))
    return Stack(
        frames, header[1] == "Current thread", header["name"] or "", bool(header["daemon"]), parse_notes(lines)
    )


def main_stack(dump: str) -> Stack:
    """Return the main thread's stack; empty if the dump has no frames at all."""
    stacks = [stack for stack in parse_dump(dump) if stack.frames]
    # Python cuts a dump off after a hundred threads, so the main thread may be missing.
    mains = [stack for stack in stacks if stack.frames[-1].function != "_bootstrap"]
    return (mains or stacks or [Stack()])[-1]


def crashed_stack(dump: str) -> Stack:
    """Return the stack of the thread that received a fatal signal; empty if there is none."""
    stacks = [stack for stack in parse_dump(dump) if stack.frames]
    return next((stack for stack in stacks if stack.current), main_stack(dump))


def is_waiting_in_jax(dump: str, kernel_wait: str, places: Collection[str] = ()) -> bool:
    """Whether the main thread waits for JAX, or for other ranks in a joint function of jaxrun.

    kernel_wait:  the kernel function in which the thread sleeps
    places:       the program's lines at which this rank has made cross-process calls

    A compiled call has no Python frame. So a program's line that is asleep on a futex counts as one, and so does a
    library's frame below a line of `places`. Python's queues do not count: they show a frame of their own.
    """
    stack = main_stack(dump)
    is_noted = stack.waits_for_ranks or stack.coordination_wait is not None
    return is_noted or ("futex" in kernel_wait and stack.is_in_jax(places))
