"""The output that agents on other hosts send: shown, logged where their hosts do not do that, and acknowledged."""

from __future__ import annotations

from jaxrun.controller.supervisor.connections import AgentConnection, AgentConnections
from jaxrun.protocol.agent_messages import OutputChunk, OutputCredit, StartWorker, StreamEnded
from jaxrun.protocol.worker_messages import Failed
from jaxrun.records.output.output import Output

_ACKNOWLEDGE_AFTER_BYTES = 2**16  # of output from one agent


class RemoteOutput:
    """An agent may send only so much output before it is acknowledged. The cost does not depend on their number."""

    def __init__(self, output: Output, connections: AgentConnections) -> None:
        self._output = output
        self._connections = connections
        self._logs_remotely: set[int] = set()
        self._unacknowledged: dict[AgentConnection, int] = {}  # bytes
        self._to_acknowledge: set[AgentConnection] = set()

    def handle_start(self, start: StartWorker) -> None:
        """The worker is about to be started."""
        if start.log_dir:
            self._logs_remotely.add(start.rank)

    def handle(self, rank: int, connection: AgentConnection, message: OutputChunk | StreamEnded) -> None:
        if isinstance(message, StreamEnded):
            self._output.end_stream(rank, message.stream)
            return
        write = self._output.show if rank in self._logs_remotely else self._output.write
        write(rank, message.stream, message.data)
        self._unacknowledged[connection] = total = self._unacknowledged.get(connection, 0) + len(message.data)
        if total >= _ACKNOWLEDGE_AFTER_BYTES:
            self._to_acknowledge.add(connection)

    def log_traceback(self, failed: Failed) -> None:
        if failed.rank not in self._logs_remotely:
            self._output.logs.write_file(failed.rank, "err", failed.traceback.encode())

    def acknowledge(self) -> None:
        """Unless output waits here, allow agents whose output has been shown or kept to send as much again."""
        if self._output.congested:
            return
        for connection in self._to_acknowledge:
            self._connections.send_to(connection, OutputCredit(self._unacknowledged.pop(connection)))
        self._to_acknowledge.clear()

    def forget(self, connection: AgentConnection) -> None:
        """The connection is about to be closed."""
        self._unacknowledged.pop(connection, None)
        self._to_acknowledge.discard(connection)
