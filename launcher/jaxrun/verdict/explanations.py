"""What a known text means and what to try, for the culprit's exception, its stderr, or what mpirun and srun said.

The first row of the table that matches decides. An exception is looked up by its own message before the rest of its
chain; stderr counts only of a rank that left no exception. Nothing is said of a rank that only saw a broken connection,
unless the text itself names the cause. Pure.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from jaxrun.verdict.ends import End
from jaxrun.verdict.explanation_machines import MACHINES
from jaxrun.verdict.explanation_starters import STARTERS
from jaxrun.verdict.explanation_table import PROGRAM
from jaxrun.verdict.sentences import own_threads

TABLE = (*PROGRAM, *STARTERS, *MACHINES)

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


def of_end(end: End, *, roots_only: bool = False) -> Explanation:
    """Of the culprit's end; `roots_only` where it may be the consequence of another's."""
    return explain(*_texts(end), roots_only=roots_only)


def explain(*texts: str, roots_only: bool = False) -> Explanation:
    """Of the first of the texts that is known."""
    for text in map(_clip, texts):
        for row in TABLE:
            if (row.is_root or not roots_only) and (match := row.pattern.search(text)):
                groups = match.groupdict()
                return Explanation(row.means.format_map(groups), row.advice.format_map(groups), row.link)
    return Explanation()


def of_unavailable(text: str, traceback: str) -> Explanation:
    """Of a job that did not come together: what was said of it, and how an agent failed if one did."""
    return explain(text, _errors(traceback))


def _texts(end: End) -> tuple[str, ...]:
    if end.words is not None:
        rest = end.tail if end.words.error == "SystemExit" else _errors(end.words.traceback)
        return end.words.message, rest
    threads = tuple(_errors(thread.traceback) for thread in own_threads(end)[-1:])
    return threads if end.lost or end.status in _FROM_OUTSIDE else (*threads, end.tail)


def _errors(traceback: str) -> str:
    """A traceback without its frames, whose source lines may quote any text."""
    return _INDENTED.sub("", traceback)


def _clip(text: str) -> str:
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}\n{text[-_TAIL:]}"
