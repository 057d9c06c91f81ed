"""Queries NCCL's own service (RAS) about a job's communicators, without making the agent wait.

Since NCCL 2.24, each process of a job listens at NCCL_RAS_ADDR (localhost:28028 by default), and each knows about all.
Processes of one user share that port by SO_REUSEPORT: with two jobs, either might answer. So an agent gives its ranks
a port of their own, unless the user has chosen one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxrun.analysis.diagnosis.nccl_ras import (
    NCCL_TIMEOUT_S,
    Version,
    find_lasting,
    has_service,
    is_safe_to_ask,
    parse_answer,
    request_text,
)
from jaxrun.files import procfs
from jaxrun.node.channel.send_buffer import SendBuffer
from jaxrun.protocol.nccl_report import NcclReport

RAS_ADDR, _RAS_ENABLE = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
_DEFAULT_ADDR = "localhost:28028"
_LOCALHOST = ("127.0.0.1", "::1")
_WAIT_S = 2  # how long the service waits for processes on other hosts
_PAUSE_S = 0.5  # between the two questions
_POLL_S = 0.02
_MAX_ANSWER_BYTES = 64 * 2**20
_RECEIVE_BYTES = 2**18
_LIBRARY = re.compile(r"\s(/\S*/libnccl\.so[^\s/]*)")
_FILE_VERSION = re.compile(r"libnccl\.so\.(\d+)\.(\d+)\.(\d+)$")
_WHEEL_VERSION = re.compile(r"nvidia_nccl_\w+-(\d+)\.(\d+)\.(\d+).*\.dist-info$")
_CONNECTING = (errno.EINPROGRESS, errno.EAGAIN, errno.EALREADY)


def own_address(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that gives the ranks of this agent a port of their own; empty if the user has chosen one."""
    chosen = {RAS_ADDR, _RAS_ENABLE} & {*environ, *_configured(environ)}
    return {} if chosen else {RAS_ADDR: _free_address()}


@functools.cache
def _free_address() -> str:
    """Return an address, equal for all attempts, so they share a fork server. NCCL does without if it is taken."""
    with socket.create_server((_LOCALHOST[0], 0)) as free:
        return f"{_LOCALHOST[0]}:{free.getsockname()[1]}"


def _configured(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in NCCL's files, which apply if its variables are not set; the user's file comes first."""
    own = environ.get("NCCL_CONF_FILE") or os.path.join(environ.get("HOME", ""), ".nccl.conf")
    values: dict[str, str] = {}
    for name in (own, "/etc/nccl.conf"):
        with contextlib.suppress(OSError), open(name, encoding="utf-8", errors="replace") as file:
            lines = (line.split("=", 1) for line in file if "=" in line and not line.startswith("#"))
            values = {**{name.strip(): value.strip() for name, value in lines}, **values}
    return values


def service_addresses(environ: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """Return where the service of ranks with this environment may listen; empty if it is off, or at a host's name."""
    known = {**_configured(environ), **environ}
    host, _, port = known.get(RAS_ADDR, _DEFAULT_ADDR).rpartition(":")
    if known.get(_RAS_ENABLE) == "0" or not port.isdecimal() or not 0 < int(port) < 2**16:
        return ()
    hosts = _LOCALHOST if host in ("localhost", "") else (host.strip("[]"),)
    with contextlib.suppress(OSError):
        for one in hosts:
            socket.getaddrinfo(one, None, flags=socket.AI_NUMERICHOST)  # a lookup of a name may take long
        return tuple((one, int(port)) for one in hosts)
    return ()


def loaded_version(pid: int) -> Version | None:
    """Return the version of NCCL that this process has loaded, by the name of its file or of its wheel; else None.

    Of several wheels the lowest counts.
    """
    text = procfs.read_of(pid, "maps").decode(errors="replace")
    versions: list[Version] = []
    for name in dict.fromkeys(_LIBRARY.findall(text)):
        versions += _versions_of(name, Path(f"/proc/{pid}/root"))
    return min(versions, default=None)


def _versions_of(library: str, root: Path) -> Iterator[Version]:
    found = _FILE_VERSION.search(library)
    candidates = [found] if found else []
    if not found and "/nvidia/" in library:
        packages = root / library.partition("/nvidia/")[0].lstrip("/")
        with contextlib.suppress(OSError):
            candidates = [match for name in os.listdir(packages) if (match := _WHEEL_VERSION.match(name))]
    for match in candidates:
        major, minor, patch = map(int, match.groups())
        yield major, minor, patch


class NcclInquiry:
    """Asks the service of one rank twice, and keeps the differences that last. Times may be of any clock."""

    def __init__(self, pid: int, environ: Mapping[str, str], now: float, *, whatever_it_costs: bool = False) -> None:
        """`whatever_it_costs`: also a version that may crash because it is asked; an unknown one is never asked."""
        self._expires = now + NCCL_TIMEOUT_S
        self._answers: list[NcclReport | None] = []
        self._question: _Question | None = None
        self._next = now
        version = loaded_version(pid)
        may_ask = version is not None and (is_safe_to_ask(version) or (whatever_it_costs and has_service(version)))
        self._addresses = list(service_addresses(environ)) if may_ask else []
        self._request = request_text(version, _WAIT_S) if version is not None else b""

    @property
    def due(self) -> float:
        """The time of the next call of `has_ended`."""
        return min(self._next, self._expires)

    def has_ended(self, now: float) -> bool:
        """Proceed as far as possible without waiting, and return whether nothing more will come."""
        if now < self._next and now < self._expires:
            return False
        self._next = now + _POLL_S
        if now >= self._expires or not self._addresses:
            self.close()
            return True
        if self._question is None:
            self._question = _Question(self._addresses[0], self._request)
        text = self._question.poll()
        if text is None:
            return False
        self.close()
        answer = parse_answer(text)
        if answer is None and not self._answers:  # another process is listening there, or none
            del self._addresses[0]
            return self.has_ended(self._next)
        self._answers.append(answer)
        self._next = now + _PAUSE_S
        return len(self._answers) > 1

    def report(self) -> NcclReport | None:
        """Return what both answers say; None if there were not two."""
        return find_lasting(*self._answers) if len(self._answers) > 1 else None

    def close(self) -> None:
        if self._question is not None:
            self._question.close()
            self._question = None


class _Question:
    """One connection to the service: the question is sent at once, and the answer ends with the connection."""

    def __init__(self, address: tuple[str, int], request: bytes) -> None:
        self._received = bytearray()
        self._socket = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        self._socket.setblocking(False)
        self._unsent = SendBuffer(self._socket.send)
        self._unsent.add(request)
        self._failed = self._socket.connect_ex(address) not in (0, *_CONNECTING)

    def poll(self) -> str | None:
        """Return the answer once it is complete, empty if there is none; until then None."""
        try:
            if self._failed or self._exchange():
                return self._received.decode(errors="replace")
        except OSError:
            return ""
        return None

    def _exchange(self) -> bool:
        """Send and receive as much as possible now; returns whether the other side has closed the connection."""
        if not self._unsent.flush():
            return False
        with contextlib.suppress(BlockingIOError):
            while data := self._socket.recv(_RECEIVE_BYTES):
                self._received += data
                if len(self._received) > _MAX_ANSWER_BYTES:
                    break
            return True
        return False

    def close(self) -> None:
        self._socket.close()
