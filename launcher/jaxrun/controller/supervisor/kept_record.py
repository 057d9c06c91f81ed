"""What agents keep of the job for another head (--wait-hosts): sent when hosts are known, and after a save.

Agents get it once a second at most. Where no head can take the place of this one, they keep nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from jaxrun.controller.seat import LinkId
from jaxrun.controller.supervisor.transport import Transport
from jaxrun.protocol.agent_messages import KeepRecord
from jaxrun.protocol.job_record import JobRecord

_INTERVAL_S = 1.0  # between two messages about the steps that were saved


class KeptRecord:
    """The record of the job, as the agents of one attempt keep it."""

    def __init__(self, record: JobRecord | None, transport: Transport, clock: Callable[[], float]) -> None:
        """`record` is None where no head takes the place of this one. `clock` returns seconds since the epoch.

        due:  when the record is sent to all agents; None while they know it
        """
        self._record = record
        self._transport = transport
        self._clock = clock
        self.due: float | None = None

    def send_to(self, link: LinkId) -> None:
        """Send the record to one agent that has come."""
        if self._record is not None:
            self._transport.send((link,), KeepRecord(self._record))

    def handle_saved(self, step: int) -> None:
        """Have agents keep the step that was saved last."""
        if self._record is None:
            return
        if self._record.saved_step is None or step > self._record.saved_step:
            self._record = replace(self._record, saved_step=step)
            self.due = self.due or self._clock() + _INTERVAL_S

    def send_all(self, hosts: Mapping[int, str], *, head_left: bool = False) -> None:
        """Send the record to all agents, with the host of each rank; `head_left`: this head's pod was drained."""
        self.due = None
        if self._record is not None:
            self._transport.send_all(KeepRecord(replace(self._record, hosts=dict(hosts), head_left=head_left)))
