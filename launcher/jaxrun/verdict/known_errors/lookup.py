"""What a known text means and what to try, for the culprit's exception, its stderr, or what mpirun and srun said.

The first row of the table that matches decides. An exception is looked up by its own message before the rest of its
chain; stderr counts only of a rank that left no exception. Nothing is said of a rank that only saw a broken connection,
unless the text itself names the cause. Pure.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from jaxrun.diagnosis.root_cause import own_thread_failures
from jaxrun.diagnosis.worker_outcome import WorkerOutcome
from jaxrun.verdict.known_errors.host_errors import HOST_ERRORS
from jaxrun.verdict.known_errors.launch_errors import LAUNCH_ERRORS
from jaxrun.verdict.known_errors.program_errors import PROGRAM_ERRORS

KNOWN_ERRORS = (*PROGRAM_ERRORS, *LAUNCH_ERRORS, *HOST_ERRORS)

# Characters that are looked at: an error's first lines name it, what a dying process wrote last stands at the end.
_HEAD, _TAIL = 4_000, 6_000
_INDENTED = re.compile(r"^ .*\n?", re.MULTILINE)
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One sentence of cause, one of what to try, and where more is said of it; all empty for an unknown text."""

    means: str = ""
    advice: str = ""
    link: str = ""


def explain_worker(end: WorkerOutcome, *, roots_only: bool = False) -> Explanation:
    """Of the culprit's end; `roots_only` where it may be the consequence of another's."""
    return find_explanation(*_texts(end), roots_only=roots_only)


def find_explanation(*texts: str, roots_only: bool = False) -> Explanation:
    """Of the first of the texts that is known."""
    for text in map(_clip, texts):
        for row in KNOWN_ERRORS:
            if (row.is_root or not roots_only) and (match := row.pattern.search(text)):
                groups = match.groupdict()
                return Explanation(row.means.format_map(groups), row.advice.format_map(groups), row.link)
    return Explanation()


def explain_unavailable(text: str, traceback: str) -> Explanation:
    """Of a job that did not come together: what was said of it, and how an agent failed if one did."""
    return find_explanation(text, _errors(traceback))


def _texts(end: WorkerOutcome) -> tuple[str, ...]:
    if end.failure is not None:
        rest = end.stderr_tail if end.failure.error == "SystemExit" else _errors(end.failure.traceback)
        return end.failure.message, rest
    threads = tuple(_errors(thread.traceback) for thread in own_thread_failures(end)[-1:])
    return threads if end.lost_reason or end.status in _FROM_OUTSIDE else (*threads, end.stderr_tail)


def _errors(traceback: str) -> str:
    """A traceback without its frames, whose source lines may quote any text."""
    return _INDENTED.sub("", traceback)


def _clip(text: str) -> str:
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}\n{text[-_TAIL:]}"
