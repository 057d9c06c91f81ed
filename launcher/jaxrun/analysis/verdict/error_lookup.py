"""Looks a failure up in the table of known errors.

The first entry that matches decides. An exception's own message is searched before the rest of its chain; stderr is
searched only for a rank that raised no exception.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from msgspec import Struct

from jaxrun.analysis.diagnosis.error_choice import choose_error
from jaxrun.analysis.diagnosis.job_outcome import WorkerOutcome
from jaxrun.analysis.diagnosis.root_cause import own_thread_failures
from jaxrun.analysis.verdict.known_errors import KNOWN_ERRORS, KnownError

# Number of characters searched: an error is named in its first lines, and a dying process writes the error last.
_FIRST, _LAST = 4_000, 6_000
_INDENTED = re.compile(r"^ .*\n?", re.MULTILINE)
_SIGNALS_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


class ErrorExplanation(Struct, frozen=True):
    """The cause in one sentence, the advice in another, and a link; all empty for an unknown text."""

    means: str = ""
    advice: str = ""
    link: str = ""


def explain_worker(worker: WorkerOutcome) -> ErrorExplanation:
    """Explain the failure of a culprit. What was raised while its exception was handled is not looked up."""
    failure = worker.failure
    choice = choose_error(failure.chain) if failure is not None else None
    if failure is None or choice is None:
        return find_explanation(*_texts(worker))
    so_far = failure.chain[: failure.chain.index(choice.chosen) + 1]
    return find_explanation(choice.chosen.message, *(f"{error.error}: {error.message}" for error in reversed(so_far)))


def explain_consequence(worker: WorkerOutcome, *, several_hosts: bool) -> ErrorExplanation:
    """Explain a failure that may be a consequence of another one: only errors that name a cause are looked up."""
    return find_explanation(*_texts(worker), accept=lambda e: e.is_root and (several_hosts or not e.is_network))


def explain_unavailable(text: str, traceback: str) -> ErrorExplanation:
    """Explain why a job did not start, by what mpirun or srun wrote, and by an agent's traceback, if there is one."""
    return find_explanation(text, _messages(traceback))


def find_explanation(*texts: str, accept: Callable[[KnownError], bool] = lambda error: True) -> ErrorExplanation:
    """Explain the first text that matches a known error; only errors for which `accept` is true are looked up."""
    for text in map(_clip, texts):
        for known in KNOWN_ERRORS.values():
            if accept(known) and (match := known.search(text)):
                groups = match.groupdict()
                return ErrorExplanation(known.means.format_map(groups), known.advice.format_map(groups), known.link)
    return ErrorExplanation()


def _texts(worker: WorkerOutcome) -> tuple[str, ...]:
    failure = worker.failure
    if failure is not None:
        return failure.message, worker.stderr_tail if failure.error == "SystemExit" else _messages(failure.traceback)
    threads = tuple(_messages(thread.traceback) for thread in own_thread_failures(worker)[-1:])
    says_nothing = worker.lost_reason or worker.status in _SIGNALS_FROM_OUTSIDE
    return threads if says_nothing else (*threads, worker.stderr_tail)


def _messages(traceback: str) -> str:
    """Return a traceback without its frames, whose source lines may quote any text."""
    return _INDENTED.sub("", traceback)


def _clip(text: str) -> str:
    return text if len(text) <= _FIRST + _LAST else f"{text[:_FIRST]}\n{text[-_LAST:]}"
