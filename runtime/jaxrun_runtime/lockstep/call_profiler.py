"""Takes a JAX profile of the same cross-process calls on all ranks; the head chooses the calls (`jaxrun profile`).

The agent sets ORDERS_WORD of the flight recorder when it sends an order. While it is set, each recorded call comes
here. JAX names a profile by its host and the second in which it ends. So ranks of one host would write the same file,
and slow ranks would write into another directory. Therefore each rank writes into its own directory, and the file is
then moved to its place.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from jaxrun.files.own_files import remove_directory
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.flight_file import ORDERS_WORD
from jaxrun.protocol.worker_messages import ProfileCalls, ProfileEnded
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected
from jaxrun_runtime.lockstep.flight_recorder import RankGroup

_SUFFIX = ".xplane.pb"


class CallProfiler:
    """Executes one order at a time. Uses public names of JAX's profiler only. `words`: the flight recorder's."""

    def __init__(self, env: WorkerEnv, channel: AgentChannel, words: memoryview) -> None:
        self._env = env
        self._channel = channel
        self._words = words
        self._order: ProfileCalls | None = None
        self._draft: Path | None = None  # where the running profile will be written
        self._started_at = 0.0  # seconds since the epoch
        self._made = 0  # calls of the order's group
        self._busy = threading.Lock()

    def on_call(self, group: RankGroup, results: Any) -> None:
        """Advance the order, if there is one, after a call of this group."""
        if not self._busy.acquire(blocking=False):
            return  # another thread makes a call at the same time
        try:
            self._order = self._order or self._channel.poll(ProfileCalls)
            if self._order is not None and group.ranks == self._order.group:
                self._made = group.made
                self._advance(self._order, results)
        except AgentDisconnected:
            self._words[ORDERS_WORD] = 0
        finally:
            self._busy.release()

    def end(self) -> None:
        """Write the profile so far, because the program has ended."""
        if self._draft is not None and self._order is not None:
            self._finish(self._order, "")
        elif self._words[ORDERS_WORD] and (order := self._order or self._channel.poll(ProfileCalls)) is not None:
            self._report(order, f"its program ended before call #{order.first}")

    def _advance(self, order: ProfileCalls, results: Any) -> None:
        if self._draft is None and self._made >= order.first:
            self._report(order, f"it had made call #{self._made} already", is_late=True)
        elif self._draft is None and self._made == order.first - 1:
            self._wait_for(results)
            self._start(order)
        elif self._made >= order.last:
            self._finish(order, self._wait_for(results))

    def _start(self, order: ProfileCalls) -> None:
        import jax

        draft = None
        try:
            os.makedirs(order.directory, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=f".rank-{self._env.rank:04d}-", dir=order.directory))
            jax.profiler.start_trace(draft)
            self._draft, self._started_at = draft, time.time()
        except Exception as error:  # such as when the program takes a profile itself
            if draft is not None:
                _remove(draft)
            self._report(order, _describe(error))

    def _finish(self, order: ProfileCalls, error: str) -> None:
        import jax

        draft, self._draft = self._draft, None
        assert draft is not None
        file, size = "", 0
        try:
            jax.profiler.stop_trace()
            file = self._move(draft, order)
            size = os.path.getsize(file)
        except Exception as failure:
            error = error or _describe(failure)
        finally:
            _remove(draft)
        self._report(order, error, file, size)

    def _move(self, draft: Path, order: ProfileCalls) -> str:
        """Move the profile to its place among the other ranks' profiles. Raises OSError if JAX has written none."""
        written = next(draft.glob(f"plugins/profile/*/*{_SUFFIX}"), None)
        if written is None:
            raise FileNotFoundError(f"JAX's profiler has written no {_SUFFIX} file")
        session = Path(order.directory, "plugins", "profile", order.session)
        session.mkdir(parents=True, exist_ok=True)
        file = session / f"rank-{self._env.rank:04d}-{self._env.host.replace('/', '-')}{_SUFFIX}"
        written.replace(file)
        return str(file)

    def _wait_for(self, results: Any) -> str:
        """Wait until the devices have computed the results. Returns the error, if there is one, as text."""
        import jax

        try:
            jax.block_until_ready(results)
        except Exception as error:  # the program will get the same error
            return _describe(error)
        return ""

    def _report(self, order: ProfileCalls, error: str, file: str = "", size: int = 0, *, is_late: bool = False) -> None:
        self._order = None
        self._words[ORDERS_WORD] = 0
        ended = ProfileEnded(
            rank=self._env.rank,
            time=time.time(),
            started_at=self._started_at,
            session=order.session,
            file=file,
            bytes=size,
            last=self._made,
            error=error,
            is_late=is_late,
        )
        with contextlib.suppress(AgentDisconnected):
            self._channel.send(ended)
        self._started_at = 0.0


def _remove(draft: Path) -> None:
    with contextlib.suppress(OSError):
        remove_directory(draft)


def _describe(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    if "already been started" in text or "Only one profile" in text:
        return "its program is taking a profile of its own"
    return text
