"""What an agent or a worker may tell the head, beyond the types of its messages.

Whoever knows the job's token, or writes to a worker's channel, can send any message that is well typed: it speaks for
its own rank only, and of nothing that no process has.
"""

from __future__ import annotations

import math
import signal

from jaxrun.errors import ProtocolError
from jaxrun.protocol.agent_messages import AgentSignalled, AgentToHead, ClockReply, FaultNotInjected, WorkerExited
from jaxrun.protocol.env import REQUEST_SIGNAL
from jaxrun.protocol.probe_messages import HostFacts
from jaxrun.protocol.worker_messages import Failed
from jaxrun.spec.job.fault_spec import FAULT_KINDS
from jaxrun.text import format_ranges

_SIGNALS = {*signal.Signals, REQUEST_SIGNAL}
_LAST_SIGNAL = 64
_MAX_STATUS = 255
_MAX_PORT = 65535


def check_event(message: AgentToHead, *own: int) -> None:
    """Raise ProtocolError where the agent whose `own` ranks these are, or one of its workers, cannot mean this.

    The text completes "it sent …".
    """
    name = type(message).__name__
    if getattr(message, "rank", own[0]) not in own:
        raise ProtocolError(f"a {name} for another rank than {format_ranges(own, ',')}, its own")
    if not _is_possible(message):
        raise ProtocolError(f"a {name} that no process can mean: {message!r:.200}")


def _is_possible(message: AgentToHead) -> bool:
    match message:
        case AgentSignalled(signum=signum):
            return signum in _SIGNALS
        case WorkerExited(status=status):
            return -_LAST_SIGNAL <= status <= _MAX_STATUS
        case Failed(status=status):
            return 0 <= status <= _MAX_STATUS
        case ClockReply(asked_at=asked_at, time=time):
            return math.isfinite(asked_at) and math.isfinite(time)
        case HostFacts(port=port):
            return 0 <= port <= _MAX_PORT
        case FaultNotInjected(kind=kind):
            return kind in FAULT_KINDS
    return True
