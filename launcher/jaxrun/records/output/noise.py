"""Removes messages of native libraries that nobody needs from a rank's output; the log files keep them.

- Gloo prints in every run that it is connected. It writes each line in seven pieces, and other threads write between.
- When a peer has died, JAX's distributed service prints about twenty lines before it ends the process. They are the
  same for every death; the verdict says whose it was.
- JAX prints a line when it gets SIGTERM; jaxrun's own line says more.
- At the address of a coordinator by IPv6, gRPC prints as an error that its certificate does not name the address. The
  certificates of a job name ranks, which JAX compares.
- Rank 0 prints with --keep-survivors that a feature of JAX is experimental.
- Each child of a rank, for example of a pool, prints that jax.distributed.initialize() does nothing there; once is
  enough.

Pure: no I/O.
"""

from __future__ import annotations

from jaxrun.lazy_pattern import lazy_pattern
from jaxrun.protocol.names import INITIALIZE_IN_CHILD

# The pieces begin with these, and the second and the last end with a number of their own; the seventh is a newline.
_GLOO_FIRST, _GLOO_LAST = _GLOO_MARKS = (b"[Gloo] Rank ", b"Expected number of connected peer ranks is : ")
_GLOO_INNER = (b" is connected to ", b" peer ranks. ")
_GLOO_LINE = lazy_pattern(
    rb"(?m)^\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+\n"
)
_GLOO_NUMBERED = lazy_pattern(
    rb"(?:\[Gloo\] Rank | is connected to |Expected number of connected peer ranks is : )(\d*)"
)
_GLOO_START = lazy_pattern(rb"^\d+(?= is connected to | peer ranks\. )")  # the number of a piece of the previous line
_GLOO_END = lazy_pattern(rb"Expected number of connected peer ranks is : \d*\n$")
_SERVICE_MARKS = (b"_service_agent.cc:", b"preemption_sync_manager.cc:", b"client.h:")
_NOTICE_MARK = b"preemption_notifier.cc:"
_NOTICE = lazy_pattern(rb"W\d{4} [\d:.]+ +\d+ preemption_notifier\.cc:\d+\] SIGTERM caught at ")
_RECOVERABLE_MARK = b"] Using experimental recoverable task feature. "
_SERVER_MARK = b"ssl_transport_security.cc:"
_SERVER = lazy_pattern(
    rb"E\d{4} [\d:.]+ +\d+ ssl_transport_security\.cc:\d+\] No match found for server name: [0-9a-f:]+$"
)
_CHILD_MARK = INITIALIZE_IN_CHILD.encode()
_SERVICE_FIRST = lazy_pattern(
    rb"[WEF]\d{4} [\d:.]+ +\d+ (?:preemption_sync_manager|coordination_service_agent|client)\.(?:cc|h):\d+\] "
    rb"(?:Failed to retrieve preemption notice|Failed to cancel preemption barrier|"
    rb"Polled an error from coordination service|Terminating process because the JAX distributed service)"
)
_SERVICE_MORE = lazy_pattern(
    rb"Additional GRPC error information|:[A-Z_]+:|=== Source Location Trace: ===|external/\S+:\d+ *$|"
    rb"\. This is only expected if|\*\*\* Check failure stack trace|    @ +0x|$"
)


_MARKS = (*_GLOO_MARKS, *_SERVICE_MARKS, _NOTICE_MARK, _SERVER_MARK, _RECOVERABLE_MARK, _CHILD_MARK)


def tells_of_sigterm(stderr: str) -> bool:
    """Whether JAX has logged in these lines that the process got SIGTERM."""
    return _NOTICE.search(stderr.encode(errors="replace")) is not None


class NoiseFilter:
    """Filters one stream."""

    __slots__ = ("_a_child_has_told", "_in_service_message", "_lasts_due", "_newlines_due", "_numbers_due")

    def __init__(self) -> None:
        self._a_child_has_told = False
        self._in_service_message = False
        # Pieces of torn Gloo lines that are still to come.
        self._lasts_due = 0
        self._numbers_due = 0
        self._newlines_due = 0

    def remove(self, lines: bytes, *, continues: bool = False) -> bytes:
        """Return these whole lines without the noise; `continues`: the first one continues a shown line."""
        first, rest = (lines[: lines.find(b"\n") + 1], lines[lines.find(b"\n") + 1 :]) if continues else (b"", lines)
        if b"[Gloo]" in rest:
            rest = _GLOO_LINE.sub(b"", rest)
        first = self._without_gloo(first, keep=True) if self._has_gloo(first) else first
        is_clean = not (self._in_service_message or self._lasts_due or self._numbers_due or self._newlines_due)
        if is_clean and not _has_any(_MARKS, rest):
            return first + rest
        return first + b"".join(map(self._filter_line, rest.splitlines(keepends=True)))

    def _filter_line(self, line: bytes) -> bytes:
        if _SERVICE_FIRST.match(line) or (self._in_service_message and _SERVICE_MORE.match(line)):
            self._in_service_message = True
            return b""
        self._in_service_message = False
        if _NOTICE.match(line) or _SERVER.match(line) or _RECOVERABLE_MARK in line:
            return b""
        if line.startswith(_CHILD_MARK):
            is_first, self._a_child_has_told = not self._a_child_has_told, True
            return line if is_first else b""
        if self._has_gloo(line):
            return self._without_gloo(line)
        if self._newlines_due and line == b"\n":
            self._newlines_due -= 1
            return b""
        if self._numbers_due and line.strip().isdigit():
            self._numbers_due -= 1
            return b""
        return line

    def _has_gloo(self, line: bytes) -> bool:
        return _has_any(_GLOO_MARKS, line) or (self._lasts_due > 0 and _has_any(_GLOO_INNER, line))

    def _without_gloo(self, line: bytes, *, keep: bool = False) -> bytes:
        """Remove Gloo's pieces from a line; `keep` the rest even if it is only the newline."""
        found = _GLOO_NUMBERED.findall(line)
        digits = sum(map(len, [*found, *_GLOO_START.findall(line)]))  # may come from two adjacent numbers
        left = _GLOO_NUMBERED.sub(b"", _GLOO_START.sub(b"", line)).replace(_GLOO_INNER[1], b"")
        is_kept = keep or left.strip(b" \n0123456789") != b""
        self._lasts_due = max(0, self._lasts_due + line.count(_GLOO_FIRST) - line.count(_GLOO_LAST))
        self._numbers_due = max(0, self._numbers_due + len(found) - digits)
        ends_with_gloo = not is_kept or _GLOO_END.search(line) is not None
        self._newlines_due = max(0, self._newlines_due + line.count(_GLOO_LAST) - ends_with_gloo)
        return left if is_kept else b""


def may_be_noise(partial: bytes) -> bool:
    """Whether a line that begins like this may be removed once it is complete."""
    return partial.startswith(b"[Gloo]") or _has_any(_GLOO_MARKS, partial)


def _has_any(marks: tuple[bytes, ...], text: bytes) -> bool:
    return any(mark in text for mark in marks)
