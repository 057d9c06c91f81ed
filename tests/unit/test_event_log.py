"""The events and actions that are logged in events.jsonl."""

import json
import signal

import pytest

from jaxrun.head.actions import PrintLine, Send, SignalRanks, TakeSnapshot
from jaxrun.head.events import AgentLost, FaultRequested, LauncherSignalled, ParentExited, SignalRequested, Tick
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentSignalled,
    FaultNotInjected,
    InjectFault,
    StartFailed,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply
from jaxrun.protocol.worker_messages import (
    ChildForked,
    CoordinatorReady,
    DeviceReport,
    Done,
    Exit,
    Failed,
    Hello,
    ThreadFailed,
)
from jaxrun.rundir import event_log

KEPT = {
    "spawned": (WorkerSpawned(1, 77), ("spawned", 1, {"pid": 77})),
    "hello": (
        Hello(1, "h1", 77, 2.5, 1.5, {"jax": "0.10.2"}, "ab", {"SECRET": "x"}),
        ("hello", 1, {"host": "h1", "pid": 77, "started": 1.5, "sent": 2.5, "versions": {"jax": "0.10.2"}}),
    ),
    "proof": (
        DeviceReport(1, 1, 2, 8, 16, ("H200",), "gpu", "nonce", 3.5, 4.5),
        ("proof", 1, {"at": 3.5, "local_devices": 8, "platform": "gpu", "device_kinds": ["H200"]}),
    ),
    "a thread": (
        ThreadFailed(1, 5.0, "Loader", "OSError", "Traceback"),
        ("thread_failed", 1, {"thread": "Loader", "error": "OSError"}),
    ),
    "a fork": (ChildForked(1, 5.0, "loader.py:12 pool"), ("forked", 1, {"at": "loader.py:12 pool"})),
    "failed": (
        Failed(1, 5.0, "program", 3, "SystemExit", "bye", ""),
        (
            "failed",
            1,
            {"stage": "program", "status": 3, "error": "SystemExit", "sent": 5.0, "message": "bye"},
        ),
    ),
    "done": (Done(1, 6.0), ("done", 1, {"sent": 6.0})),
    "exit": (WorkerExited(1, -9), ("exit", 1, {"status": -9})),
    "signal": (LauncherSignalled(signal.SIGTERM), ("signal", None, {"signal": 15})),
    "an agent": (AgentConnected(1, "h2"), ("connected", 1, {"host": "h2"})),
    "signal to an agent": (AgentSignalled(1, 15), ("agent_signalled", 1, {"signal": 15})),
    "lost": (AgentLost(1, "no answer"), ("lost", 1, {"text": "no answer"})),
    "a signal that was asked for": (SignalRequested(12), ("signal_asked", None, {"signal": 12})),
    "a fault that was asked for": (
        FaultRequested("cut", (0, 2)),
        ("fault_asked", None, {"fault": "cut", "ranks": [0, 2]}),
    ),
    "no such fault": (FaultNotInjected(1, "cut", "no"), ("spared", 1, {"fault": "cut", "text": "no"})),
    "hung up": (ParentExited("its gang"), ("hung_up", None, {"by": "its gang"})),
    "unavailable": (StartFailed("x"), ("unavailable", None, {"text": "x"})),
}


@pytest.mark.parametrize(("event", "entry"), KEPT.values(), ids=KEPT)
def test_an_event_is_kept_in_a_form_that_json_takes(event, entry):
    assert event_log.event_entry(event) == entry
    assert json.loads(json.dumps(entry[2])) == entry[2]


@pytest.mark.parametrize("event", [Tick(), SnapshotReply(SnapshotPurpose.SHOW, {}, {}, {}), CoordinatorReady(0, "h:1")])
def test_events_that_nobody_reads_again_are_not_kept(event):
    assert event_log.event_entry(event) is None


def test_of_the_actions_only_signals_and_faults_are_kept():
    assert event_log.action_entry(Send((0, 2), InjectFault("cut"))) == (
        "chaos",
        None,
        {"fault": "cut", "ranks": [0, 2]},
    )
    assert event_log.action_entry(SignalRanks((0, 2), signal.SIGKILL)) == ("stop", None, {"signal": 9, "ranks": [0, 2]})
    for action in (PrintLine("x"), Send((0,), Exit()), TakeSnapshot((0,), SnapshotPurpose.SHOW)):
        assert event_log.action_entry(action) is None
