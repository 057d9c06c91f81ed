"""An agent's part in a job that asks for probes: reports its host, and finds out which other hosts it can connect to.

Most jobs do not ask: what is needed is imported only then.
"""

from __future__ import annotations

import selectors
import socket
import subprocess
import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from jaxrun.protocol.addresses import parse_addresses
from jaxrun.protocol.connect import ConnectionAttempt, describe_error
from jaxrun.protocol.probe_messages import PeerResults, ProbePeers

if TYPE_CHECKING:
    from jaxrun.node.channel.connection import Connection
    from jaxrun.protocol.agent_messages import HeadToAgent

_AT_ONCE = 64  # connections that are tried
_POLL_S = 0.5
_LOOKUP_TIMEOUT_S = 2.0


class HostProbe:
    """Answers other hosts from `send_facts` to its end, which must come before this process forks."""

    def __init__(self, rank: int, environ: Mapping[str, str], connection: Connection[HeadToAgent], token: str) -> None:
        self._rank = rank
        self._environ = environ
        self._connection = connection
        self._token = peer_token(token)
        self._server: PeerServer | None = None

    def send_facts(self, *, sees_run_dir: bool) -> None:
        """Tell the head what there is on this host, and where this agent answers the others."""
        from jaxrun.node.agent.host_facts import collect_facts

        self._server = self._server or PeerServer(self._token)
        facts = collect_facts(self._rank, self._environ, sees_run_dir=sees_run_dir, port=self._server.port)
        self._connection.send(facts)

    def probe_peers(self, order: ProbePeers) -> None:
        """Try to connect to the other hosts, and tell the head; these are answered from now on."""
        assert self._server is not None
        self._server.start(len(order.addresses))
        self._connection.send(probe_peers(self._rank, self._token, order))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._server is not None:
            self._server.close()


class PeerServer:
    """Listens from its creation on; from `start` to `close` a thread lets in whoever proves to know the token."""

    def __init__(self, token: str) -> None:
        """Raises UnavailableError if this host has no port left."""
        from jaxrun.node.channel.listener import listen_on_tcp

        self._listener = listen_on_tcp((), token, everywhere=True)
        self.port: int = self._listener.sockets[0].getsockname()[1]
        self._stop, self._stopped = socket.socketpair()
        self._thread: threading.Thread | None = None

    def start(self, expected: int) -> None:
        """Answer; `expected` is how many peers may come at the same moment."""
        self._thread = threading.Thread(target=self._serve, args=(expected,), name="jaxrun-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread: a process with threads must not fork."""
        self._stop.close()
        if self._thread is not None:
            self._thread.join()
        self._listener.close()
        self._stopped.close()

    def _serve(self, expected: int) -> None:
        from jaxrun.node.channel.event_loop import EventLoop

        loop, is_over = EventLoop(), threading.Event()
        self._listener.attach(loop, 0, lambda peer: peer.connection.close(), expected=expected)
        loop.add_reader(self._stopped.fileno(), 1, is_over.set)
        while not is_over.is_set():
            loop.run_once()
        loop.close()


def peer_token(token: str) -> str:
    """What the agents of a job prove to each other: another secret than what they prove to the head."""
    return f"peers {token}"


def probe_peers(rank: int, token: str, order: ProbePeers) -> PeerResults:
    """Connect from the agent of `rank` to all others of the order, the next one first, as each has another next one."""
    names, interfaces, errors = _interfaces_by_address(), dict[int, str](), dict[int, str]()
    waiting = sorted(order.addresses.keys() - {rank}, key=lambda peer: (peer < rank, peer), reverse=True)
    attempts: dict[int, ConnectionAttempt] = {}
    with selectors.DefaultSelector() as selector:
        while waiting or attempts:
            while waiting and len(attempts) < _AT_ONCE:
                peer = waiting.pop()
                try:
                    attempts[peer] = ConnectionAttempt(parse_addresses(order.addresses[peer])[0], token, rank)
                    selector.register(attempts[peer].connection, selectors.EVENT_READ, peer)
                except OSError as error:
                    errors[peer] = describe_error(error)
            for peer in [key.data for key, _ in selector.select(_POLL_S)]:
                if attempts[peer].advance():
                    interfaces[peer] = names.get(attempts[peer].connection.getsockname()[0], "")
            for peer, attempt in tuple(attempts.items()):
                if peer not in interfaces and not attempt.check_failure():
                    continue
                if attempt.failure:
                    errors[peer] = attempt.failure
                selector.unregister(attempt.connection)
                attempts.pop(peer).connection.close()
    return PeerResults(rank, interfaces, errors, _find_unknown(order.hosts.values()))


def _interfaces_by_address() -> dict[str, str]:
    """The network interface of each address of this host."""
    from jaxrun.node.channel.host_addresses import list_addresses

    return {address.ip: address.interface for address in list_addresses()}


def _find_unknown(hosts: Iterable[str]) -> tuple[str, ...]:
    """Those of the hosts whose name leads nowhere here; by a process, as nothing else ends a lookup that hangs."""
    names = tuple(dict.fromkeys(hosts))
    try:
        done = subprocess.run(["getent", "hosts", *names], capture_output=True, text=True, timeout=_LOOKUP_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ()
    known = set(done.stdout.split())
    return tuple(name for name in names if name not in known)
