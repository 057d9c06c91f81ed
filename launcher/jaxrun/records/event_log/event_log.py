"""The event log, events.jsonl: which events of the head are logged, and how a line is read back.

A line is a JSON object with "time" (seconds since the epoch), "event", "rank" where the event has one, "attempt" from
the second attempt on, and more. Attempts begin with "started" and "attempt_started"; after each "attempt_ended" there
is another. "clock" says what is to be added to the times of a rank's own clock: to those in its flight recorder, in its
"exit" and in "profiled". The last counts; with an "error", how wrong it may be, it comes from round trips.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentReport,
    AgentSignalled,
    FaultNotInjected,
    InjectFault,
    StartFailed,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.probe_messages import HostFacts, PeerResults
from jaxrun.protocol.requests import OverviewRequest
from jaxrun.protocol.stop_messages import NO_STEP, CheckpointSaved, StopPolled, StopReached, StopRequested
from jaxrun.protocol.worker_messages import ChildForked, DeviceReport, Done, Failed, Hello, ProfileEnded, ThreadFailed
from jaxrun.records.event_log.actions import (
    Action,
    PrintStallNotice,
    RecordClock,
    RecordDivergence,
    RecordStraggler,
    Send,
    SignalRanks,
)
from jaxrun.records.event_log.events import (
    AgentLost,
    Event,
    FaultRequested,
    LauncherSignalled,
    ParentExited,
    Requested,
    SignalRequested,
)

DIVERGENCE = "divergence"
_MAX_ATTEMPT = 10**6
Entry = tuple[str, int | None, dict[str, Any]]  # event, rank, more


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One line, read back."""

    name: str
    time: float
    rank: int | None
    more: Mapping[str, Any]

    @property
    def attempt(self) -> int:
        """The attempt that it belongs to, from 1."""
        return int(self.more.get("attempt", 1))


def parse_line(line: str) -> LoggedEvent:
    """Raises ValueError if the line is damaged."""
    try:
        more = json.loads(line)
        rank = int(more["rank"]) if "rank" in more else None
        event = LoggedEvent(str(more["event"]), float(more["time"]), rank, more)
        if event.attempt not in range(1, _MAX_ATTEMPT):
            raise ValueError(f"no job has so many attempts: {event.attempt!r:.40}")
        return event
    except (ArithmeticError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"not a line of the event log: {error!r}") from None


def parse_lines(lines: Iterable[str]) -> Iterator[LoggedEvent]:
    """Parse all lines but those that are damaged."""
    for line in lines:
        with suppress(ValueError):
            yield parse_line(line)


def event_entry(event: Event) -> Entry | None:
    """What is logged of an event; None for an event that is not logged."""
    match event:
        case AgentConnected():
            return "connected", event.rank, {"host": event.host}
        case AgentReport():
            return "reported", event.rank, {"host": event.host, "pid": event.pid, "address": event.address}
        case HostFacts():
            return "host_facts", event.rank, {"facts": asdict(event)}
        case PeerResults():
            return "peers", event.rank, {"results": asdict(event)}
        case AgentLost():
            return "lost", event.rank, {"text": event.reason}
        case StartFailed():
            return "unavailable", None, {"text": event.text}
        case AgentSignalled():
            return "agent_signalled", event.rank, {"signal": event.signum}
        case WorkerSpawned():
            return "spawned", event.rank, {"pid": event.pid}
        case Hello():
            more = {"host": event.host, "pid": event.pid, "started": event.started_at, "sent": event.time}
            return "hello", event.rank, more | {"versions": dict(event.versions)}
        case DeviceReport():
            more = {"at": event.joined_at, "local_devices": event.local_devices, "platform": event.platform}
            return "proof", event.rank, more | {"device_kinds": list(event.device_kinds)}
        case ThreadFailed():
            return "thread_failed", event.rank, {"thread": event.thread, "error": event.error}
        case ChildForked():
            return "forked", event.rank, {"at": event.place}
        case CheckpointSaved():
            return "saved", event.rank, {"step": event.step}
        case StopPolled():
            return "stop_polled", event.rank, {}
        case StopReached():
            return "stop_reached", event.rank, {"step": event.step if event.step != NO_STEP else None}
        case ProfileEnded():
            more = {"started": event.started_at, "sent": event.time, "session": event.session, "last": event.last}
            return "profiled", event.rank, more | {"file": event.file, "error": event.error}
        case Failed():
            more = {"stage": event.stage, "status": event.status, "error": event.error, "sent": event.time}
            return "failed", event.rank, more | {"message": event.message}
        case Done():
            return "done", event.rank, {"sent": event.time}
        case WorkerExited():
            bursts = [[round(value, 3) for value in burst] for burst in event.output_bursts]
            return "exit", event.rank, {"status": event.status} | ({"output": bursts} if bursts else {})
        case LauncherSignalled():
            return "signal", None, {"signal": event.signum}
        case SignalRequested():
            return "signal_asked", None, {"signal": event.signum}
        case FaultRequested():
            return "fault_asked", None, {"fault": event.kind, "ranks": list(event.ranks)}
        case Requested(request=OverviewRequest()):
            return None  # twice a second while somebody looks
        case Requested():
            return "requested", None, {"request": type(event.request).__name__}
        case ParentExited():
            return "hung_up", None, {"by": event.reason}
        case FaultNotInjected():
            return "spared", event.rank, {"fault": event.kind, "text": event.reason}
    return None


def action_entry(action: Action) -> Entry | None:
    """What is logged of an action of the head; None for an action that is not logged."""
    if isinstance(action, SignalRanks):
        return "stop", None, {"signal": int(action.signum), "ranks": list(action.ranks)}
    if isinstance(action, RecordClock):
        return "clock", action.rank, {"offset": action.offset_s, "error": action.error_s}
    if isinstance(action, RecordDivergence):
        return DIVERGENCE, None, {"text": action.text}
    if isinstance(action, RecordStraggler):
        return "straggler", None, asdict(action.straggler)
    if isinstance(action, PrintStallNotice):
        return "stall_notice", None, {"idle": round(action.idle_s, 1)}
    if isinstance(action, Send) and isinstance(action.message, InjectFault):
        return "chaos", None, {"fault": action.message.kind, "ranks": list(action.ranks)}
    if isinstance(action, Send) and isinstance(action.message, StopRequested):
        return "stop_requested", None, {"reason": action.message.reason, "ranks": list(action.ranks)}
    return None
