"""The verdict on a job: the value that verdict.json holds and that report.py formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

FORMAT = 1
_ADDED_FIELDS = ("means", "advice", "link", "divergence")  # missing in the first files of this format


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a job ended, and which ranks caused it.

    outcome:    "ok", "failed" (an exception), "killed" (a signal), "exited" (a status without an exception),
                "diverged" (brought down by being out of step), "lost" (a host), "early-exit", "timeout", "stall",
                "refused", "unavailable", "interrupted" or "preempted"
    hosts:      each rank's host; its length is the job's size
    culprits:   the ranks that failed in the same way, lowest first; empty where no rank caused the end
    intro:      a line above the traceback; may be empty
    traceback:  of the user's program, of the first culprit
    headline:   one sentence: which rank, what, where and when
    means:      the cause of a known error in one sentence; advice: what to do; link: documentation or an issue
    divergence: the call in which the ranks diverged, in several lines; empty if they did not
    details:    further lines: injected faults, stacks, threads that had died before
    victims:    the other ranks, each with what became of it, to complete "rank 3 …"
    startup:    seconds from the start to the program's first line; None if it was never reached
    run:        seconds from then to the failure, or to the end
    stopping:   seconds from the failure until nothing was left running
    """

    outcome: str
    exit_code: int
    hosts: Mapping[int, str]
    culprits: tuple[int, ...] = ()
    intro: str = ""
    traceback: str = ""
    headline: str = ""
    details: tuple[str, ...] = ()
    victims: Mapping[int, str] = field(default_factory=dict)
    startup: float | None = None
    run: float | None = None
    stopping: float | None = None
    means: str = ""
    advice: str = ""
    link: str = ""
    divergence: str = ""

    @property
    def log(self) -> str:
        """The file of the run directory to look at first; empty where there is no culprit."""
        return f"rank-{self.culprits[0]:04d}.err" if self.culprits else ""


def to_json(verdict: Verdict) -> str:
    """The text of verdict.json."""
    content = {"format": FORMAT, "size": len(verdict.hosts), "log": verdict.log, **asdict(verdict)}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def from_json(text: str) -> Verdict:
    """Parse verdict.json; fields that an old file lacks get their defaults.

    Raises ValueError if it is not a verdict of this format.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"not a verdict of format {FORMAT}")
    try:
        values = {field.name: content[field.name] for field in fields(Verdict) if field.name not in _ADDED_FIELDS}
        values |= {name: str(content.get(name, "")) for name in _ADDED_FIELDS}
        for name in ("hosts", "victims"):
            values[name] = {int(rank): str(text) for rank, text in values[name].items()}
        for name in ("culprits", "details"):
            values[name] = tuple(values[name])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not a verdict: {error!r}") from None
    return Verdict(**values)
