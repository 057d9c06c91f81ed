"""A small client of the debug adapter protocol, as an editor is one: requests with their responses, and events."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

TIMEOUT_S = 60.0


class DapClient:
    """A connection to a debug adapter. Raises TimeoutError if an answer or event does not come."""

    def __init__(self, port: int) -> None:
        self._link = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._file = self._link.makefile("rb")
        self._sent = 0
        self._kept: list[dict[str, Any]] = []

    def send(self, command: str, **arguments: Any) -> int:
        self._sent += 1
        message = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        self._link.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        return self._sent

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        return self.response(self.send(command, **arguments))

    def response(self, number: int) -> dict[str, Any]:
        """Return the body of the response to this request, which must be a success."""
        found = self._wait(lambda m: m["type"] == "response" and m["request_seq"] == number)
        assert found["success"], found
        return found.get("body") or {}

    def event(self, name: str) -> dict[str, Any]:
        return self._wait(lambda message: message["type"] == "event" and message["event"] == name).get("body") or {}

    def attach(self, program: str = "", lines: tuple[int, ...] = (), exceptions: tuple[str, ...] = ()) -> None:
        """Do what an editor does up to configurationDone."""
        attached = self.begin_attach()
        self.event("initialized")
        self.break_at(program, *lines)
        self.request("setExceptionBreakpoints", filters=list(exceptions))
        self.request("configurationDone")
        self.response(attached)

    def break_at(self, program: str, *lines: int) -> None:
        breakpoints = [{"line": line} for line in lines]
        self.request("setBreakpoints", source={"path": program}, breakpoints=breakpoints)

    def stopped(self) -> tuple[int, list[dict[str, Any]]]:
        """Wait until the program stops; returns the thread, and its frames, the innermost first."""
        thread = self.event("stopped")["threadId"]
        return thread, self.request("stackTrace", threadId=thread)["stackFrames"]

    def evaluate(self, expression: str, frame: dict[str, Any]) -> str:
        return str(self.request("evaluate", expression=expression, frameId=frame["id"], context="watch")["result"])

    def begin_attach(self) -> int:
        """Send the requests up to `attach`; returns the number of the latter, which is answered later."""
        self.request("initialize", adapterID="debugpy", clientID="test", pathFormat="path")
        return self.send("attach", connect={"host": "127.0.0.1", "port": 0}, justMyCode=True)

    def close(self, *, reset: bool = False) -> None:
        """Close the connection, as the kernel does for a killed process; it resets it where bytes were not read."""
        if reset:
            self._link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._file.close()
        self._link.close()

    def _wait(self, is_wanted: Any) -> dict[str, Any]:
        for message in self._kept:
            if is_wanted(message):
                self._kept.remove(message)
                return message
        while True:
            message = self._read()
            if is_wanted(message):
                return message
            self._kept.append(message)

    def _read(self) -> dict[str, Any]:
        length = 0
        while line := self._file.readline().strip():
            length = int(line.partition(b":")[2])
        assert length, "the adapter has closed the connection"
        return json.loads(self._file.read(length))  # type: ignore[no-any-return]
