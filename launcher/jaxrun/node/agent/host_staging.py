"""An agent's part in --stage: receives the copies that its host lacks, and sends them to other hosts."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.node.agent.spawn import WorkerSetup
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.listener import Listener, Peer, listen_on_tcp
from jaxrun.node.staging.copies import Copies
from jaxrun.node.staging.interpreter import base_python, usable_environment
from jaxrun.node.staging.transfer import pass_on
from jaxrun.protocol.addresses import Address, parse_addresses
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.auth import Purpose, peer_token
from jaxrun.protocol.blocking_connection import BlockingConnection
from jaxrun.protocol.connect import HeadAddress, connect
from jaxrun.protocol.names import CARRIED_ENVIRONMENT, LACKS_DIRECTORY
from jaxrun.protocol.ssh_start import CarriedEnvironment
from jaxrun.protocol.staging_messages import CopyStaged, Stage, StagedCopied, staged_path, use_copies

_CONNECT_S = 10.0
_POLL_S = 0.1
_BLAME_S = 5.0  # before another host's failure is reported: that host reports it, or the head notices its loss


class HostStaging:
    """The copies of a job on this host, in all its attempts."""

    def __init__(self, stage: Stage, agent: AgentId, token: str, head: Address, environ: Mapping[str, str]) -> None:
        """`agent`, `token` and `environ` belong to this agent, which has found the head at `head`."""
        self._stage, self._agent, self._token, self._head = stage, agent, token, head
        carried = environ.get(CARRIED_ENVIRONMENT)
        self._carried = CarriedEnvironment.from_text(carried) if carried else None
        self._missing_directory = environ.get(LACKS_DIRECTORY, "")
        self.lacks_environment = self._carried is not None
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
            nbytes = self._copy(order, listener, check)
            if self.lacks_environment:
                self.load_environment()
            return StagedCopied(self._agent, nbytes)
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
            acceptor = listener.accept(loop, 0, add, expected=order.takers)
            stack.callback(acceptor.close)
            while not loop.run_until(lambda: len(takers) >= order.takers, _POLL_S):
                check()
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

    def load_environment(self) -> None:
        """Find packages in the environment that has come to this host. Raises the exceptions of start_from_copies."""
        staged, carried = self._staged(), self._carried
        assert carried is not None
        sys.path += [copy for part in carried.path if (copy := staged_path(part, staged)) not in sys.path]
        importlib.invalidate_caches()
        self.lacks_environment = False

    def start_from_copies(self, setup: WorkerSetup) -> WorkerSetup:
        """Return the setup with copies in place of their sources. Raises UnavailableError if this host lacks one."""
        staged = self._staged()
        if self._missing_directory:
            os.chdir(staged_path(self._missing_directory, staged))
        python = staged_path(self._carried.python, staged) if self._carried is not None else setup.argv[0]
        argv, variables = use_copies((python, *setup.argv[1:]), setup.environ, staged)
        return replace(setup, argv=argv, environ={**setup.environ, **variables})

    def _staged(self) -> dict[str, str]:
        """Return the copies by source. Raises UnavailableError if this host lacks one, or cannot use one."""
        try:
            staged = self._find_copies().by_source(self._stage)
        except OSError as error:
            raise UnavailableError(f"{os.uname().nodename} has no copy of what is staged: {error}") from None
        if lacking := [one.sources[0] for one in self._stage.contents if one.sources[0] not in staged]:
            where = f"in {self._find_copies().path} any more"
            raise UnavailableError(f"{os.uname().nodename} has no copy of {', '.join(lacking)} {where}; start again")
        return staged if self._carried is None else self._with_interpreter(staged, self._carried)

    def _with_interpreter(self, staged: dict[str, str], carried: CarriedEnvironment) -> dict[str, str]:
        """Let the environment in the copies have an interpreter that runs on this host."""
        copies, copied = self._find_copies().path, staged_path(carried.prefix, staged)
        beside = os.path.join(copies, os.path.relpath(copied, copies).split("/")[0])
        try:
            usable = usable_environment(copied, os.path.relpath(carried.python, carried.prefix), base_python(), beside)
        except OSError as error:
            raise UnavailableError(f"{os.uname().nodename} cannot use the copy of {carried.prefix}: {error}") from None
        same = [source for source, copy in staged.items() if copy == copied]
        return {**dict.fromkeys((carried.prefix, *same), usable), **{k: v for k, v in staged.items() if k not in same}}

    def _find_copies(self) -> Copies:
        self._copies = self._copies or Copies(self._stage.base)
        return self._copies
