"""What of the head's events goes into events.jsonl, as `explain` reads it."""

from __future__ import annotations

from typing import Any

from jaxrun.contract import Done, Failed, Hello, Proof, ThreadFailed
from jaxrun.head.events import (
    Action,
    AgentSignalled,
    Event,
    Exited,
    FaultAsked,
    HungUp,
    Inflict,
    Kill,
    Lost,
    Report,
    SignalAsked,
    Signalled,
    Spared,
    Spawned,
    Unavailable,
)

Entry = tuple[str, int | None, dict[str, Any]]


def of_event(event: Event) -> Entry | None:
    """(name, rank, more) of an event that is worth keeping, else None."""
    match event:
        case Report():
            return "reported", event.rank, {"host": event.host, "pid": event.pid, "address": event.address}
        case Lost():
            return "lost", event.rank, {"text": event.text}
        case Unavailable():
            return "unavailable", None, {"text": event.text}
        case AgentSignalled():
            return "agent_signalled", event.rank, {"signal": event.signum}
        case Spawned():
            return "spawned", event.rank, {"pid": event.pid}
        case Hello():
            more = {"host": event.host, "pid": event.pid, "started": event.started, "sent": event.time}
            return "hello", event.rank, more | {"versions": dict(event.versions)}
        case Proof():
            more = {"at": event.joined, "local_devices": event.local_devices, "platform": event.platform}
            return "proof", event.rank, more | {"device_kinds": list(event.device_kinds)}
        case ThreadFailed():
            return "thread_failed", event.rank, {"thread": event.thread, "error": event.error}
        case Failed():
            more = {"stage": event.stage, "status": event.status, "error": event.error, "sent": event.time}
            return "failed", event.rank, more | {"message": event.message}
        case Done():
            return "done", event.rank, {"sent": event.time}
        case Exited():
            return "exit", event.rank, {"status": event.status}
        case Signalled():
            return "signal", None, {"signal": event.signum}
        case SignalAsked():
            return "signal_asked", None, {"signal": event.signum}
        case FaultAsked():
            return "fault_asked", None, {"fault": event.kind, "ranks": list(event.ranks)}
        case HungUp():
            return "hung_up", None, {"by": event.by}
        case Spared():
            return "spared", event.rank, {"fault": event.kind, "text": event.text}
    return None


def of_action(action: Action) -> Entry | None:
    """The same for what the head has ordered."""
    if isinstance(action, Kill):
        return "stop", None, {"signal": int(action.signum), "ranks": list(action.ranks)}
    if isinstance(action, Inflict):
        return "chaos", None, {"fault": action.kind, "ranks": list(action.ranks)}
    return None
