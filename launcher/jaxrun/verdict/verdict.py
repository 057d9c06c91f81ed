"""The verdict on a job, as a value: what verdict.json holds and report.py puts into words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

FORMAT = 1
_ADDED = ("means", "advice", "link", "divergence")  # since the first files of this format


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a job ended and who is to blame.

    outcome:    "ok", "failed" (an exception), "killed" (a signal), "exited" (a status without an exception),
                "diverged" (brought down by being out of step), "lost" (a host), "early-exit", "timeout", "stall",
                "refused", "unavailable", "interrupted" or "preempted"
    hosts:      each rank's host; its length is the job's size
    culprits:   the ranks that failed alike, lowest first; empty where none is to blame
    intro:      what stands above the traceback, if anything does
    traceback:  of the user's program, of the first culprit
    headline:   the sentence that says who, what, where and when
    means:      what a known text means, in one sentence; advice: what to try; link: where more is said of it
    divergence: the call in which the ranks were out of step, if they were, in several lines
    details:    further lines: stacks, threads that had died before
    victims:    the other ranks, each with what became of it, after "rank 3 …"
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
        """The file of the run directory to look at first; empty where no rank is to blame."""
        return f"rank-{self.culprits[0]:04d}.err" if self.culprits else ""


def to_json(verdict: Verdict) -> str:
    """The text of verdict.json."""
    content = {"format": FORMAT, "size": len(verdict.hosts), "log": verdict.log, **asdict(verdict)}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def from_json(text: str) -> Verdict:
    """Read it back; fields that the file is too old to have get their defaults.

    ValueError if it is not a verdict of this format.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"not a verdict of format {FORMAT}")
    try:
        added = {name: str(content.get(name, "")) for name in _ADDED}
        values = {field.name: content[field.name] for field in fields(Verdict) if field.name not in _ADDED} | added
        for name in ("hosts", "victims"):
            values[name] = {int(rank): str(text) for rank, text in values[name].items()}
        for name in ("culprits", "details"):
            values[name] = tuple(values[name])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not a verdict: {error!r}") from None
    return Verdict(**values)
