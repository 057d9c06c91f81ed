"""The messages between the pytest session of a rank and the plugin in the parent, sent within a call of the gang.

    plugin (parent)                     session (each rank)
      SessionSettings     ─────────▶                           once, as the argument of the call
                          ◀─────────    SessionReady
      RunTest             ─────────▶                           one test
                          ◀─────────    PhaseReport ...        when setup, call and teardown end
                          ◀─────────    Gather                 gang.barrier, broadcast or allgather
      Gathered            ─────────▶                           when all ranks have sent theirs
      PeerLost            ─────────▶                           when one never will
                          ◀─────────    FaultRequest           gang.kill or pause
                          ◀─────────    DebuggerQuestion       with --pdb, after a failure
      DebuggerDecision    ─────────▶
                          ◀────────▶    DebuggerOutput, DebuggerReadRequest, DebuggerInput, DebuggerClosed
                                        (debugger_messages.py)
                          ◀─────────    RecordedWarning
                          ◀─────────    RunFinished
      None                ─────────▶                           end the session

All of them are pickled. Values of users' classes are bytes in them, because the parent may not have these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from jaxrun.protocol.hidden_fields import HidesFields

PHASES = ("setup", "call", "teardown")
# The key in a report whose failure is a PeerLost: the call in which the rank waited, and why.
PEER_LOST = "jaxrun_peer_lost"


class SessionSettings(HidesFields, frozen=True):
    """Settings that make the ranks' sessions similar to the parent's.

    files:      the test files to collect
    root, ini:  pytest's rootdir and configuration file; ini may be empty
    plugins:    the values of all -p options
    options:    pytest's options by name, each pickled on its own
    path:       sys.path
    directory:  for temporary files of ranks that can see it; no other host has a directory of this name
    debug:      whether a rank whose test fails asks for a debugger
    coverage:   configuration of coverage, as CoverageConfig.serialize returns it; empty: do not measure
    environ:    variables for the tests
    """

    hidden = frozenset({"environ"})

    files: tuple[str, ...]
    root: str
    ini: str
    plugins: tuple[str, ...]
    options: Mapping[str, bytes]
    path: tuple[str, ...]
    directory: str
    debug: bool = False
    coverage: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


class SessionReady(Struct, frozen=True):
    """The session has collected its tests. `captured`: the files with captured stdout and stderr; None if unnamed."""

    captured: tuple[str, str] | None


class RunTest(Struct, frozen=True):
    """Run a test.

    next_test:  probably the next one on this gang; empty if there is none
    shared:     the directory for shared_tmp_path; empty if the test does not use it
    """

    test: str
    next_test: str
    shared: str


class PhaseReport(Struct, frozen=True):
    """pytest's report of a phase, as pytest_report_to_serializable makes it."""

    report: dict[str, Any]


class Gather(Struct, frozen=True):
    """This rank is at `where` ("gang.barrier('loaded')") with a value.

    root: the rank whose value all ranks get; -1: all get the values of all
    """

    where: str
    value: bytes
    root: int = -1


class Gathered(Struct, frozen=True):
    """The values of all ranks, by rank; for a broadcast, the root's value only."""

    values: tuple[bytes, ...]


class PeerLost(Struct, frozen=True):
    """The gather will never be complete; `reason` names a rank that will not come."""

    reason: str


class FaultRequest(Struct, frozen=True):
    """Inject the fault `kind` ("kill", "pause") into a rank; equal requests in one test count once."""

    kind: str
    rank: int


class DebuggerQuestion(Struct, frozen=True):
    """The test has failed on this rank, which waits for a DebuggerDecision. `error`: the beginning of the failure."""

    error: str


class RecordedWarning(Struct, frozen=True):
    """A warning as text: the name of its class, its message, and the arguments of pytest_warning_recorded."""

    category: str
    text: str
    file: str
    line: int
    when: str
    test: str
    location: tuple[str, int, str] | None


class RunFinished(Struct, frozen=True):
    """The test has ended on this rank.

    calls:   the number of cross-process calls that this rank has made so far, by group of ranks
    chains:  a hash of these calls, which is equal for equal calls; for the groups where it is known
    """

    calls: Mapping[str, int]
    chains: Mapping[str, int] = field(default_factory=dict)
