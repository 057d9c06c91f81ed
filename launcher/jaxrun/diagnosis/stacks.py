"""What Python's fault handler writes, read back: who is where, and which ranks stand at the same place.

A dump holds one block per thread, newest thread first, so the main thread's is the last; the innermost frame
comes first. One text may hold several dumps; the last one counts. All functions are pure.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from jaxrun.text import format_columns, format_ranges, format_ranks, format_ranks_on_hosts, has_several_hosts, plural

# Samples: `Thread 0x00007f2c4e7fc6c0 [Loader-1] (most recent call first):`, `  File "a.py", line 88 in step`
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+(?: \[.*\])? \(most recent call first\):")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_PACKAGES = r"(?:^|/)(?:site|dist)-packages/"
_PYTHON = r"/lib(?:64)?/python3\.\d+/"
_JAX = re.compile(rf"{_PACKAGES}(?:jax|jaxlib)/|/jax/(?:_src|experimental|interpreters)/|/jaxlib/")
_SCAFFOLD = re.compile(rf"/jaxrun_runtime/(?!programs/)|/jaxrun/protocol/|{_PYTHON}(?:runpy|threading)\.py$|^<frozen ")
_LIBRARY = re.compile(rf"{_PACKAGES}|{_PYTHON}|^<frozen ")
STACKS_FILE = "stacks.json"
NATIVE_STACKS_SIGNAL = signal.SIGRTMIN + 8  # asks the launcher for what STACKS_SIGNAL asks it for, and for C frames
NATIVE_STACKS_TIMEOUT_S = 30.0  # seconds that a host may take over the C frames of its ranks
_SHIPPED_PROGRAMS = "/jaxrun_runtime/programs/"
# Where a rank of a gang waits for what its parent says.
_LISTENS = re.compile(r"/jaxrun/protocol/\w+\.py$|/jaxrun_runtime/gang\w*[./]")
_LISTENING = "_receive"
_IDLE = "idle: it has returned, and waits for the next call"
_NO_ANSWER = "no answer: it blocks signals, or is about to end"


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def is_jax(self) -> bool:
        return _JAX.search(self.file) is not None

    @property
    def is_scaffold(self) -> bool:
        """Ours, or what Python itself puts around a program or a thread."""
        return _SCAFFOLD.search(self.file) is not None

    @property
    def is_wrapper(self) -> bool:
        return self.file.endswith("/traceback_util.py")

    @property
    def is_users(self) -> bool:
        if _SHIPPED_PROGRAMS in self.file:
            return True
        return not (self.is_jax or self.is_scaffold or _LIBRARY.search(self.file))

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{self.line} {self.function}"


@dataclass(frozen=True, slots=True)
class Stack:
    """One thread's frames, innermost first; `current`: the one that took the signal."""

    frames: tuple[Frame, ...] = ()
    current: bool = False

    @property
    def users(self) -> tuple[Frame, ...]:
        """The program's frames; where it has none, as a module of a library, those that are not scaffold."""
        own = tuple(frame for frame in self.frames if frame.is_users)
        return own or tuple(frame for frame in self.frames if not frame.is_scaffold) or self.frames

    @property
    def called(self) -> tuple[Frame, ...]:
        """What the program has called and not come back from, innermost first, if it has left frames."""
        first = self.users[0] if self.users else None
        return self.frames[: self.frames.index(first)] if first else ()

    @property
    def is_idle(self) -> bool:
        """Whether this is a rank of a gang between two calls."""
        inner = list(itertools.takewhile(lambda frame: _LISTENS.search(frame.file), self.frames))
        outer = self.frames[len(inner)] if len(inner) < len(self.frames) else None
        listens = any(frame.function == _LISTENING for frame in inner)
        return listens and outer is not None and outer.is_scaffold

    def place(self) -> str:
        """`data.py:31 __next__ <- train.py:84 main   in queue: get`: where it is, called from where."""
        users = self.users
        if not users:
            return _NO_ANSWER
        if self.is_idle:
            return _IDLE
        caller = next((frame for frame in users if frame.file != users[0].file), None)
        text = f"{users[0]} <- {caller}" if caller else str(users[0])
        if not self.called:
            return text
        # JAX wraps its own functions, to leave its inside out of tracebacks.
        entry = next((frame for frame in reversed(self.called) if not frame.is_wrapper), self.called[-1])
        return f"{text}   in {'JAX' if entry.is_jax else PurePath(entry.file).stem}: {entry.function}"


