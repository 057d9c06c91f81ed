"""One gang with a pytest session in each of its ranks."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path

from jaxrun.contract.testing import Ready, Settings
from jaxrun.errors import JaxrunError
from jaxrun.functions import Gang
from jaxrun.gang.conversation import Gone, Printed, Returned, Said, Told
from jaxrun.gang.gang import remote_function
from jaxrun.lockstep import report
from jaxrun.ranks import spell
from jaxrun.verdict.look import Look
from jaxrun.verdict.stacks import STACKS_FILE
from jaxrun.wording import seconds

_SESSION = ("jaxrun_runtime.pytest_rank", "session")
_LEAVING = 10.0  # seconds for the sessions to take down what outlived the tests, and to save what was measured


class SessionError(JaxrunError):
    """The ranks' sessions could not be started."""


class Session:
    """Started at once; `close` lets it end in peace, `abandon` does not wait. SessionError, GangError."""

    def __init__(self, gang: Gang, settings: Settings, patience: float) -> None:
        self.gang = gang
        self.captured: dict[int, tuple[str, str]] = {}
        self.talk = gang.converse(remote_function(*_SESSION), settings)
        try:
            self._wait_until_ready(patience)
        except BaseException:
            self.abandon()
            raise

    @property
    def hosts(self) -> dict[int, str]:
        return {worker.rank: worker.host for worker in self.gang.workers}

    def look(self) -> tuple[str, Look | None]:
        """Where all ranks are, in words and as a value; None if they could not be asked."""
        words = self.gang.stacks()
        with contextlib.suppress(OSError, ValueError):
            return words, Look.from_json((self.gang.run_dir / STACKS_FILE).read_text())
        return words, None

    def printed(self, rank: int) -> dict[str, str]:
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
        with self.talk as talk:
            talk.send(None)
            deadline = time.monotonic() + _LEAVING
            while talk.missing and time.monotonic() < deadline:
                if isinstance(event := talk.receive(deadline - time.monotonic()), Told):
                    words += event.text
        if talk.missing or talk.gone:
            return f"{spell({*talk.missing, *talk.gone})} did not end as asked"
        return next(filter(None, map(ending, talk.outcomes.values())), report.find(words))

    def abandon(self) -> None:
        """End it now, whatever the ranks do."""
        # What the launcher says of the kill is no news.
        with contextlib.redirect_stderr(io.StringIO()), self.talk as talk:
            if talk.missing:
                self.gang.sicken(f"{spell(talk.missing)} did not come to the end of a test")
                self.gang.kill(talk.missing[0])  # and so all; an interrupt would not reach who waits for another rank
                while talk.missing and talk.receive(_LEAVING) is not None:
                    pass

    def _wait_until_ready(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        waiting = set(self.talk.missing)
        while waiting:
            match self.talk.receive(deadline - time.monotonic()):
                case Said(rank, Ready(captured)):
                    waiting.discard(rank)
                    if captured is not None:
                        self.captured[rank] = captured
                case Returned(rank) as returned:
                    raise SessionError(f"on rank {rank} pytest did not start:\n{ending(returned)}")
                case Gone(rank):
                    raise SessionError(f"while pytest started, a rank ended:\n{self.talk.died()}")
                case Told() as told:
                    self.gang.on_told(told)
                case Printed() | Said():
                    pass
                case None:
                    where, _ = self.look()
                    raise SessionError(f"pytest did not start on {spell(waiting)} in {seconds(patience)}:\n{where}")


def ending(returned: Returned) -> str:
    """Why a session has ended that was not to, or how badly; empty if it ended well."""
    if returned.error is not None:
        return returned.error.traceback or f"{returned.error.error}: {returned.error.message}"
    _, trouble = returned.value()
    return str(trouble)
