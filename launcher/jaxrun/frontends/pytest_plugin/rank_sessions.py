"""The pytest sessions in the ranks of one gang: started, ended, killed, asked where they are."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path

from jaxrun import RUNTIME
from jaxrun.analysis.diagnosis.snapshot import Snapshot
from jaxrun.errors import JaxrunError, UsageError
from jaxrun.frontends.gang.call_events import Disconnected, LauncherOutput, RankMessage, Returned
from jaxrun.frontends.gang.gang import Gang
from jaxrun.protocol.payload import FunctionReference
from jaxrun.protocol.pytest_messages import SessionReady, SessionSettings
from jaxrun.records.event_log.actions import RecordDivergence
from jaxrun.records.rundir.recorded_files import read_job_events
from jaxrun.text import format_ranks, format_seconds

_STARTUP_TIMEOUT_S = 120.0  # for the ranks to import and collect the tests
_SHUTDOWN_TIMEOUT_S = 10.0  # for the ranks' sessions to tear down their fixtures and to save coverage
_SESSION = FunctionReference(f"{RUNTIME}.pytest.rank_session", "run_session")


class SessionError(JaxrunError):
    """The ranks' pytest sessions could not be started."""


class RankSessions:
    """The pytest sessions in the ranks of `gang`, started when this is made. Raises SessionError or GangError.

    `close` waits until the sessions have ended; `abandon` kills the ranks.
    """

    def __init__(self, gang: Gang, settings: SessionSettings) -> None:
        self.gang = gang
        self.hosts = {worker.rank: worker.host for worker in gang.workers}
        self._captured: dict[int, tuple[str, str]] = {}  # by rank, the files of its stdout and stderr
        self._known_divergences = 0
        self.new_divergences()
        self.call = gang.start_call(_SESSION, settings)
        try:
            self._wait_until_ready()
        except BaseException:
            self.abandon()
            raise

    def snapshot(self) -> Snapshot | None:
        """Where all ranks are; None if they could not be asked."""
        with contextlib.suppress(JaxrunError):
            return self.gang.snapshot()
        return None

    def new_divergences(self) -> list[str]:
        """How the ranks fell out of step, as often as the launcher has found it since this was last called."""
        texts: list[str] = []
        with contextlib.suppress(UsageError):
            messages = [event.message for event in read_job_events(self.gang.run_dir).events]
            texts = [message.text for message in messages if isinstance(message, RecordDivergence)]
        known, self._known_divergences = self._known_divergences, len(texts)
        return texts[known:]

    def read_captured(self, rank: int) -> dict[str, str]:
        """What pytest has captured of a rank since its last report, by stream; empty if this host cannot read it."""
        found = {}
        for stream, name in zip(("out", "err"), self._captured.get(rank, ()), strict=False):
            with contextlib.suppress(OSError):
                if text := Path(name).read_text(errors="replace"):
                    found[stream] = text
        return found

    def close(self) -> str:
        """End the sessions. Returns what went wrong, empty if nothing did."""
        with self.call as call:
            call.send(None)
            deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
            while call.running and time.monotonic() < deadline:
                call.receive(deadline - time.monotonic())
        if call.running or call.disconnected:
            return f"{format_ranks({*call.running, *call.disconnected})} did not end as asked"
        errors = [*map(session_error, call.outcomes.values()), *self.new_divergences()]
        return next(filter(None, errors), "")

    def abandon(self) -> None:
        """Kill the ranks, whatever they do."""
        # The launcher's report of the kill would only mislead.
        with contextlib.redirect_stderr(io.StringIO()), self.call as call:
            if call.running:
                self.gang.mark_broken(f"{format_ranks(call.running)} did not come to the end of a test")
                # One death ends all ranks. An interrupt would not reach a rank that waits for another one.
                self.gang.kill(call.running[0])
                while call.running and call.receive(_SHUTDOWN_TIMEOUT_S) is not None:
                    pass

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _STARTUP_TIMEOUT_S
        waiting = set(self.call.running)
        while waiting:
            match self.call.receive(deadline - time.monotonic()):
                case RankMessage(rank, SessionReady(captured)):
                    waiting.discard(rank)
                    if captured is not None:
                        self._captured[rank] = captured
                case Returned(rank) as returned:
                    raise SessionError(f"on rank {rank} pytest did not start:\n{session_error(returned)}")
                case Disconnected():
                    raise SessionError(f"while pytest started, a rank ended:\n{self.call.explain_death()}")
                case LauncherOutput() as output:
                    self.call.show(output)
                case None:
                    missing = f"{format_ranks(waiting)} in {format_seconds(_STARTUP_TIMEOUT_S)}"
                    raise SessionError(f"pytest did not start on {missing}:\n{self.gang.stacks()}")


def session_error(returned: Returned) -> str:
    """The error with which a rank's session has ended; empty if it ended well."""
    if returned.error is not None:
        return returned.error.traceback or f"{returned.error.error}: {returned.error.message}"
    _, internal_error = returned.value()
    return str(internal_error)
