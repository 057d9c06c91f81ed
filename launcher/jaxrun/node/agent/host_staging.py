"""An agent's part in --stage: receives the copies that its host lacks, and sends them to other hosts."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace

from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.node.agent.spawn import WorkerSetup
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.listener import Listener, Peer, listen_on_tcp
from jaxrun.node.staging.copies import Copies
from jaxrun.node.staging.transfer import pass_on
from jaxrun.protocol.addresses import Address, parse_addresses
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.auth import Purpose, peer_token
from jaxrun.protocol.blocking_connection import BlockingConnection
from jaxrun.protocol.connect import HeadAddress, connect
from jaxrun.protocol.staging_messages import CopyStaged, Stage, StagedCopied, use_copies

_CONNECT_S = 10.0
_POLL_S = 0.1
_BLAME_S = 5.0  # before another host's failure is reported: that host reports it, or the head notices its loss


class HostStaging:
    """The copies of a job on this host, in all its attempts."""

    def __init__(self, stage: Stage, agent: AgentId, token: str, head: Address) -> None:
        """`agent` and `token` belong to this agent, which has found the head at `head`."""
        self._stage, self._agent, self._token, self._head = stage, agent, token, head
        self._copies: Copies | None = None

    def listen(self) -> Listener:
        """Let takers connect from now on. Raises UnavailableError if this host has no port left."""
        return listen_on_tcp((), peer_token(self._token), everywhere=True)

    def copy(self, order: CopyStaged, is_stopped: Callable[[], bool], listener: Listener) -> StagedCopied | None:
        """Execute the order, whose takers connect to `listener`; None if `is_stopped` before."""

        def check() -> None:
            if is_stopped():
                raise UnavailableError("stopped")

        try:
            return StagedCopied(self._agent, self._copy(order, listener, check))
        except (OSError, ProtocolError, UnavailableError) as error:
            until = time.monotonic() + (_BLAME_S if isinstance(error, ConnectionError | ProtocolError) else 0)
            while not is_stopped():
                if time.monotonic() >= until:
                    return StagedCopied(self._agent, 0, str(error))
                time.sleep(_POLL_S)
            return None

    def _copy(self, order: CopyStaged, listener: Listener, check: Callable[[], None]) -> int:
        where = HeadAddress(self._token, (self._head,))
        if order.giver:
            where = HeadAddress(peer_token(self._token), parse_addresses(order.giver))
        takers = list[BlockingConnection]()
        with contextlib.ExitStack() as stack:

            def add(peer: Peer) -> None:
                stack.enter_context(peer.connection)
                takers.append(BlockingConnection(peer.connection, peer.tags, f"agent {peer.number}", check))

            loop = stack.enter_context(contextlib.closing(EventLoop()))
            listener.attach(loop, 0, add, expected=order.takers)
            while len(takers) < order.takers:
                check()
                loop.run_once(_POLL_S)
            target = "host that gives copies"
            found = connect(
                lambda: where,
                self._agent,
                _CONNECT_S,
                purpose=Purpose.COPY,
                name="the agent",
                target=target,
                check=check,
            )
            stack.enter_context(found.connection)
            giver = BlockingConnection(found.connection, found.tags, str(where.addresses[0]), check)
            return pass_on(self._stage.contents, self._find_copies(), giver, takers)

    def start_from_copies(self, setup: WorkerSetup) -> WorkerSetup:
        """Return the setup with copies in place of their sources. Raises UnavailableError if this host lacks one."""
        try:
            staged = self._find_copies().by_source(self._stage)
        except OSError as error:
            raise UnavailableError(f"{os.uname().nodename} has no copy of what is staged: {error}") from None
        if lacking := [one.sources[0] for one in self._stage.contents if one.sources[0] not in staged]:
            where = f"in {self._find_copies().path} any more"
            raise UnavailableError(f"{os.uname().nodename} has no copy of {', '.join(lacking)} {where}; start again")
        argv, variables = use_copies(setup.argv, setup.environ, staged)
        return replace(setup, argv=argv, environ={**setup.environ, **variables})

    def _find_copies(self) -> Copies:
        self._copies = self._copies or Copies(self._stage.base)
        return self._copies
