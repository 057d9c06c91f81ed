"""What maps do with a call of a gang: receive what the ranks send while showing what they print, and end the call."""

from __future__ import annotations

from jaxrun.frontends.gang.call import GangCall
from jaxrun.frontends.gang.call_events import Disconnected, LauncherOutput, Printed, RankMessage, Returned
from jaxrun.protocol.map_messages import EndOfChunks


def receive(call: GangCall, timeout: float | None = None) -> RankMessage | Returned | None:
    """Return a rank's next message or its end, None after `timeout` seconds or if every rank has ended.

    Raises WorkerDied if a rank's process has ended.
    """
    while True:
        match call.receive(timeout):
            case Printed() | LauncherOutput() as event:
                call.show(event)
            case Disconnected():
                raise call.explain_death()
            case RankMessage() | Returned() | None as event:
                return event


def finish(call: GangCall, timeout: float | None = None) -> None:
    """Tell the ranks that no more comes, and wait until their function has returned.

    Gives up when nothing has come for `timeout` seconds; whatever the ranks still send is dropped.
    """
    call.send(EndOfChunks())
    while call.running:
        match call.receive(timeout):
            case Printed() | LauncherOutput() as event:
                call.show(event)
            case None:
                return
