"""The output of ranks on other hosts: what agents send is shown or stored, and only so much at a time."""

from __future__ import annotations

from jaxrun.controller.seat import LinkId
from jaxrun.controller.supervisor.transport import Transport
from jaxrun.protocol.agent_messages import OutputChunk, OutputCredit, StartWorkers, StreamEnded
from jaxrun.protocol.worker_messages import Failed
from jaxrun.records.output.output import Output

_ACKNOWLEDGE_AFTER_BYTES = 2**16  # of output from one agent


class RemoteOutput:
    """Limits how much output an agent may send before it is acknowledged. The cost does not depend on their number."""

    def __init__(self, output: Output, transport: Transport) -> None:
        self._output = output
        self._transport = transport
        self._logs_remotely: set[int] = set()
        self._unacknowledged: dict[LinkId, int] = {}  # bytes
        self._to_acknowledge: set[LinkId] = set()

    def handle_start(self, order: StartWorkers) -> None:
        """Note who keeps the logs of these ranks, which may have been started on another host before."""
        self._logs_remotely.difference_update(start.worker.rank for start in order.workers)
        self._logs_remotely.update(start.worker.rank for start in order.workers if start.log_dir)

    def handle(self, rank: int, link: LinkId, message: OutputChunk | StreamEnded) -> None:
        if isinstance(message, StreamEnded):
            self._output.end_stream(rank, message.stream)
            return
        write = self._output.show if rank in self._logs_remotely else self._output.write
        write(rank, message.stream, message.data)
        self._unacknowledged[link] = total = self._unacknowledged.get(link, 0) + len(message.data)
        if total >= _ACKNOWLEDGE_AFTER_BYTES:
            self._to_acknowledge.add(link)

    def log_traceback(self, failed: Failed) -> None:
        if failed.rank not in self._logs_remotely:
            self._output.logs.write_file(failed.rank, "err", failed.traceback.encode())

    def acknowledge(self) -> None:
        """Unless output is stuck here, allow agents whose output has been shown or stored to send as much again."""
        if self._output.congested:
            return
        for link in self._to_acknowledge:
            self._transport.send((link,), OutputCredit(self._unacknowledged.pop(link)))
        self._to_acknowledge.clear()

    def forget(self, link: LinkId) -> None:
        self._unacknowledged.pop(link, None)
        self._to_acknowledge.discard(link)