def parse_dump(dump: str) -> tuple[Stack, ...]:
    """The threads of the last dump in the text, in its order."""
    threads: list[tuple[bool, list[Frame]]] = []
    before = ""
    for line in dump.splitlines():
        header, frame = _THREAD.match(line), _FRAME.match(line)
        # Within a dump an empty line stands before every thread but the first.
        if (header and before) or line.startswith(("Fatal Python error", "Timeout (")):
            threads.clear()
        if header:
            threads.append((header[1] == "Current thread", []))
        elif frame and threads:
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            threads[-1][1].append(Frame(frame["file"], number, frame["function"]))
        before = line
    return tuple(Stack(tuple(frames), current) for current, frames in threads)


def main_stack(dump: str) -> Stack:
    """The main thread's stack; empty if the dump has no frame at all."""
    stacks = [stack for stack in parse_dump(dump) if stack.frames]
    # Beyond a hundred threads a dump is cut, and may lack the main one.
    mains = [stack for stack in stacks if stack.frames[-1].function != "_bootstrap"]
    return (mains or stacks or [Stack()])[-1]


def format_crash(fatal: str) -> str:
    """The crashed thread in a fatal signal's dump, written like a traceback; empty if there is no frame."""
    stacks = [stack for stack in parse_dump(fatal) if stack.frames]
    stack = next((stack for stack in stacks if stack.current), main_stack(fatal))
    frames = [frame for frame in stack.frames if not frame.is_scaffold] or stack.frames
    if not frames:
        return ""
    lines = [f'  File "{f.file}", line {f.line}, in {f.function}' for f in reversed(frames)]
    return "\n".join(["Stack (most recent call last):", *lines])


def format_all_frames(dumps: Mapping[int, str], hosts: Mapping[int, str]) -> str:
    """All frames of the main threads, once for each group of ranks that have the same, innermost last."""
    return format_by_text({rank: _in_full(main_stack(dump)) for rank, dump in dumps.items()}, hosts)


def _in_full(stack: Stack) -> str:
    frames = tuple(frame for frame in stack.frames if not frame.is_scaffold) or stack.frames
    return "\n".join(f'  File "{f.file}", line {f.line}, in {f.function}' for f in reversed(frames)) or "  no frames"


def format_by_text(texts: Mapping[int, str], hosts: Mapping[int, str]) -> str:
    """The ranks' texts, each below the ranks that have it, the most common first."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(texts):
        groups.setdefault(texts[rank], []).append(rank)
    parts = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    return "\n\n".join(f"{format_ranks_on_hosts(ranks, hosts)}:\n{text}" for text, ranks in parts)


def is_waiting_in_jax(dump: str, kernel_wait: str) -> bool:
    """Whether the main thread waits for JAX: in its Python code, or in native code called from the program.

    `kernel_wait` is the kernel's name for what the thread sleeps in. A compiled call has no Python frame:
    the program's own line, asleep on a futex, is taken for one. Python's queues show a frame of their own.
    """
    return "futex" in kernel_wait and is_in_jax(dump)


def is_in_jax(dump: str) -> bool:
    """The same of a thread that may be running: one that polls a GPU, or works in native code of another library."""
    stack = main_stack(dump)
    return bool(stack.frames) and (stack.frames[0].is_users or any(frame.is_jax for frame in stack.called))


def format_groups(
    dumps: Mapping[int, str],
    hosts: Mapping[int, str],
    waits: Mapping[int, str],
    calls: Callable[[Iterable[int]], str] = lambda _: "",
) -> str:
    """Where the ranks are, one line per place, the most common first, and who differs; empty without dumps.

    `calls` says how far ranks have come with theirs.

    Of a rank whose dump is empty, `waits` has what the kernel says of it.
    """
    places: dict[str, list[int]] = {}
    for rank in sorted(dumps):
        says = waits.get(rank, "")
        silent = f"no answer: {says}" if " " in says else _NO_ANSWER
        places.setdefault(main_stack(dumps[rank]).place() if dumps[rank] else silent, []).append(rank)
    groups = sorted(places.items(), key=lambda group: (-len(group[1]), group[1]))
    rows = [(plural(len(ranks), "rank"), _names(ranks, hosts), place, calls(ranks)) for place, ranks in groups]
    if not rows:
        return ""
    lines = [f"  {line}" for line in format_columns(rows)]
    heading = f"{plural(len(dumps), 'rank')}, {plural(len(groups), 'group')}"
    return "\n".join([heading, *lines, *_odd_ones([ranks for _, ranks in groups])])


def _odd_ones(groups: list[list[int]]) -> Iterator[str]:
    odd = [rank for ranks in groups[1:] for rank in ranks]
    if odd and len(odd) < len(groups[0]):
        yield f"{format_ranks(odd)} {'is the one that differs' if len(odd) == 1 else 'differ from the rest'}."


def _names(ranks: list[int], hosts: Mapping[int, str]) -> str:
    where = {hosts[rank] for rank in ranks}
    return format_ranges(ranks) + (f" ({where.pop()})" if has_several_hosts(hosts) and len(where) == 1 else "")
