"""One gang with a pytest session in each of its ranks."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path

from jaxrun.api import Gang
from jaxrun.diagnosis.stacks import STACKS_FILE
from jaxrun.errors import JaxrunError
from jaxrun.gang.call import Disconnected, LauncherOutput, Printed, RankMessage, Returned
from jaxrun.gang.gang import remote_function
from jaxrun.lockstep import report
from jaxrun.protocol.pytest_messages import SessionReady, SessionSettings
from jaxrun.text import format_ranks, format_seconds
from jaxrun.verdict.snapshot import Snapshot

_SESSION = ("jaxrun_runtime.pytest.session", "session")
_SHUTDOWN_TIMEOUT_S = (
    10.0  # seconds for the sessions to take down what outlived the tests, and to save what was measured
)


class SessionError(JaxrunError):
    """The ranks' sessions could not be started."""


class GangSession:
    """Started at once; `close` lets it end in peace, `abandon` does not wait. SessionError, GangError."""

    def __init__(self, gang: Gang, settings: SessionSettings, patience: float) -> None:
        self.gang = gang
        self.captured: dict[int, tuple[str, str]] = {}
        self.call = gang.start_call(remote_function(*_SESSION), settings)
        try:
            self._wait_until_ready(patience)
        except BaseException:
            self.abandon()
            raise

    @property
    def hosts(self) -> dict[int, str]:
        return {worker.rank: worker.host for worker in self.gang.workers}

    def take_snapshot(self) -> tuple[str, Snapshot | None]:
        """Where all ranks are, in words and as a value; None if they could not be asked."""
        words = self.gang.stacks()
        with contextlib.suppress(OSError, ValueError):
            return words, Snapshot.from_json((self.gang.run_dir / STACKS_FILE).read_text())
        return words, None

    def read_captured(self, rank: int) -> dict[str, str]:
        """What pytest has captured of a rank since its last report, where that can be read from here."""
        found = {}
        for stream, name in zip(("out", "err"), self.captured.get(rank, ()), strict=False):
            with contextlib.suppress(OSError):
                if text := Path(name).read_text(errors="replace"):
                    found[stream] = text
        return found

    def close(self) -> str:
        """End the sessions, and the conversation; what went wrong in that, empty if nothing did."""
        words = ""
        with self.call as talk:
            talk.send(None)
            deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
            while talk.running and time.monotonic() < deadline:
                if isinstance(event := talk.receive(deadline - time.monotonic()), LauncherOutput):
                    words += event.text
        if talk.running or talk.disconnected:
            return f"{format_ranks({*talk.running, *talk.disconnected})} did not end as asked"
        return next(filter(None, map(session_error, talk.outcomes.values())), report.find_report(words))

    def abandon(self) -> None:
        """End it now, whatever the ranks do."""
        # What the launcher says of the kill is no news.
        with contextlib.redirect_stderr(io.StringIO()), self.call as talk:
            if talk.running:
                self.gang.mark_broken(f"{format_ranks(talk.running)} did not come to the end of a test")
                self.gang.kill(talk.running[0])  # and so all; an interrupt would not reach who waits for another rank
                while talk.running and talk.receive(_SHUTDOWN_TIMEOUT_S) is not None:
                    pass

    def _wait_until_ready(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        waiting = set(self.call.running)
        while waiting:
            match self.call.receive(deadline - time.monotonic()):
                case RankMessage(rank, SessionReady(captured)):
                    waiting.discard(rank)
                    if captured is not None:
                        self.captured[rank] = captured
                case Returned(rank) as returned:
                    raise SessionError(f"on rank {rank} pytest did not start:\n{session_error(returned)}")
                case Disconnected(rank):
                    raise SessionError(f"while pytest started, a rank ended:\n{self.call.explain_death()}")
                case LauncherOutput() as told:
                    self.gang.show_launcher_output(told)
                case Printed() | RankMessage():
                    pass
                case None:
                    where, _ = self.take_snapshot()
                    raise SessionError(
                        f"pytest did not start on {format_ranks(waiting)} in {format_seconds(patience)}:\n{where}"
                    )


def session_error(returned: Returned) -> str:
    """Why a session has ended that was not to, or how badly; empty if it ended well."""
    if returned.error is not None:
        return returned.error.traceback or f"{returned.error.error}: {returned.error.message}"
    _, trouble = returned.value()
    return str(trouble)
