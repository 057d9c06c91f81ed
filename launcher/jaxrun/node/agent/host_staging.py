"""An agent's part in --stage: takes the copies that its host lacks, and gives them to other hosts."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.node.agent.host_probe import PeerServer
from jaxrun.node.agent.spawn import WorkerSetup
from jaxrun.node.channel.listener import Peer
from jaxrun.node.staging.copies import Copies
from jaxrun.node.staging.transfer import pass_on
from jaxrun.protocol.addresses import parse_addresses
from jaxrun.protocol.auth import peer_token
from jaxrun.protocol.connect import HeadAddress, connect
from jaxrun.protocol.gang_connection import BlockingConnection
from jaxrun.protocol.stage_messages import CopyStaged, Stage, StagedCopied
from jaxrun.protocol.staged_paths import use_copies

_CONNECT_S = 10.0
_POLL_S = 0.1
_BLAME_S = 5.0  # before a failure of another host is reported: that one reports it, or the head notices its loss


class HostStaging:
    """The copies that a job has on this host, in all its attempts."""

    def __init__(self, stage: Stage, number: int, token: str) -> None:
        """`number` and `token` are the agent's."""
        self._stage, self._number, self._token = stage, number, peer_token(token)
        self._copies: Copies | None = None
        self._peers = queue.SimpleQueue[Peer]()

    def serve(self) -> PeerServer:
        """Let takers connect from now on. Raises UnavailableError if this host has no port left."""
        self._peers = queue.SimpleQueue()
        server = PeerServer(self._token, self._peers.put)
        server.start(0)
        return server

    def copy(self, order: CopyStaged, is_stopped: Callable[[], bool]) -> StagedCopied | None:
        """Carry out the order; None if `is_stopped` before."""

        def check() -> None:
            if is_stopped():
                raise UnavailableError("stopped")

        try:
            return StagedCopied(self._number, self._copy(order, check))
        except (OSError, ProtocolError, UnavailableError) as error:
            is_own = isinstance(error, OSError) and not isinstance(error, ConnectionError)
            until = time.monotonic() + (0 if is_own else _BLAME_S)
            while not is_stopped():
                if time.monotonic() >= until:
                    return StagedCopied(self._number, 0, str(error))
                time.sleep(_POLL_S)
            return None

    def _copy(self, order: CopyStaged, check: Callable[[], None]) -> int:
        where = HeadAddress(self._token, parse_addresses(order.giver))
        found = connect(lambda: where, self._number, _CONNECT_S, target="host that gives copies", check=check)
        with contextlib.ExitStack() as stack:
            stack.enter_context(found.connection)
            takers = list[BlockingConnection]()
            while len(takers) < order.takers:
                check()
                with contextlib.suppress(queue.Empty):
                    peer = self._peers.get(timeout=_POLL_S)
                    stack.enter_context(peer.connection)
                    takers.append(BlockingConnection(peer.connection, peer.tags, f"rank {peer.rank}", check))
            giver = BlockingConnection(found.connection, found.tags, order.giver, check)
            return pass_on(self._stage.contents, self._find_copies(), giver, takers)

    def start_from_copies(self, setup: WorkerSetup) -> WorkerSetup:
        """The same with the copies in place of their sources, as far as this host has them."""
        staged: Mapping[str, str] = {}
        with contextlib.suppress(OSError):
            staged = self._find_copies().by_source(self._stage)
        argv, variables = use_copies(setup.argv, setup.environ, staged)
        return replace(setup, argv=argv, environ={**setup.environ, **variables})

    def _find_copies(self) -> Copies:
        self._copies = self._copies or Copies(self._stage.base)
        return self._copies
