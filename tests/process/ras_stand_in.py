"""Stands in for NCCL's own service (RAS): its protocol over a real socket, with answers that a test makes."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator


class RasStandIn:
    """Listens on this machine and answers each STATUS with `answer()`; `address` is as in NCCL_RAS_ADDR.

    The connection ends after the answer, as with NCCL. Further attributes make it odd, each read when it matters.
    """

    def __init__(self, answer: Callable[[], str], *, has_json: bool = True, host: str = "127.0.0.1") -> None:
        self.answer = answer
        self.has_json = has_json  # whether it knows SET FORMAT json, as NCCL does from 2.28.7 on
        self.is_silent = False  # accepts, and says nothing
        self.cut_after: int | None = None  # ends the connection after so many characters
        self.pause_s = 0.0  # between the pieces of an answer
        self.keeps_open = False  # does not end the connection
        self.said: list[str] = []  # what clients have said, line by line
        self.asked = 0  # STATUS, of any kind
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self._is_closing = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._is_closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(client,)))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), client.makefile("r", encoding="utf-8") as lines:
            client.settimeout(10)
            if self.is_silent:
                self._is_closing.wait(60)
                return
            for line in lines:
                self.said.append(line.strip())
                if self._handle(client, line.strip().lower()):
                    break
            if self.keeps_open:
                self._is_closing.wait(60)

    def _handle(self, client: socket.socket, command: str) -> bool:
        """Answer one command; returns whether it was the last."""
        if command in ("status", "verbose status"):
            self.asked += 1
            for piece in self._pieces():
                client.sendall(piece.encode())
                time.sleep(self.pause_s)
            return True
        is_known = command.startswith("timeout ") or (self.has_json and command == "set format json")
        reply = "OK" if is_known else f"ERROR: Unknown command {command}"
        client.sendall(("SERVER PROTOCOL 2\n" if command.startswith("client protocol") else f"{reply}\n").encode())
        return False

    def _pieces(self) -> Iterator[str]:
        text = self.answer()[: self.cut_after]
        middle = len(text) // 2
        yield text[:middle]
        yield text[middle:]
