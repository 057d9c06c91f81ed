"""The memory of a process; what it shares with other processes counts only once, divided among them (PSS).

Ranks that are forked share most of what they have imported: their resident sizes add up to more than the host has in
use. For the exact figure the kernel walks all pages of a process, which takes milliseconds. So it is asked less and
less often how much of the resident size belongs to others, and each reading subtracts that from the resident size.
"""

from __future__ import annotations

from jaxrun.files import procfs

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # between two looks at all pages; each is twice as long
_MOST_BYTES = 4 * 2**30  # of a larger process the shared part does not matter, and looking takes long


class ProcessMemory:
    """The memory of one process."""

    def __init__(self) -> None:
        self._of_others = 0  # bytes of the resident size
        self._pause_s = _FIRST_PAUSE_S
        self._look_at = float("-inf")

    def read(self, pid: int, now: float) -> int:
        """Return its bytes; 0 when it has gone. `now` is in seconds."""
        resident = procfs.resident_bytes(pid)
        if resident and now >= self._look_at and resident < _MOST_BYTES:
            self._look_at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._of_others = procfs.shared_bytes(pid)
        return max(0, resident - self._of_others)
