"""Connects an agent to the head, or a gang's rank to its parent.

All known addresses are tried; the first one whose server proves that it knows the token wins.
"""

from __future__ import annotations

import errno
import itertools
import os
import selectors
import socket
import time
from collections.abc import Callable

from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.protocol.hidden_fields import HidesFields

from . import addresses
from .addresses import AnyAddress, UnixAddress
from .auth import ClientHandshake, Purpose
from .message_tags import ConnectionTags

_STAGGER_S = 0.2  # until the next address is tried, too, while one has not answered
_ATTEMPT_TIMEOUT_S = 8.0  # after which an address that does not answer is abandoned
_FIRST_ROUND_S = 1.5  # for all addresses; each later round gets this much more, so that none waits for long
_ROUND_PAUSE_S = 0.25  # between two rounds: the server may not listen yet


class HeadAddress(HidesFields, frozen=True):
    """Where the head of a job (or the parent of a gang) may listen, and the token that both know."""

    hidden = frozenset({"token"})

    token: str
    addresses: tuple[AnyAddress, ...]


class HeadConnection(HidesFields, frozen=True):
    """A connection to a head that has proved that it knows the token."""

    hidden = frozenset({"token"})

    connection: socket.socket
    tags: ConnectionTags | None
    token: str


class ConnectionAttempt:
    """A connection to one address that is being made, until the server there has proved itself."""

    def __init__(self, address: AnyAddress, token: str, number: int, purpose: Purpose = Purpose.JOIN) -> None:
        """Raises OSError."""
        self.address = address
        self.deadline = time.monotonic() + _ATTEMPT_TIMEOUT_S
        self.failure = ""
        self.connection = _start_connecting(address)
        self._handshake = ClientHandshake(self.connection, token, number, purpose)

    @property
    def tags(self) -> ConnectionTags | None:
        return self._handshake.tags

    def advance(self) -> bool:
        """Proceed as far as possible; return whether the server has proved itself. `failure`: why it never will."""
        try:
            return self._handshake.advance()
        except ProtocolError as error:
            self.failure = str(error)
        except OSError as error:
            self.failure = describe_error(error)
        return False

    def check_failure(self) -> str:
        """Return why the server will never prove itself; empty as long as it may."""
        if not self.failure and time.monotonic() > self.deadline:
            self.failure = f"does not answer within {_ATTEMPT_TIMEOUT_S:g} s"
        return self.failure


def connect(
    find: Callable[[], HeadAddress | None],
    number: int,
    timeout: float,
    why_none: str = "",
    *,
    purpose: Purpose = Purpose.JOIN,
    name: str = "",
    target: str = "head of the job",
    check: Callable[[], None] = lambda: None,
    on_failed_round: Callable[[str], None] = lambda why: None,
    longest_round: float = _ATTEMPT_TIMEOUT_S,
) -> HeadConnection:
    """Connect as the agent or rank of this number within `timeout` seconds.

    find:             returns where to connect, for each round of attempts; may raise UnavailableError that says why
                      there is no address yet
    name:             how people call the process that connects
    check:            called several times a second; an exception from it ends the search
    on_failed_round:  called after each round with a description of what each address did; empty if there was no address
    longest_round:    the seconds after which an address that does not answer is looked up again at the latest

    Host names are looked up again in each round. Raises UnavailableError that says what each address did, or, if there
    was nothing to try, why `find` had no address, or `why_none`.
    """
    deadline = time.monotonic() + timeout
    failures: dict[str, str] = {}
    for attempt in itertools.count(1):
        check()
        try:
            head = find()
        except UnavailableError as error:
            head, why_none = None, str(error)
        until = min(deadline, time.monotonic() + min(longest_round, attempt * _FIRST_ROUND_S))
        found = _try_all(head, number, purpose, until, failures, check) if head is not None else None
        if head is not None and found is not None:
            return HeadConnection(found.connection, found.tags, head.token)
        tried = "; ".join(f"{address} {why}" for address, why in failures.items())
        if time.monotonic() + _ROUND_PAUSE_S > deadline:
            who = f"{name or f'rank {number}'} on {os.uname().nodename}"
            raise UnavailableError(f"{who} found no {target} within {timeout:g} s: {tried or why_none}")
        on_failed_round(tried)
        time.sleep(_ROUND_PAUSE_S)
    raise AssertionError("not reached")


def _try_all(
    head: HeadAddress,
    number: int,
    purpose: Purpose,
    deadline: float,
    failures: dict[str, str],
    check: Callable[[], None],
) -> ConnectionAttempt | None:
    """Try each address once; start the next attempt while the previous one has not answered.

    An address whose turn has not come by the deadline is tried then, so that each is in the error.
    """
    waiting = list(head.addresses)
    attempts: list[ConnectionAttempt] = []
    next_start = 0.0
    try:
        while waiting or (attempts and time.monotonic() <= deadline):
            check()
            now = time.monotonic()
            if waiting and (not attempts or now >= min(next_start, deadline)):
                address = waiting.pop(0)
                try:
                    attempts.append(ConnectionAttempt(address, head.token, number, purpose))
                except OSError as error:
                    failures[str(address)] = describe_error(error)
                next_start = now + _STAGGER_S
            winner = _wait(attempts, min(_STAGGER_S, deadline - now), failures)
            if winner is not None:
                attempts.remove(winner)
                return winner
        return None
    finally:
        for attempt in attempts:
            failures[str(attempt.address)] = attempt.failure or "has not answered yet"
            attempt.connection.close()


def _wait(attempts: list[ConnectionAttempt], seconds: float, failures: dict[str, str]) -> ConnectionAttempt | None:
    """Wait until one of the attempts succeeds, and return it; remove those that have failed."""
    with selectors.DefaultSelector() as selector:
        for attempt in attempts:
            selector.register(attempt.connection, selectors.EVENT_READ, attempt)
        ready: list[ConnectionAttempt] = [key.data for key, _ in selector.select(max(0.0, seconds))]
    for attempt in ready:
        if attempt.advance():
            return attempt
    for attempt in list(attempts):
        if attempt.check_failure():
            failures[str(attempt.address)] = attempt.failure
            attempt.connection.close()
            attempts.remove(attempt)
    return None


def _start_connecting(address: AnyAddress) -> socket.socket:
    """Return a non-blocking socket that connects to `address`. Raises OSError."""
    if isinstance(address, UnixAddress):
        connection = socket.socket(socket.AF_UNIX)
        try:
            with address.short_path() as path:
                connection.connect(path)
        except BaseException:
            connection.close()
            raise
        connection.setblocking(False)
        return connection
    family, kind, protocol, _, where = addresses.resolve(address)[0]
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.connect(where)
    except BlockingIOError:
        pass
    except BaseException:
        connection.close()
        raise
    return connection


def describe_error(error: OSError) -> str:
    if error.errno == errno.ECONNREFUSED:
        return "refuses connections"
    if isinstance(error, socket.gaierror):
        return f"does not resolve ({error.strerror or error})"
    return f"cannot be reached ({error.strerror or error})"
