"""Flight recorders for tests of what a worker writes: an empty one, and one read as protocol/flight_file.py says."""

import json
import os
from dataclasses import dataclass
from typing import Any

import pytest

from jaxrun.protocol import flight_file
from jaxrun_runtime.lockstep.flight_recorder import FlightRecorder


@dataclass(frozen=True)
class Made:
    """One record; `stack` and `program` are the lines that describe them, `ranks` the group's.

    `time` and `entered` are nanoseconds since the epoch.
    """

    time: int
    entered: int
    chain: int
    number: int
    ranks: str
    program: dict[str, Any]
    stack: tuple[str, ...]

    @property
    def name(self):
        return self.program["name"]

    @property
    def place(self):
        return os.path.basename(self.stack[0])


class Flight:
    def __init__(self, fd):
        self._content = os.pread(fd, flight_file.TEXT_OFFSET + flight_file.MAX_TEXT_BYTES, 0)
        self.words = memoryview(self._content[: flight_file.TEXT_OFFSET]).cast("Q")
        text = self._content[flight_file.TEXT_OFFSET : flight_file.TEXT_OFFSET + self.words[flight_file.TEXT_SIZE_WORD]]
        assert text == b"" or text.endswith(b"\n")
        self.lines = [json.loads(line) for line in text.splitlines()]
        self.groups = {line["group"]: line["ranks"] for line in self.lines if {"group", "ranks"} <= line.keys()}
        self.programs: dict[int, dict[str, Any]] = {}
        for line in self.lines:
            if "program" in line:  # one, or one before and one after its compilation
                self.programs.setdefault(line["program"], {}).update(line)
        self.sites = {line["site"]: tuple(line["stack"]) for line in self.lines if "site" in line}
        self.compiled = [line["compiling"] for line in self.lines if "compiling" in line]
        self.troubles = [line["trouble"] for line in self.lines if "trouble" in line]

    @property
    def written(self):
        return (
            self.words[flight_file.MAGIC_WORD] == flight_file.MAGIC
            and self.words[flight_file.FORMAT_WORD] == flight_file.FORMAT
        )

    @property
    def level(self):
        return self.words[flight_file.LEVEL_WORD]

    @property
    def made(self):
        return self.words[flight_file.RECORD_COUNT_WORD]

    @property
    def calls(self):
        """The records that the ring still holds, oldest first."""
        return [self._record(n) for n in range(max(0, self.made - flight_file.RING_RECORDS), self.made)]

    @property
    def pending(self):
        """(number, ranks, name, place) of the call that was entered and has not returned, or None."""
        call, what = self.words[flight_file.PENDING_TAG_WORD], self.words[flight_file.PENDING_SITE_WORD]
        if not call or self.words[flight_file.PENDING_COMPILES_WORD]:
            return None
        assert self.words[flight_file.PENDING_SINCE_WORD]
        place = os.path.basename(self._site(what >> 32)[0])
        return call & 2**48 - 1, self.groups[call >> 48], self.programs[what & 2**32 - 1]["name"], place

    def _record(self, n):
        at = flight_file.HEADER_WORDS + n % flight_file.RING_RECORDS * flight_file.RECORD_WORDS
        time, chain, what, call, entered = self.words[at : at + flight_file.RECORD_WORDS]
        program, site = self.programs[what & 2**32 - 1], self._site(what >> 32)
        return Made(time, entered, chain, call & 2**48 - 1, self.groups[call >> 48], program, site)

    def _site(self, number):
        return self.sites[number] if number else ("",)


@pytest.fixture
def file():
    fd = os.memfd_create("flight")
    os.ftruncate(fd, flight_file.TEXT_OFFSET)
    yield fd
    os.close(fd)


@pytest.fixture
def recorder(file):
    return FlightRecorder(file, 0)


def about_program(name="jit(f)", key="00000000000000aa", code="00000000000000bb", text="eJw="):
    fields = {"source": "f at m.py:1", "arguments": [], "results": [], "mesh": "0,1"}
    return {"key": key, "code": code, "name": name, "text": text, **fields}


def add_program(recorder, ranks="0-1", **about):
    return recorder.add_program(recorder.add_group(ranks), about_program(**about))
