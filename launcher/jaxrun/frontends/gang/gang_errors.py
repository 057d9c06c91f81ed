"""Exceptions of ranks, raised again by the caller; and errors for ranks that died or do not return."""

from __future__ import annotations

import contextlib
import pickle
import re
import signal as signals
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from jaxrun.analysis.diagnosis.consequences import ErrorOrigin, classify_error
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.errors import EXIT_SIGNAL_BASE, EXIT_TIMEOUT, EXIT_UNAVAILABLE, JaxrunError
from jaxrun.text import format_ranks_on_hosts

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")  # an object's address in its repr
_NEEDS_JAX = ("jax", "jaxlib")
_NEVER_RAISED_AGAIN = (SystemExit, KeyboardInterrupt, GeneratorExit)  # they would end the caller


class GangError(JaxrunError):
    """A gang cannot do what was asked.

    >>> gang = jaxrun.Gang(processes=1)
    >>> gang.close()
    >>> gang.run(len, "abc")
    Traceback (most recent call last):
    jaxrun.frontends.gang.gang_errors.GangError: this gang of 1 is closed; make another
    """


class GangStartError(GangError):
    """A gang did not start. The text is the launcher's output, `exit_code` its exit code.

    >>> jaxrun.Gang(options="--no-such")
    Traceback (most recent call last):
    jaxrun.frontends.gang.gang_errors.GangStartError: the gang did not start:
    jaxrun: there is no option --no-such; …
    """

    def __init__(self, text: str, exit_code: int = EXIT_UNAVAILABLE) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class WorkerDied(GangError):
    """A rank's process has ended. The gang starts again at its next use.

    rank, host:  of the rank that died first; `ranks`: all that died in the same way
    signal:      the signal that killed it, or None
    status:      its exit status as a shell shows it: 128 + the number of the signal; 0 after os._exit(0)

    >>> with jaxrun.Gang(processes=1) as gang:
    ...     try:
    ...         gang.run(os._exit, 3)
    ...     except jaxrun.WorkerDied as error:
    ...         print(error.rank, error.signal, error.status)
    0 None 3
    """

    def __init__(self, text: str, ranks: Sequence[int], hosts: Mapping[int, str], status: int) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)
        self.rank = self.ranks[0] if self.ranks else None
        self.host = hosts.get(self.rank, "") if self.rank is not None else ""
        self.status, self.exit_code = status, status or 1
        self.signal: signals.Signals | int | None = None

    @classmethod
    def from_verdict(cls, verdict: Verdict, text: str) -> WorkerDied:
        """Make the error that a job's verdict describes."""
        error = cls(text, verdict.culprits, verdict.hosts, verdict.exit_code)
        if verdict.outcome == "killed":
            error.signal = verdict.exit_code - EXIT_SIGNAL_BASE
            with contextlib.suppress(ValueError):  # a real-time signal has no name
                error.signal = signals.Signals(error.signal)
        return error


class CallTimeout(GangError, TimeoutError):
    """A call took longer than its `timeout`. The text says where each rank was; `missing`: ranks still running.

    >>> with jaxrun.Gang(processes=2) as gang:
    ...     try:
    ...         gang.run(time.sleep, 60, timeout=0.2)
    ...     except jaxrun.CallTimeout as error:
    ...         print(error.missing)
    (0, 1)
    """

    exit_code = EXIT_TIMEOUT

    def __init__(self, text: str, missing: Sequence[int]) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


class RemoteError(GangError):
    """Replaces a rank's exception that cannot be raised here; the text begins with the name of its type.

    >>> jaxrun.launch(sys.exit, 3, processes=1)
    Traceback (most recent call last):
    jaxrun.frontends.gang.gang_errors.RemoteError: SystemExit: the function has called sys.exit with status 3
    """


class RemoteTraceback(Exception):
    """The cause of an exception that comes from a rank: the traceback there, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0].rstrip()}\n"""'


