"""An agent's part in a job that asks for probes: reports its host, and measures the way to the others.

Most jobs do not ask: what is needed is imported only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from jaxrun.node.channel.connection import Connection
    from jaxrun.node.probe.peer_server import PeerServer
    from jaxrun.protocol.agent_messages import HeadToAgent
    from jaxrun.protocol.probe_messages import MeasurePeers


class HostProbe:
    """Answers other hosts from `send_facts` to its end, which must come before this process forks."""

    def __init__(self, rank: int, environ: Mapping[str, str], connection: Connection[HeadToAgent]) -> None:
        self._rank = rank
        self._environ = environ
        self._connection = connection
        self._server: PeerServer | None = None

    def send_facts(self, *, sees_run_dir: bool) -> None:
        """Tell the head what there is on this host, and where this agent answers the others."""
        from jaxrun.node.probe.facts import collect_facts
        from jaxrun.node.probe.peer_server import PeerServer

        self._server = self._server or PeerServer()
        port, cookie = self._server.port, self._server.cookie
        self._connection.send(
            collect_facts(self._rank, self._environ, sees_run_dir=sees_run_dir, port=port, cookie=cookie)
        )

    def measure(self, order: MeasurePeers) -> None:
        """Measure the way to the other hosts and tell the head."""
        from jaxrun.node.probe.peer_client import measure_peers

        self._connection.send(measure_peers(self._rank, order))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._server is not None:
            self._server.close()
