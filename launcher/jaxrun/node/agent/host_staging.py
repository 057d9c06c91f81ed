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
from jaxrun.node.staging.transfer import POLL_S, PieceStream, pass_on
from jaxrun.protocol.addresses import parse_addresses
from jaxrun.protocol.auth import peer_token
from jaxrun.protocol.connect import HeadAddress, connect
from jaxrun.protocol.stage_messages import CopyStaged, Stage, StagedCopied
from jaxrun.protocol.staged_paths import use_copies

_CONNECT_S = 10.0
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
        nbytes, failure = 0, ""
        try:
            nbytes = self._copy(order, is_stopped)
        except ProtocolError as error:
            failure, until = str(error), time.monotonic() + _BLAME_S
            while not is_stopped() and time.monotonic() < until:
                time.sleep(POLL_S)
        except (OSError, UnavailableError) as error:
            failure = str(error)
        return None if failure and is_stopped() else StagedCopied(self._number, nbytes, failure)

    def _copy(self, order: CopyStaged, is_stopped: Callable[[], bool]) -> int:
        giver = HeadAddress(self._token, parse_addresses(order.giver))

        def check() -> None:
            if is_stopped():
                raise UnavailableError("stopped")

        found = connect(lambda: giver, self._number, _CONNECT_S, target="host that gives copies", check=check)
        with contextlib.ExitStack() as stack:
            stack.enter_context(found.connection)
            takers = list[PieceStream]()
            while len(takers) < order.takers and not is_stopped():
                with contextlib.suppress(queue.Empty):
                    peer = self._peers.get(timeout=POLL_S)
                    stack.enter_context(peer.connection)
                    takers.append(PieceStream(peer, is_stopped))
            return pass_on(self._stage.contents, self._find_copies(), PieceStream(found, is_stopped), takers)

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