class RemoteFailure(Struct, frozen=True):
    """An exception from a rank's function.

    error:      the type's name
    message:    its text
    traceback:  as Python prints it, with the user's frames only
    time:       when, in seconds since the epoch on that host's clock
    """

    rank: int
    host: str
    error: str
    message: str
    traceback: str
    notes: tuple[str, ...]
    time: float
    home: str
    pickled: bytes

    @classmethod
    def from_rank(cls, rank: int, host: str, content: Mapping[str, Any]) -> RemoteFailure:
        fields = {name: content[name] for name in ("error", "message", "traceback", "time", "home")}
        if fields["error"] == SystemExit.__name__ and not fields["message"]:
            fields["message"] = f"the function has called sys.exit with status {content['status']}"
        return cls(rank, host, notes=tuple(content["notes"]), pickled=content["exception"], **fields)

    @property
    def headline(self) -> str:
        """`ValueError: bad`, with the first line of the message."""
        first = self.message.partition("\n")[0]
        return f"{self.error}: {first}" if first else self.error

    def to_exception(self) -> BaseException:
        """Return the exception itself, with `.rank`, `.host`, `.ranks`, and the traceback as its cause.

        It is a RemoteError instead if the exception cannot be unpickled here, needs a jax that is not imported, or
        would end the caller.
        """
        found = self._rebuilt()
        _mark(found, rank=self.rank, host=self.host, ranks=(self.rank,))
        _mark(found, __cause__=RemoteTraceback(f"rank {self.rank} ({self.host}):\n{self.traceback}"))
        return found

    def _rebuilt(self) -> BaseException:
        found: BaseException | None = None
        if self.pickled and (self.home.partition(".")[0] not in _NEEDS_JAX or "jax" in sys.modules):
            try:
                found = pickle.loads(self.pickled)
            except KeyboardInterrupt:
                raise
            except BaseException:  # its class may do anything, for example call sys.exit
                found = None
        # asyncio's CancelledError would cancel the caller's own task.
        cancels = self.error == "CancelledError" and not isinstance(found, Exception)
        if not isinstance(found, BaseException) or isinstance(found, _NEVER_RAISED_AGAIN) or cancels:
            found = RemoteError(f"{self.error}: {self.message}" if self.message else self.error)
        return found

    @property
    def is_consequence(self) -> bool:
        """Whether the exception only says that a connection to another rank was lost."""
        return classify_error(self.message, self.traceback) is ErrorOrigin.OTHER

    @property
    def group_key(self) -> tuple[str, str, str]:
        """A value that is equal for ranks that raised the same, whatever addresses or ports their texts contain."""
        if self.is_consequence:
            return self.error, "", ""
        return self.error, _ADDRESS.sub("0x", self.message), _ADDRESS.sub("0x", self.traceback)


def _mark(error: BaseException, **about: Any) -> None:
    """Set attributes, even if the class is frozen; attributes that are properties of the class are left alone."""
    for name, value in about.items():
        with contextlib.suppress(AttributeError, TypeError):
            BaseException.__setattr__(error, name, value)


def _note(error: BaseException, text: str) -> None:
    notes: list[Any] = []
    with contextlib.suppress(BaseException):  # one may be a property of its class, which may even call sys.exit
        notes = list(getattr(error, "__notes__", ()))
    _mark(error, __notes__=[*notes, text])


def group_failures(failures: Sequence[RemoteFailure]) -> list[list[RemoteFailure]]:
    """Return groups of equal failures, the earliest first."""
    groups: dict[tuple[str, str, str], list[RemoteFailure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.time):
        groups.setdefault(failure.group_key, []).append(failure)
    return list(groups.values())


def combined_exception(failures: Sequence[RemoteFailure], waiting: str = "") -> BaseException:
    """Return one exception for all failures: the earliest, or an exception group if they differ.

    Failures that only report a lost connection to another rank become a note, unless all failures are of that kind.
    waiting: a note about the ranks that have not failed
    """
    own = [failure for failure in failures if not failure.is_consequence] or failures
    lost = sorted({failure.rank for failure in failures} - {failure.rank for failure in own})
    exceptions = []
    hosts = {failure.rank: failure.host for failure in failures}
    for same in group_failures(own):
        exception = same[0].to_exception()
        ranks = tuple(sorted(failure.rank for failure in same))
        if len(ranks) > 1:
            _mark(exception, ranks=ranks)
            _note(exception, f"the same on {format_ranks_on_hosts(ranks, hosts)}")
        exceptions.append(exception)
    result = exceptions[0]
    if len(exceptions) > 1:
        where = format_ranks_on_hosts([failure.rank for failure in own], hosts)
        text = f"{where} raised {len(exceptions)} different errors"
        result = BaseExceptionGroup(text, exceptions)
    if lost:
        _note(result, f"{format_ranks_on_hosts(lost, hosts)} lost a connection to another rank")
    if waiting:
        _note(result, waiting)
    return result
