"""What the pytest session of a rank and the plugin in the parent tell each other, in a conversation of their gang.

    plugin (parent)                  session (each rank)
      Settings         ─────────▶                           once, as the function's argument
                       ◀─────────    Ready
      RunTest          ─────────▶                           one test
                       ◀─────────    Phase …                as setup, call and teardown end
                       ◀─────────    Gather                 gang.barrier, broadcast or allgather
      Gathered         ─────────▶                           when all have come to it
      Forsaken         ─────────▶                           when one never will
                       ◀─────────    Fault                  gang.kill, pause or cut
                       ◀─────────    Failing                --pdb: shall this rank be debugged?
      Debug            ─────────▶
                       ◀─────────    Says, Asks             a debugger's output, and its wish for a line
      Typed            ─────────▶
                       ◀─────────    Warned                 a warning that pytest has recorded
                       ◀─────────    Finished

All of them are pickled; what users' objects become within is bytes, since the parent may not have their classes.
Times are seconds since the epoch on the sender's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PHASES = ("setup", "call", "teardown")
PEER_LOST = "jaxrun_forsaken"  # in the report of a test that a Forsaken has ended: what it waited in
RANK_PLUGIN = "jaxrun-rank"  # the name under which the session of a rank has its plugin


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How the ranks' sessions are to be like the parent's.

    files:      the test files to collect
    root, ini:  pytest's rootdir and configuration file; ini may be empty
    plugins:    the values of all -p options
    options:    pytest's options by name, each pickled on its own
    path:       sys.path
    directory:  under which each rank that sees it has its temporary files; no other host has one of this name
    debug:      the rank that --pdb is for; -1: the one that asks first; None: no debugger
    coverage:   how coverage is measured, as CoverageConfig.serialize says it; empty: it is not
    environ:    variables for the tests
    """

    files: tuple[str, ...]
    root: str
    ini: str
    plugins: tuple[str, ...]
    options: Mapping[str, bytes]
    path: tuple[str, ...]
    directory: str
    debug: int | None = None
    coverage: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionReady:
    """The session has collected its tests. `captured`: where what is captured of stdout and stderr can be read."""

    captured: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class RunTest:
    """Run `test`; `then` is probably the next one of this session, empty if there is none.

    shared:  the directory of shared_tmp_path; empty if the test does not want it
    """

    test: str
    next_test: str
    shared: str


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """A report of pytest's, as pytest_report_to_serializable makes it."""

    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Gather:
    """This rank is at `where` ("barrier 'loaded'") with a value; `root`: whose value all get, -1 for all of them."""

    where: str
    value: bytes
    root: int = -1


@dataclass(frozen=True, slots=True)
class Gathered:
    """What the ranks brought, by rank; of a broadcast, the one value."""

    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Not all ranks will come; `why` names one that does not."""

    why: str


@dataclass(frozen=True, slots=True)
class FaultRequest:
    """Do to a rank what `kind` ("kill", "pause", "cut") says; the first of these in a test is carried out."""

    kind: str
    rank: int


@dataclass(frozen=True, slots=True)
class DebugRequest:
    """The test has failed here, and waits for a word before it goes on; `error` is the first line of it."""

    error: str


@dataclass(frozen=True, slots=True)
class DebugDecision:
    """The answer to Failing."""

    yes: bool


@dataclass(frozen=True, slots=True)
class DebuggerOutput:
    """Text of a debugger."""

    text: str


@dataclass(frozen=True, slots=True)
class DebuggerReadRequest:
    """A debugger wants a line."""


@dataclass(frozen=True, slots=True)
class DebuggerInput:
    """A line for the debugger; empty at the end of the input."""

    line: str


@dataclass(frozen=True, slots=True)
class RecordedWarning:
    """A warning, as text: `category` is the name of its class; the rest is what pytest_warning_recorded is told."""

    category: str
    text: str
    file: str
    line: int
    when: str
    test: str
    location: tuple[str, int, str] | None


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The test is over here.

    calls:      the cross-process calls that this rank has made so far, by group
    histories:  what they sum up to, which is equal for equal calls; of groups where that is known
    """

    calls: Mapping[str, int]
    histories: Mapping[str, int] = field(default_factory=dict)


FromRank = (
    SessionReady
    | PhaseReport
    | Gather
    | FaultRequest
    | DebugRequest
    | DebuggerOutput
    | DebuggerReadRequest
    | RecordedWarning
    | RunFinished
)
