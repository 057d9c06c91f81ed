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

from jaxrun.channel import secret
from jaxrun.channel.addresses import Address
from jaxrun.channel.door import VERSION
from jaxrun.channel.line import kinds
from jaxrun.channel.messages import Answer, Challenge, HandshakeToAgent, Refused, Welcome
from jaxrun.contract import Codec, encode
from jaxrun.errors import ProtocolError, UnavailableError

_STAGGER = 0.2  # seconds that an address gets before the next one is tried beside it
_ATTEMPT = 8.0  # seconds until an address that does not answer is given up
_ROUND = 1.5  # seconds for the first round of all addresses; each later one gets as many more, so that none waits long
_PAUSE = 0.25  # seconds between two rounds: the head may not listen yet
_WORDS = kinds(HandshakeToAgent)
_FRAME = 4096


@dataclass(frozen=True, slots=True)
class Offer:
    """Where a head may be, and what one who is of its job knows."""

    job_id: str
    token: str
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The head that has proved to be it."""

    job_id: str
    connection: socket.socket
    welcome: Welcome


class _Attempt:
    """One address that is being tried."""

    def __init__(self, address: Address, token: str, rank: int) -> None:
        self.address = address
        self.deadline = time.monotonic() + _ATTEMPT
        self.failure = ""
        self.welcome: Welcome | None = None
        self._token = token
        self._rank = rank
        self._codec: Codec[Challenge | Welcome | Refused] = Codec(_WORDS, _FRAME)
        self._head_nonce = ""
        self._nonce = secret.new_nonce()
        self.socket = _begin(address)

    def proceed(self) -> bool:
        """Go on as far as possible; whether the head has proved itself. `failure` says why it is of no use."""
        try:
            data = self.socket.recv(_FRAME)
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
            self.failure = _reason(error)
        return False

    def _on_word(self, word: Challenge | Welcome | Refused) -> bool:
        match word:
            case Challenge():
                if word.version != VERSION:
                    self.failure = f"speaks version {word.version} of the channel, this agent {VERSION}"
                    return False
                self._head_nonce = word.nonce
                own = secret.proof(self._token, "agent", self._rank, word.nonce, self._nonce)
                self.socket.send(encode(Answer(self._rank, self._nonce, own)))
            case Welcome():
                wanted = secret.proof(self._token, "head", self._rank, self._head_nonce, self._nonce)
                if self._head_nonce and secret.same(wanted, word.proof):
                    self.welcome = word
                    return True
                self.failure = "answers, but does not know this job's token"
            case Refused():
                self.failure = f"refuses: {word.text}"
        return False


def knock(find: Callable[[], Offer | None], rank: int, timeout: float, why_none: str = "") -> Found:
    """Reach the head. UnavailableError says what each address did, or `why_none` where there was nothing to try.

    `find` is asked again for each round, for as long as `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    failures: dict[str, str] = {}
    for number in itertools.count(1):
        offer = find()
        until = min(deadline, time.monotonic() + min(_ATTEMPT, number * _ROUND))
        won = _round(offer, rank, until, failures) if offer is not None else None
        if offer is not None and won is not None and won.welcome is not None:
            return Found(offer.job_id, won.socket, won.welcome)
        if time.monotonic() + _PAUSE > deadline:
            tried = "; ".join(f"{address} {why}" for address, why in failures.items()) or why_none
            raise UnavailableError(
                f"rank {rank} on {os.uname().nodename} found no head of its job within {timeout:g} s: {tried}"
            )
        time.sleep(_PAUSE)
    raise AssertionError("not reached")


def _round(offer: Offer, rank: int, deadline: float, failures: dict[str, str]) -> _Attempt | None:
    """Try each address once, the next one while the one before it has not answered."""
    waiting = list(offer.addresses)
    attempts: list[_Attempt] = []
    next_start = 0.0
    try:
        while (waiting or attempts) and (now := time.monotonic()) <= deadline:
            if waiting and (not attempts or now >= next_start):
                _start(waiting.pop(0), offer.token, rank, attempts, failures)
                next_start = now + _STAGGER
            won = _wait(attempts, min(_STAGGER, deadline - now), failures)
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
        failures[str(address)] = _reason(error)


def _wait(attempts: list[_Attempt], seconds: float, failures: dict[str, str]) -> _Attempt | None:
    with selectors.DefaultSelector() as selector:
        for attempt in attempts:
            selector.register(attempt.socket, selectors.EVENT_READ, attempt)
        ready = [key.data for key, _ in selector.select(max(0.0, seconds))]
    for attempt in ready:
        if attempt.proceed():
            return attempt  # type: ignore[no-any-return]
    for attempt in list(attempts):
        if not attempt.failure and time.monotonic() > attempt.deadline:
            attempt.failure = f"does not answer within {_ATTEMPT:g} s"
        if attempt.failure:
            failures[str(attempt.address)] = attempt.failure
            attempt.socket.close()
            attempts.remove(attempt)
    return None


def _begin(address: Address) -> socket.socket:
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


def _reason(error: OSError) -> str:
    if error.errno == errno.ECONNREFUSED:
        return "refuses connections"
    return f"cannot be reached ({error.strerror or error})"
