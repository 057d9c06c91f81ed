"""How an agent gets to its head: tries all addresses that were offered, and takes the first that proves to be it."""

from __future__ import annotations

import errno
import itertools
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxrun.channel.addresses import Address
from jaxrun.channel.listener import CHANNEL_VERSION
from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.protocol import auth
from jaxrun.protocol.agent_messages import Challenge, ChallengeResponse, HeadHandshake, Rejected, Welcome
from jaxrun.protocol.codec import MessageDecoder, encode, message_types

_STAGGER_S = 0.2  # seconds that an address gets before the next one is tried beside it
_ATTEMPT_TIMEOUT_S = 8.0  # seconds until an address that does not answer is given up
_FIRST_ROUND_S = (
    1.5  # seconds for the first round of all addresses; each later one gets as many more, so that none waits long
)
_ROUND_PAUSE_S = 0.25  # seconds between two rounds: the head may not listen yet
_HANDSHAKE_MESSAGES = message_types(HeadHandshake)
_MAX_FRAME_BYTES = 4096


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """Where a head may be, and what one who is of its job knows."""

    job_id: str
    token: str
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class HeadConnection:
    """The head that has proved to be it."""

    job_id: str
    connection: socket.socket
    welcome: Welcome


class _Attempt:
    """One address that is being tried."""

    def __init__(self, address: Address, token: str, rank: int) -> None:
        self.address = address
        self.deadline = time.monotonic() + _ATTEMPT_TIMEOUT_S
        self.failure = ""
        self.welcome: Welcome | None = None
        self._token = token
        self._rank = rank
        self._codec: MessageDecoder[Challenge | Welcome | Rejected] = MessageDecoder(
            _HANDSHAKE_MESSAGES, _MAX_FRAME_BYTES
        )
        self._head_nonce = ""
        self._nonce = auth.new_nonce()
        self.socket = _start_connecting(address)

    def advance(self) -> bool:
        """Go on as far as possible; whether the head has proved itself. `failure` says why it is of no use."""
        try:
            data = self.socket.recv(_MAX_FRAME_BYTES)
            for word in self._codec.feed(data):
                if self._on_word(word):
                    return True
            if not data and not self.failure:
                self.failure = "hangs up: the wrong job, or no head of jaxrun"
        except BlockingIOError:
            pass
        except ProtocolError:
            self.failure = "answers, but is no head of jaxrun"
        except OSError as error:
            self.failure = _describe_error(error)
        return False

    def _on_word(self, word: Challenge | Welcome | Rejected) -> bool:
        match word:
            case Challenge():
                if word.version != CHANNEL_VERSION:
                    self.failure = f"speaks version {word.version} of the channel, this agent {CHANNEL_VERSION}"
                    return False
                self._head_nonce = word.nonce
                own = auth.make_proof(self._token, "agent", self._rank, word.nonce, self._nonce)
                self.socket.send(encode(ChallengeResponse(self._rank, self._nonce, own)))
            case Welcome():
                wanted = auth.make_proof(self._token, "head", self._rank, self._head_nonce, self._nonce)
                if self._head_nonce and auth.proofs_equal(wanted, word.proof):
                    self.welcome = word
                    return True
                self.failure = "answers, but does not know this job's token"
            case Rejected():
                self.failure = f"refuses: {word.reason}"
        return False


def connect(find: Callable[[], HeadAddress | None], rank: int, timeout: float, why_none: str = "") -> HeadConnection:
    """Reach the head. UnavailableError says what each address did, or `why_none` where there was nothing to try.

    `find` is asked again for each round, for as long as `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    failures: dict[str, str] = {}
    for number in itertools.count(1):
        offer = find()
        until = min(deadline, time.monotonic() + min(_ATTEMPT_TIMEOUT_S, number * _FIRST_ROUND_S))
        won = _round(offer, rank, until, failures) if offer is not None else None
        if offer is not None and won is not None and won.welcome is not None:
            return HeadConnection(offer.job_id, won.socket, won.welcome)
        if time.monotonic() + _ROUND_PAUSE_S > deadline:
            tried = "; ".join(f"{address} {why}" for address, why in failures.items()) or why_none
            raise UnavailableError(
                f"rank {rank} on {os.uname().nodename} found no head of its job within {timeout:g} s: {tried}"
            )
        time.sleep(_ROUND_PAUSE_S)
    raise AssertionError("not reached")


def _round(offer: HeadAddress, rank: int, deadline: float, failures: dict[str, str]) -> _Attempt | None:
    """Try each address once, the next one while the one before it has not answered."""
    waiting = list(offer.addresses)
    attempts: list[_Attempt] = []
    next_start = 0.0
    try:
        while (waiting or attempts) and (now := time.monotonic()) <= deadline:
            if waiting and (not attempts or now >= next_start):
                _start(waiting.pop(0), offer.token, rank, attempts, failures)
                next_start = now + _STAGGER_S
            won = _wait(attempts, min(_STAGGER_S, deadline - now), failures)
            if won is not None:
                attempts.remove(won)
                return won
        return None
    finally:
        for attempt in attempts:
            failures[str(attempt.address)] = attempt.failure or "has not answered yet"
            attempt.socket.close()


def _start(address: Address, token: str, rank: int, attempts: list[_Attempt], failures: dict[str, str]) -> None:
    try:
        attempts.append(_Attempt(address, token, rank))
    except OSError as error:
        failures[str(address)] = _describe_error(error)


def _wait(attempts: list[_Attempt], seconds: float, failures: dict[str, str]) -> _Attempt | None:
    with selectors.DefaultSelector() as selector:
        for attempt in attempts:
            selector.register(attempt.socket, selectors.EVENT_READ, attempt)
        ready = [key.data for key, _ in selector.select(max(0.0, seconds))]
    for attempt in ready:
        if attempt.advance():
            return attempt  # type: ignore[no-any-return]
    for attempt in list(attempts):
        if not attempt.failure and time.monotonic() > attempt.deadline:
            attempt.failure = f"does not answer within {_ATTEMPT_TIMEOUT_S:g} s"
        if attempt.failure:
            failures[str(attempt.address)] = attempt.failure
            attempt.socket.close()
            attempts.remove(attempt)
    return None


def _start_connecting(address: Address) -> socket.socket:
    """A socket that is connecting."""
    family, kind, protocol, _, where = socket.getaddrinfo(address.ip, address.port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    try:
        connection.connect(where)
    except BlockingIOError:
        pass
    except OSError:
        connection.close()
        raise
    return connection


def _describe_error(error: OSError) -> str:
    if error.errno == errno.ECONNREFUSED:
        return "refuses connections"
    return f"cannot be reached ({error.strerror or error})"
