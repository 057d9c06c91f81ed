"""The event log, events.jsonl: the messages of a job, each with its time. docs/event-log.md has the table of all.

The first line is `{"format": 2}`. Each further line is a JSON object: "time" (seconds since the epoch, on the clock of
the launcher's host), "attempt" (from 1), "event", a message as the codec writes it, with its "type", and, where the
head has sent it to ranks, these as "to". Some fields are left empty: secrets, and texts that are in the ranks' logs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.errors import ProtocolError, UsageError
from jaxrun.protocol.agent_messages import AgentReport, FirstOutput, InjectFault, StartFailed, WorkerExited
from jaxrun.protocol.codec import field_values, from_content, message_types, to_content
from jaxrun.protocol.forkserver_messages import Preloaded
from jaxrun.protocol.job_messages import ProfileRequest, StacksRequest
from jaxrun.protocol.probe_messages import Machine
from jaxrun.protocol.stop_messages import StopRequested
from jaxrun.protocol.worker_messages import Failed, Hello, ThreadFailed
from jaxrun.records.event_log.actions import (
    Action,
    PrintStallNotice,
    RecordClock,
    RecordDivergence,
    RecordStraggler,
    Send,
    SignalRanks,
)
from jaxrun.records.event_log.events import Event, LauncherNote, Requested, StallNotice

FORMAT = 2
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
    | RecordClock
    | RecordDivergence
    | Straggler
)
# Events that are frequent, answer the head's queries, or contain what a person types.
_UNLOGGED = (
    "Tick", "Requested", "TerminalLine", "RankReply", "RecorderSnapshot", "ProgramDetailsReply", "ClockReply",
    "CoordinatorReady", "Call", "PollCount", "SignalHandlers", "Interrupted",
    "DebuggerRequest", "DebuggerOutput", "DebuggerReadRequest", "DebuggerClosed",
    "RequestInput", "RequestEnded", "DebugpyOutput", "DebugpyReady",
)  # fmt: skip
LOGGED_TYPES = {name: kind for name, kind in message_types(LoggedMessage).items() if name not in _UNLOGGED}
_DECODER = json.JSONDecoder()
_ENCODER = json.JSONEncoder(ensure_ascii=False, default=to_content)
_EMPTIED: Mapping[type, Mapping[str, Any]] = {
    AgentReport: {"machine": Machine("", ())},
    Hello: {"environment": {}, "public_key": ""},
    Failed: {"traceback": ""},
    ThreadFailed: {"traceback": ""},
    StartFailed: {"traceback": ""},
    WorkerExited: {"crash_dump": "", "stderr_tail": ""},
}


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One line: a message, when the launcher received it, in which attempt, and to which ranks it was sent, if any."""

    time: float
    message: LoggedMessage
    attempt: int = 1
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

    def __init__(self, lines: Iterable[str], source: str = "the event log") -> None:
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
                if form not in (None, FORMAT):
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
            if not isinstance(message, InjectFault | StopRequested):
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


def format_line(event: LoggedEvent) -> str:
    """Return the line of an event, without its newline."""
    kind = type(event.message)
    content: dict[str, Any] = {"time": round(event.time, 6), "attempt": event.attempt}
    content |= {"to": event.to} if event.to else {}
    content["event"] = {"type": kind.__name__, **field_values(event.message), **_EMPTIED.get(kind, {})}
    return _ENCODER.encode(content)


def parse_line(line: str) -> LoggedEvent:
    """Parse a line. Raises ValueError if it is damaged, or not an event."""
    try:
        content, end = _DECODER.raw_decode(line)
        if line[end:].strip():
            raise ValueError(f"more than one value: {line:.80}")
        time, attempt = float(content["time"]), int(content["attempt"])
        if not abs(time) <= _MAX_TIME_S or not 1 <= attempt < _MAX_ATTEMPT:
            raise ValueError(f"no time or no attempt: {line:.80}")
        event = content["event"]
        message = from_content(LOGGED_TYPES[event["type"]], event, lenient=True)
        ranks = tuple(map(int, content["to"])) if "to" in content else ()
        return LoggedEvent(time, message, attempt, ranks)
    except (ArithmeticError, AttributeError, LookupError, ProtocolError, RecursionError, TypeError) as error:
        raise ValueError(f"not a line of the event log: {error!r}") from None


def _format_of(line: str) -> int | None:
    """Return the format that a first line names; None for any other line."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    form = content.get(_FORMAT_KEY) if isinstance(content, dict) else None
    return form if type(form) is int else None
