"""What maps do with a call of a gang: receive what the ranks send while showing what they print, and end it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxrun.gang.call import Disconnected, GangCall, LauncherOutput, Printed, RankMessage, Returned
from jaxrun.protocol.map_messages import EndOfChunks

if TYPE_CHECKING:
    from jaxrun.gang.gang import BaseGang


def receive(gang: BaseGang, call: GangCall, timeout: float | None = None) -> RankMessage | Returned | None:
    """Return a rank's next message or its end, None after `timeout` seconds or if every rank has ended.

    Raises WorkerDied if a rank's process has ended.
    """
    while True:
        match call.receive(timeout):
            case Printed() as printed:
                gang.show_printed(printed)
            case LauncherOutput() as output:
                gang.show_launcher_output(output)
            case Disconnected():
                death = call.explain_death()
                assert death is not None
                raise death
            case RankMessage() | Returned() | None as event:
                return event


def finish(gang: BaseGang, call: GangCall, timeout: float | None = None) -> None:
    """Tell the ranks that no more comes, and wait until their function has returned, `timeout` seconds at most."""
    call.send(EndOfChunks())
    while call.running and receive(gang, call, timeout) is not None:
        pass
