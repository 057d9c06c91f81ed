"""Where the ranks of a gang come to: a Unix socket for those of this machine, TCP and a token for others."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import socket
import tempfile
import threading
from pathlib import Path

from jaxrun.channel.addresses import Address, format_addresses, list_interfaces, select_interfaces
from jaxrun.errors import ProtocolError
from jaxrun.protocol import handshake
from jaxrun.protocol.names import GANG_ADDRESS, GANG_DIRECTORY_PREFIX, GANG_TOKEN

_BACKLOG = 4096


class RankListener:
    """A directory of our own and a socket that listens; `environ` tells the ranks of it.

    `arrived` is a descriptor that is readable when somebody has come.
    """

    def __init__(self, *, far: bool, interface: str = "") -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"{GANG_DIRECTORY_PREFIX}{os.getpid()}-"))
        self._guests: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self.environ: dict[str, str] = {}
        self._bell, self._ring = os.pipe()
        if far:
            self._listener = self._listen_to_all(interface)
            threading.Thread(target=self._accept, name="jaxrun-meeting", daemon=True).start()
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            path = self.directory / "ranks"
            with handshake.short(str(path)) as name:
                self._listener.bind(name)
            self._listener.listen(_BACKLOG)
            self._listener.setblocking(False)
            self.environ[GANG_ADDRESS] = f"unix:{path}"

    @property
    def arrival_fd(self) -> int:
        return self._bell if GANG_TOKEN in self.environ else self._listener.fileno()

    def accept(self) -> socket.socket | None:
        """Somebody who belongs here; None if there is nobody."""
        if GANG_TOKEN in self.environ:
            with contextlib.suppress(queue.Empty):
                guest = self._guests.get_nowait()
                os.read(self._bell, 1)
                return guest
            return None
        try:
            return self._listener.accept()[0]
        except BlockingIOError:
            return None

    def close(self) -> None:
        """Nobody can come any more; the directory is gone. May be called again."""
        if self._bell < 0:
            return
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        os.close(self._bell)
        os.close(self._ring)
        self._bell = self._ring = -1
        shutil.rmtree(self.directory, ignore_errors=True)

    def _listen_to_all(self, interface: str) -> socket.socket:
        listener = socket.create_server(("", 0), backlog=_BACKLOG)
        port = listener.getsockname()[1]
        offered = [
            Address(found.ip, port) for found in select_interfaces(list_interfaces(), interface) if ":" not in found.ip
        ]
        self.environ |= {GANG_ADDRESS: f"tcp:{format_addresses(offered)}", GANG_TOKEN: secrets.token_hex(32)}
        return listener

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                guest, _ = self._listener.accept()
                threading.Thread(target=self._admit, args=(guest,), name="jaxrun-guest", daemon=True).start()

    def _admit(self, guest: socket.socket) -> None:
        try:
            handshake.admit(guest, self.environ[GANG_TOKEN])
        except (OSError, ProtocolError):
            guest.close()
            return
        guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._guests.put(guest)
        with contextlib.suppress(OSError):
            os.write(self._ring, b".")
