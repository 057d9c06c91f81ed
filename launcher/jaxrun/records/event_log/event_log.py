"""The event log, events.jsonl: the messages of a job, each with its time. docs/event-log.md has the table of all.

The first line is `{"format": 3}`. Each further line is a JSON object: "time" (seconds since the epoch, on the clock of
the launcher's host), "attempt" (from 1), "event", a message as the codec writes it, with its "type", and, where the
head has sent it to ranks, these as "to". Some fields are left empty: secrets, and texts that are in the ranks' logs.

Lines are decoded straight into their classes. A line that this fails for is looked at again more slowly: it may be of a
newer version, with further fields, or of format 2, which wrote texts that are no UTF-8 in another way.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.errors import ProtocolError, UsageError
from jaxrun.job_events.actions import (
    Action,
    PrintStallNotice,
    RecordClock,
    RecordDivergence,
    RecordLoss,
    RecordReplacement,
    RecordReturn,
    RecordStraggler,
    RecordTime,
    Send,
    SignalRanks,
)
from jaxrun.job_events.events import Event, LauncherNote, Requested, StallNotice
from jaxrun.protocol.agent_messages import AgentReport, FirstOutput, InjectFault, StartFailed, WorkerExited
from jaxrun.protocol.codec import encode_json, from_content, message_types
from jaxrun.protocol.forkserver_messages import Preloaded
from jaxrun.protocol.job_messages import ProfileRequest, StacksRequest
from jaxrun.protocol.probe_messages import Machine
from jaxrun.protocol.stop_messages import StopRequested
from jaxrun.protocol.survivor_messages import RanksLost
from jaxrun.protocol.worker_messages import Failed, Hello, ThreadFailed

FORMAT = 3
_OLDER_FORMATS = (2,)  # which are still read
_FORMAT_KEY = "format"
_MAX_TIME_S = 1e11  # some thousand years
_MAX_ATTEMPT = 10**6
_MAX_RANKS = 2**17

LoggedMessage = (
    LauncherNote
    | Event
    | FirstOutput
    | Preloaded
    | StacksRequest
    | ProfileRequest
    | SignalRanks
    | InjectFault
    | StopRequested
    | RanksLost
    | RecordClock
    | RecordDivergence
    | RecordLoss
    | RecordReplacement
    | RecordReturn
    | RecordTime
    | Straggler
)
# Events that are frequent, answer the head's queries, or contain what a person types.
_UNLOGGED = (
    "Tick", "Requested", "TerminalLine", "RankReply", "FlightAtEnd", "ProgramDetailsReply", "ClockReply",
    "CoordinatorReady", "Call", "PollCount", "SignalHandlers", "Interrupted",
    "DebuggerRequest", "DebuggerOutput", "DebuggerReadRequest", "DebuggerClosed",
    "LiveRanksAsked", "RequestInput", "RequestEnded", "DebugpyOutput", "DebugpyReady",
)  # fmt: skip
LOGGED_TYPES: Mapping[str, type[Struct]] = {
    name: kind for name, kind in message_types(LoggedMessage).items() if name not in _UNLOGGED
}
_EMPTIED: Mapping[type, Mapping[str, Any]] = {
    AgentReport: {"machine": Machine("", ())},
    Hello: {"environment": {}, "public_key": ""},
    Failed: {"traceback": ""},
    ThreadFailed: {"traceback": ""},
    StartFailed: {"traceback": ""},
    WorkerExited: {"crash_dump": "", "stderr_tail": ""},
}


class LoggedEvent(Struct, frozen=True):
    """One line: a message, when the launcher received it, in which attempt, and to which ranks it was sent, if any."""

    time: Annotated[float, Meta(ge=-_MAX_TIME_S, le=_MAX_TIME_S)]
    message: LoggedMessage = field(name="event")
    attempt: Annotated[int, Meta(ge=1, lt=_MAX_ATTEMPT)] = 1
    to: tuple[int, ...] = ()

    @property
    def rank(self) -> int | None:
        """The rank of the message; None if it is not about one rank."""
        rank = getattr(self.message, "rank", None)
        return rank if rank is not None and 0 <= rank < _MAX_RANKS else None


class EventLog:
    """The events of a log, each parsed when it is reached: a log of a million events needs no memory for all.

    source:   the name of the log, for errors
    damaged:  how many lines were left out so far
    """

    def __init__(self, lines: Iterable[str | bytes], source: str = "the event log") -> None:
        self._lines = lines
        self._source = source
        self.damaged = 0

    def __iter__(self) -> Iterator[LoggedEvent]:
        """Yield the events of all lines except damaged ones. Raises UsageError if they have another format."""
        for line in self._lines:
            if line.isspace() or not line:
                continue
            try:
                event = parse_line(line)
            except ValueError:
                form = _format_of(line)
                if form not in (None, FORMAT, *_OLDER_FORMATS):
                    told = f"it is of format {form}, and this jaxrun reads format {FORMAT}"
                    raise UsageError(f"cannot read {self._source}: {told}.") from None
                self.damaged += form is None
                continue
            yield event


def find_message(thing: Event | Action) -> tuple[LoggedMessage, tuple[int, ...]] | None:
    """Return the logged message of an event or an action, and its target ranks; None for one that is not logged."""
    ranks: tuple[int, ...] = ()
    message: Any = thing
    match thing:
        case Send():
            message, ranks = thing.message, thing.ranks
            if not isinstance(message, InjectFault | StopRequested | RanksLost):
                return None
        case Requested():
            message = thing.request
        case RecordStraggler():
            message = thing.straggler
        case PrintStallNotice():
            message = StallNotice(round(thing.idle_s, 1))
    return (message, ranks) if type(message).__name__ in LOGGED_TYPES else None


def format_header() -> str:
    """Return the first line of the file."""
    return json.dumps({_FORMAT_KEY: FORMAT})


class _Line(Struct, kw_only=True, omit_defaults=True):
    time: float
    attempt: int
    to: tuple[int, ...] = ()
    event: LoggedMessage


def format_line(event: LoggedEvent) -> str:
    """Return the line of an event, without its newline."""
    message: Any = event.message
    if emptied := _EMPTIED.get(type(message)):
        message = replace(message, **emptied)
    line = _Line(time=round(event.time, 6), attempt=event.attempt, to=event.to, event=message)
    return encode_json(line).decode()


@functools.cache
def _decoder() -> msgspec.json.Decoder[LoggedEvent]:
    return msgspec.json.Decoder(LoggedEvent)


def parse_line(line: str | bytes) -> LoggedEvent:
    """Parse a line. Raises ValueError if it is damaged, or not an event."""
    try:
        event = _decoder().decode(line)
    except (ValueError, RecursionError):  # msgspec's own errors are ValueErrors
        event = _parse_leniently(line)
    if type(event.message).__name__ not in LOGGED_TYPES:
        raise ValueError(f"not an event of the log: {line!r:.80}")
    return event


def _parse_leniently(line: str | bytes) -> LoggedEvent:
    """Parse a line whose event may have unknown fields. Raises ValueError."""
    text = line.decode(errors="replace") if isinstance(line, bytes) else line
    try:
        content = json.loads(text)
        values = content["event"]
        known = {"type", *LOGGED_TYPES[values["type"]].__struct_fields__}
        event = {name: value for name, value in values.items() if name in known}
        return from_content(LoggedEvent, {**content, "event": event})
    except (ArithmeticError, AttributeError, LookupError, ProtocolError, RecursionError, TypeError) as error:
        raise ValueError(f"not a line of the event log: {error!r}") from None


def _format_of(line: str | bytes) -> int | None:
    """Return the format that a first line names; None for any other line."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    form = content.get(_FORMAT_KEY) if isinstance(content, dict) else None
    return form if type(form) is int else None
