"""The connections to the agents of a job on other hosts: they outlive attempts, and nothing here decides anything.

The roster (controller/roster.py) decides which connection counts for which agent. Nothing here knows what a message
means, or which ranks an agent has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count

from msgspec import Struct

from jaxrun.controller.seat import LinkId
from jaxrun.errors import ProtocolError
from jaxrun.job_events.events import PeersDropped
from jaxrun.node.agent.agent import MESSAGES
from jaxrun.node.channel.connection import Connection
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.listener import Peer
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentToHead
from jaxrun.protocol.codec import encode

AgentConnection = Connection[AgentToHead]


class ConnectedAgent(Struct, frozen=True):
    """An agent that has come before there was an attempt, on its connection, and what it has sent."""

    agent: AgentId
    link: LinkId
    messages: tuple[AgentToHead, ...]


class LinkHandler(Struct, frozen=True):
    """What an attempt does when something happens to a connection.

    on_peer:      a peer has come, which is no connection yet
    on_dropped:   a peer was turned away at the port; a text for the log
    on_messages:  messages have come; `spoil` ends a connection that has sent nonsense
    on_lost:      why it is lost, and whether its host is silent; it is closed already
    on_nonsense:  it has sent something that is not a message
    """

    on_peer: Callable[[Peer], None]
    on_dropped: Callable[[str], None]
    on_messages: Callable[[LinkId, Sequence[AgentToHead]], None]
    on_lost: Callable[[LinkId, str, bool], None]
    on_nonsense: Callable[[LinkId, ProtocolError], None]


class Transport:
    """The connections to agents, by number, in the loop of the job.

    What comes while nobody handles it, between two attempts, waits until somebody does. All operations except
    `send_all` are O(1) in the number of connections.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._numbers = count(1)
        self._links: dict[LinkId, AgentConnection] = {}
        self._unsent: set[LinkId] = set()
        self._loop = loop
        self._handler: LinkHandler | None = None
        # What has come while there was no handler: peers, and what has happened to connections.
        self._waiting_peers: list[Peer] = []
        self._waiting: list[Callable[[LinkHandler], None]] = []

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[tuple[LinkId, AgentConnection]]:
        return iter([*self._links.items()])

    def serve(self, handler: LinkHandler) -> None:
        """Have this handler learn what comes from now on; `handle_waiting` tells it what has come before."""
        self._handler = handler

    def hold(self) -> None:
        """The attempt is over: what comes waits for the next one."""
        self._handler = None

    def handle_waiting(self) -> None:
        """Handle what has come while there was no handler."""
        peers, self._waiting_peers = self._waiting_peers, []
        for peer in peers:
            self.on_peer(peer)
        waiting, self._waiting = self._waiting, []
        for handle in waiting:
            self._handle(handle)

    def on_peer(self, peer: Peer) -> None:
        """A peer has come to the port."""
        if self._handler is not None:
            self._handler.on_peer(peer)
        else:
            self._waiting_peers.append(peer)

    def on_dropped(self, text: str) -> None:
        """A peer was turned away at the port."""
        self._handle(lambda handler: handler.on_dropped(text))

    def _handle(self, handle: Callable[[LinkHandler], None]) -> None:
        if self._handler is not None:
            handle(self._handler)
        else:
            self._waiting.append(handle)

    def add(self, connection: AgentConnection) -> LinkId:
        """Add a connection, which `watch` lets the loop read."""
        link = LinkId(next(self._numbers))
        self._links[link] = connection
        return link

    def watch(self, link: LinkId) -> None:
        """Read a connection that was added, unless it was dropped meanwhile."""
        if link not in self._links:
            return
        connection = self._links[link]
        self._loop.add_reader(connection.fileno(), MESSAGES, partial(self.read, link))
        if connection.unsent_bytes:
            self._unsent.add(link)
            self._loop.set_writer(connection.fileno(), partial(self._flush, link))

    def __contains__(self, link: LinkId) -> bool:
        return link in self._links

    def connection(self, link: LinkId) -> AgentConnection:
        return self._links[link]

    def drop(self, link: LinkId) -> None:
        """Close a connection; whatever is to be sent first must fit into its buffer."""
        connection = self._links.pop(link)
        self._loop.remove_reader(connection.fileno())
        self._unsent.discard(link)
        connection.close()

    # ---- sending

    def send(self, links: Iterable[LinkId], message: object) -> None:
        """Send to those of these connections that are not lost."""
        self.send_frame(links, encode(message))

    def send_frame(self, links: Iterable[LinkId], frame: bytes) -> None:
        for link in links:
            if (connection := self._links.get(link)) is not None:
                connection.send_frame(frame)
                if connection.unsent_bytes and link not in self._unsent:
                    self._unsent.add(link)
                    self._loop.set_writer(connection.fileno(), partial(self._flush, link))

    def send_all(self, message: object) -> None:
        self.send(tuple(self._links), message)

    def flush(self, timeout: float) -> None:
        """Wait until all waiting bytes are sent, for at most `timeout` seconds."""
        self._loop.run_until(lambda: not self._unsent, timeout)

    def end_sending(self) -> None:
        """Let all agents see that nothing more comes. An ssh that forwards a connection ends once both sides say so."""
        for connection in self._links.values():
            if not connection.lost_reason and not connection.unsent_bytes:
                connection.end_sending()

    def wait_for_end(self, timeout: float, links: Iterable[LinkId] | None = None) -> None:
        """Wait until all agents, or these, have closed their connections, for at most `timeout` seconds."""
        awaited = [self._links[link] for link in (self._links if links is None else links) if link in self._links]
        self._loop.run_until(lambda: all(connection.lost_reason for connection in awaited), timeout)

    def close(self) -> None:
        """Close all connections, also those of peers that wait for an attempt."""
        for link in tuple(self._links):
            self.drop(link)
        for peer in self._waiting_peers:
            peer.connection.close()
        self._waiting_peers.clear()
        self._waiting.clear()

    # ---- receiving

    def spoil(self, link: LinkId, reason: str) -> None:
        """Give up a connection; its handler learns of it when it returns."""
        self._links[link].lost_reason = reason

    def deliver(self, link: LinkId, messages: Sequence[AgentToHead]) -> None:
        """Handle messages, and the loss of a connection that they, or something else, have brought about."""
        if messages or self._links[link].lost_reason:
            self._handle(lambda handler: self._deliver(handler, link, messages))

    def _deliver(self, handler: LinkHandler, link: LinkId, messages: Sequence[AgentToHead]) -> None:
        if link not in self._links:  # dropped meanwhile
            return
        handler.on_messages(link, messages)
        connection = self._links.get(link)
        if connection is not None and connection.lost_reason:
            self.drop(link)
            handler.on_lost(link, connection.lost_reason, connection.is_silent)

    def read(self, link: LinkId) -> None:
        """Receive what has come on a connection, and handle it."""
        connection = self._links.get(link)
        if connection is None:
            return
        messages: Sequence[AgentToHead] = ()
        try:
            messages = connection.receive()
        except ProtocolError as error:
            self._on_nonsense(link, error)
        if connection.lost_reason:  # even if that waits to be handled, nothing more comes
            self._loop.remove_reader(connection.fileno())
            self._unsent.discard(link)
        self.deliver(link, messages)

    def _on_nonsense(self, link: LinkId, error: ProtocolError) -> None:
        if self._handler is None:
            self.spoil(link, str(error))  # until it is handled, nothing more is read
        self._handle(lambda handler: handler.on_nonsense(link, error) if link in self._links else None)

    def _flush(self, link: LinkId) -> None:
        connection = self._links.get(link)
        if connection is None:
            return
        connection.flush()
        if not connection.unsent_bytes:
            self._unsent.discard(link)
            self._loop.set_writer(connection.fileno(), None)


_INTERVAL_S = 60.0  # between two lines of the log
_MAX_TEXT = 200  # characters; the text may contain bytes from a stranger


class DroppedPeers:
    """Counts peers that were turned away at the port, for one log line a minute; the first one is logged at once.

    So a stranger cannot fill the run directory. `clock` returns seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._count = 0
        self._last = ""
        self._next_line = 0.0

    def add(self, text: str) -> None:
        """Count one more peer; `text` says what happened to it."""
        self._count += 1
        self._last = text[:_MAX_TEXT]

    def deadline(self) -> float | None:
        """The time of the next line, if there is anything to report."""
        return self._next_line if self._count else None

    def take(self) -> PeersDropped | None:
        """Return the number since the last call, and the text of the last one; None if there were none."""
        if not self._count:
            return None
        dropped = PeersDropped(self._count, self._last)
        self._count = 0
        self._next_line = self._clock() + _INTERVAL_S
        return dropped
