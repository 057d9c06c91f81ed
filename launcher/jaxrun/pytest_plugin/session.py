"""One gang with a pytest session in each of its ranks."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path

from jaxrun import RUNTIME
from jaxrun.diagnosis.snapshot import Snapshot
from jaxrun.errors import JaxrunError
from jaxrun.gang.call_events import Disconnected, LauncherOutput, Printed, RankMessage, Returned
from jaxrun.gang.gang import Gang, remote_function
from jaxrun.lockstep import report
from jaxrun.protocol.pytest_messages import SessionReady, SessionSettings
from jaxrun.rundir.rundir import STACKS_FILE
from jaxrun.text import format_ranks, format_seconds

_SHUTDOWN_TIMEOUT_S = 10.0  # for the ranks' sessions to tear down their fixtures and to save coverage


class SessionError(JaxrunError):
    """The ranks' pytest sessions could not be started."""


class GangSession:
    """The pytest sessions in the ranks of `gang`, started when this is made. Raises SessionError or GangError.

    `close` waits until the sessions have ended; `abandon` kills the ranks.
    """

    def __init__(self, gang: Gang, settings: SessionSettings, startup_timeout: float) -> None:
        self.gang = gang
        self._captured: dict[int, tuple[str, str]] = {}  # by rank, the files of its stdout and stderr
        self.call = gang.start_call(remote_function(f"{RUNTIME}.pytest.session", "run_session"), settings)
        try:
            self._wait_until_ready(startup_timeout)
        except BaseException:
            self.abandon()
            raise

    @property
    def hosts(self) -> dict[int, str]:
        return {worker.rank: worker.host for worker in self.gang.workers}

    def take_snapshot(self) -> tuple[str, Snapshot | None]:
        """Where all ranks are, as text and as a value; None if the ranks could not be asked."""
        text = self.gang.stacks()
        with contextlib.suppress(OSError, ValueError):
            return text, Snapshot.from_json((self.gang.run_dir / STACKS_FILE).read_text())
        return text, None

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
        launcher_output = ""
        with self.call as call:
            call.send(None)
            deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
            while call.running and time.monotonic() < deadline:
                if isinstance(event := call.receive(deadline - time.monotonic()), LauncherOutput):
                    launcher_output += event.text
        if call.running or call.disconnected:
            return f"{format_ranks({*call.running, *call.disconnected})} did not end as asked"
        return next(filter(None, map(session_error, call.outcomes.values())), report.find_report(launcher_output))

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

    def _wait_until_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
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
                case Printed() | RankMessage():
                    pass
                case None:
                    where, _ = self.take_snapshot()
                    missing = f"{format_ranks(waiting)} in {format_seconds(timeout)}"
                    raise SessionError(f"pytest did not start on {missing}:\n{where}")


def session_error(returned: Returned) -> str:
    """The error with which a rank's session has ended; empty if it ended well."""
    if returned.error is not None:
        return returned.error.traceback or f"{returned.error.error}: {returned.error.message}"
    _, internal_error = returned.value()
    return str(internal_error)
