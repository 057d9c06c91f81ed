"""The worker's side of the flight recorder: writes the file that jaxrun.protocol.flight_file describes.

Any thread may write records. There is no lock, because a signal handler may make calls, too. CPython switches to other
threads and handlers at calls, at the start of a loop's iteration and within long multiplications. Code that must not be
interrupted has none of these.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from collections.abc import Mapping
from time import time_ns
from typing import Any

from jaxrun.protocol import flight_file
from jaxrun_runtime import linux

_MASK = 2**64 - 1
_GROUP_SHIFT, _SITE_SHIFT = 48, 32
_TEXTS_LIMIT = flight_file.MAX_TEXT_BYTES // 2  # for lowered programs, so that short lines still fit
_LAST_LINE_BYTES = 1024  # reserved for the line that says that no more lines follow


class RankGroup:
    """Ranks that make calls together, such as "0-3", with the number and the hash of their calls so far."""

    __slots__ = ("chain", "made", "ranks", "tag", "threads")

    def __init__(self, number: int, ranks: str, made: int = 0) -> None:
        self.ranks = ranks
        self.tag = number << _GROUP_SHIFT
        self.made = made
        self.chain = 0
        self.threads: set[int] = set()  # threads that have entered calls in Python: first calls of programs


class RecordedProgram:
    """A cross-process program that has been called. `word` is its hash, which goes into its group's chain.

    If the program does not communicate, it is described, but its calls are not recorded: a rank may make them alone.
    """

    __slots__ = ("code", "communicates", "group", "key", "name", "number", "word")

    def __init__(
        self, number: int, group: RankGroup, name: str, key: str, code: str, communicates: bool = True
    ) -> None:
        self.number = number
        self.group = group
        self.name = name
        self.key = key
        self.code = code
        self.communicates = communicates
        self.word = hash((int(key or "0", 16), int(code or "0", 16)))


class FlightRecorder:
    """Writes to the file `fd`, of at least TEXT_OFFSET bytes. Raises OSError or ValueError if it cannot map it."""

    def __init__(self, fd: int, rank: int, *, level: int = flight_file.NOTHING, strict: bool = False) -> None:
        os.set_inheritable(fd, False)
        more: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        self._words = memoryview(mmap.mmap(fd, flight_file.TEXT_OFFSET, **more)).cast("Q")
        self._fd = fd
        self._identity = linux.file_identity(fd)
        self._writing = threading.RLock()
        self._text_size = 0
        self._text_on = True
        self._made = 0
        self._pending: dict[object, tuple[int, int, int, bool]] = {}
        self._groups: dict[str, RankGroup] = {}
        self._programs = 0
        self._all_known = True
        self._compiling: dict[int, int] = {}
        self._nan_search = 0
        words = self._words
        words[flight_file.FORMAT_WORD], words[flight_file.PID_WORD], words[flight_file.RANK_WORD] = (
            flight_file.FORMAT,
            os.getpid(),
            rank,
        )
        words[flight_file.LEVEL_WORD], words[flight_file.STRICT_WORD] = level, strict
        words[flight_file.MAGIC_WORD] = flight_file.MAGIC

    def call_counts(self) -> dict[str, int]:
        return {ranks: group.made for ranks, group in tuple(self._groups.items())}

    def call_chains(self) -> dict[str, int]:
        """Return the hash of each group's calls; empty if the code of a program is unknown."""
        return {ranks: group.chain for ranks, group in tuple(self._groups.items())} if self._all_known else {}

    # ---- calls

    @property
    def words(self) -> memoryview:
        """The mapped header and ring."""
        return self._words

    def record(self, program: RecordedProgram, site: int, entered: int = 0) -> None:
        """Record a call that has been dispatched. Takes about half a microsecond.

        entered:  nanoseconds since the epoch; 0 if unknown
        """
        now, group, word = time_ns(), program.group, program.word
        while True:
            number = group.made + 1
            chain = hash((group.chain, word)) & _MASK  # a hash of integers is equal in every process
            if group.made + 1 == number:
                break
        group.made, group.chain = number, chain
        words, made = self._words, self._made
        at = flight_file.HEADER_WORDS + made % flight_file.RING_RECORDS * flight_file.RECORD_WORDS
        words[at] = now
        words[at + 1] = chain
        words[at + 2] = program.number | site << _SITE_SHIFT
        words[at + 3] = number | group.tag
        words[at + 4] = entered
        self._made = words[flight_file.RECORD_COUNT_WORD] = made + 1

    def begin_call(self, program: RecordedProgram, site: int, entered: int) -> object:
        """Record that a call is entered, because it may never return. Returns a ticket for `end_call`."""
        self._words[flight_file.ENTERED_WORD] = entered
        program.group.threads.add(threading.get_ident())
        return self._add_pending(program, site, entered, is_compiled=True)

    def begin_call_compilation(self, program: RecordedProgram, site: int, since: int) -> object | None:
        """Record that a program is compiled for the group's next call. Returns a ticket for `end_call`.

        Returns None if other threads have entered calls of the group: they may make the next call.
        """
        if program.group.threads - {threading.get_ident()}:
            return None
        return self._add_pending(program, site, since, is_compiled=False)

    def _add_pending(self, program: RecordedProgram, site: int, since: int, *, is_compiled: bool) -> object:
        ticket, what = object(), program.number | site << _SITE_SHIFT
        self._pending[ticket] = (program.group.made + 1 | program.group.tag, what, since, is_compiled)
        self._show_pending()
        return ticket

    def end_call(self, ticket: object) -> None:
        self._pending.pop(ticket, None)
        self._show_pending()

    def _show_pending(self) -> None:
        """Show the oldest pending call in the header; several threads may have one."""
        call, what, since, is_compiled = next(iter(list(self._pending.values())), (0, 0, 0, True))
        words = self._words
        words[flight_file.PENDING_TAG_WORD] = 0
        words[flight_file.PENDING_COMPILES_WORD] = 0 if is_compiled else 1
        words[flight_file.PENDING_SITE_WORD], words[flight_file.PENDING_SINCE_WORD] = what, since
        words[flight_file.PENDING_TAG_WORD] = call

    # ---- compilations

    def begin_compilation(self, name: str, ranks: str = "") -> None:
        """Record that this thread starts to compile. `ranks`: see flight_file.py; empty for its own devices."""
        self._compiling[threading.get_ident()] = time_ns()
        self._write({"compiling": name, **({"ranks": ranks} if ranks else {})})
        self._show_compiling()

    def end_compilation(self) -> None:
        """Record that this thread's compilation has ended, or has failed."""
        if self._compiling.pop(threading.get_ident(), None) is not None:
            self._words[flight_file.COMPILED_COUNT_WORD] += 1
            self._show_compiling()

    def note_standing(self, site: int) -> None:
        """Note that the main thread is inside JAX's C++ dispatch at this site; 0 if it is not."""
        words = self._words
        words[flight_file.STANDING_SITE_WORD] = 0
        words[flight_file.STANDING_AT_WORD] = time_ns()
        words[flight_file.STANDING_SITE_WORD] = site

    def begin_nan_search_call(self, search: int) -> None:
        """Note that the next call belongs to this search for a NaN; see call_hooks.nan_search."""
        words = self._words
        if search != self._nan_search:
            self._nan_search = search
            words[flight_file.NAN_SEARCH_SINCE_WORD] = time_ns()
        words[flight_file.NAN_SEARCH_UNTIL_WORD] = flight_file.NAN_SEARCH_GOES_ON

    def end_nan_search_call(self) -> None:
        self._words[flight_file.NAN_SEARCH_UNTIL_WORD] = time_ns()

    def add_stage(self, stage: str, name: str, seconds: float) -> None:
        """Note a stage of a compilation that has just ended, unless it was too short to matter."""
        if seconds >= flight_file.MIN_STAGE_S and self._text_size < _TEXTS_LIMIT:
            now = time_ns()
            self._write({"stage": stage, "name": name, "since": now - int(seconds * 1e9), "until": now})

    def _show_compiling(self) -> None:
        self._words[flight_file.COMPILING_SINCE_WORD] = min(list(self._compiling.values()), default=0)

    # ---- descriptions

    def add_group(self, ranks: str, before: int = 0) -> RankGroup:
        """Return the group of these ranks. A new one has made `before` calls, with an earlier process of this rank."""
        with self._writing:
            if ranks not in self._groups:
                number = len(self._groups) + 1
                self._write({"group": number, "ranks": ranks, **({"before": before} if before else {})})
                self._groups[ranks] = RankGroup(number, ranks, before)
            return self._groups[ranks]

    def count_on(self, calls: Mapping[str, int]) -> None:
        """Let the calls of these groups count on from these numbers, if they are larger: others have made so many.

        Their chains begin anew, since the ranks have not made the same calls before.
        """
        for ranks, number in calls.items():
            group = self.add_group(ranks, number)
            group.made, group.chain = max(group.made, number), 0

    def add_program(
        self,
        group: RankGroup,
        about: Mapping[str, Any],
        *,
        communicates: bool = True,
        announced: RecordedProgram | None = None,
    ) -> RecordedProgram:
        """Describe one more program, which may have been `announced` before it was compiled.

        about:  the fields of its line except number and group; without the key before the compilation
        """
        key, fields = about.get("key", ""), dict(about)
        with self._writing:
            if announced is None:
                self._programs += 1
            number = announced.number if announced is not None else self._programs
            self._all_known = self._all_known and (bool(about["code"]) or not communicates)
            if announced is not None:
                del fields["text"]  # it is in the first line already
            elif self._text_size >= _TEXTS_LIMIT:
                fields["text"] = ""
            self._write({"program": number, "group": group.tag >> _GROUP_SHIFT, **fields})
            return RecordedProgram(number, group, about["name"], key, about["code"], communicates)

    def add_site(self, number: int, stack: list[str]) -> None:
        """Describe a call site; `stack` has "file:line function" for each frame, the innermost first."""
        self._write({"site": number, "stack": stack})

    def add_trouble(self, text: str, level: int | None = None) -> None:
        """Note why less is recorded from now on. `level`: what is still recorded, one of flight_file.LEVELS."""
        if level is not None:
            self._words[flight_file.LEVEL_WORD] = min(level, self._words[flight_file.LEVEL_WORD])
        self._write({"trouble": text})

    def detach(self) -> None:
        """Stop writing to the file, in a process that the program has forked: the file belongs to the rank."""
        self._text_on = False
        self._words = memoryview(bytearray(flight_file.TEXT_OFFSET)).cast("Q")

    def _write(self, line: Mapping[str, Any]) -> None:
        if not self._text_on:
            return
        data = _encode(line)
        with self._writing:
            if self._text_size + len(data) > flight_file.MAX_TEXT_BYTES - _LAST_LINE_BYTES:
                self._text_on = False
                data = _encode({"trouble": f"the recorder's {flight_file.MAX_TEXT_BYTES >> 20} MiB of text are full"})
            at = self._text_size
            self._text_size = at + len(data)
            try:
                self._put(data, at)
            except OSError:  # the disk is full, say, or the program has closed the file
                self._text_on = False
                self._text_size = at
            else:
                self._words[flight_file.TEXT_SIZE_WORD] = self._text_size

    def _put(self, data: bytes, at: int) -> None:
        if linux.file_identity(self._fd) != self._identity:
            raise OSError("the descriptor now belongs to another file")
        while data:
            written = os.pwrite(self._fd, data, flight_file.TEXT_OFFSET + at)
            data, at = data[written:], at + written


def _encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"
