"""The verdict on a job: the value that verdict.json holds and that verdict_text.py formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import asdict

from jaxrun.analysis.verdict.goodput_text import Goodput
from jaxrun.errors import ProtocolError
from jaxrun.protocol.codec import format_json, from_content

FORMAT = 1
_MAX_NUMBER = 1e15


class Verdict(Struct, frozen=True):
    """How a job ended, and which ranks caused it.

    outcome:    "ok", "failed" (an exception), "killed" (a signal), "exited" (a status without an exception),
                "diverged" (brought down by being out of step, or out of step up to its end), "lost" (a host),
                "early-exit", "timeout", "stall", "refused", "usage" (not possible on these hosts), "unavailable",
                "interrupted", "preempted" or "grown" (stopped to continue with more hosts)
    hosts:      each rank's host; its length is the job's size
    culprits:   the ranks that failed in the same way, lowest first; empty if no rank caused the end
    intro:      a line above the traceback; may be empty
    traceback:  the traceback of the first culprit's program
    headline:   one sentence: which rank, what, where and when
    means:      the cause of a known error in one sentence; advice: what to do; link: documentation or an issue
    divergence: the call in which the ranks diverged, in several lines; empty if they did not
    details:    further lines: injected faults, stacks, threads that had died before
    victims:    the other ranks, each with what became of it, to complete "rank 3 …": a Fate, or a text
    startup:    seconds from the start to the program's first line; None if it was never reached
    run:        seconds from then to the failure, or to the end
    stopping:   seconds from the failure until nothing was left running
    attempt:    the number of this attempt, from 1
    before:     seconds from the start of the job to the start of this attempt
    earlier:    the verdicts on the attempts before it
    left_out:   hosts that were lost in earlier attempts, and are no longer used
    no_restart: why there was no further attempt although --max-restarts allowed one; else empty
    goodput:    what the time of a longer job was worth; None if it was not computed
    reached:    the last step that the program has told: "reached step 340 of 1,000 (34 %)"; empty if none
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
    attempt: int = 1
    before: float = 0.0
    earlier: tuple[Verdict, ...] = ()
    left_out: tuple[str, ...] = ()
    no_restart: str = ""
    goodput: Goodput | None = None
    reached: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether all programs have ended with status 0, by themselves, and the ranks were in step."""
        return self.outcome == "ok"

    @property
    def log(self) -> str:
        """The file of the run directory to look at first; empty if there is no culprit."""
        if not self.culprits:
            return ""
        name = f"rank-{self.culprits[0]:04d}.err"
        return name if self.attempt == 1 else f"attempt-{self.attempt}/{name}"

    @property
    def seconds(self) -> float:
        """The duration of the job, all attempts together, as far as it is known."""
        return self.before + sum(filter(None, (self.startup, self.run, self.stopping)))

    @property
    def sizes(self) -> list[tuple[int, float]]:
        """The number of hosts of each attempt, and the seconds until the next attempt began."""
        attempts = [*self.earlier, self]
        ends = [*(following.before for following in attempts[1:]), self.seconds]
        return [
            (len(set(one.hosts.values())), max(0.0, end - one.before)) for one, end in zip(attempts, ends, strict=True)
        ]


class VerdictContent(Verdict, frozen=True, kw_only=True):
    """A verdict as verdict.json has it, with what its readers would have to find out themselves.

    size:  the number of ranks
    log:   the file of the run directory to look at first; empty if there is no culprit
    """

    format: Literal[1] = 1
    size: int = 0
    log: str = ""
    earlier: tuple[VerdictContent, ...] = ()


def to_json(verdict: Verdict) -> str:
    return format_json(to_content(verdict)) + "\n"


def to_content(verdict: Verdict) -> VerdictContent:
    fields = {**asdict(verdict), "earlier": tuple(map(to_content, verdict.earlier))}
    return VerdictContent(size=len(verdict.hosts), log=verdict.log, **fields)


def from_json(text: str) -> Verdict:
    """Parse verdict.json; fields that an old file lacks get their defaults.

    Raises ValueError if it is not a verdict of this format.
    """
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"not a verdict of format {FORMAT}")
        verdict = from_content(Verdict, content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ProtocolError as error:
        raise ValueError(f"not a verdict: {error}") from None
    _check_numbers(verdict)
    return verdict


def _check_numbers(verdict: Verdict) -> None:
    """Raise ValueError for unreasonable numbers, including NaN."""
    for name, value in asdict(verdict).items():
        if isinstance(value, (int, float)) and not -_MAX_NUMBER < value < _MAX_NUMBER:
            raise ValueError(f"not a verdict: {name} is {value!r:.80}")
    if not all(-_MAX_NUMBER < rank < _MAX_NUMBER for rank in verdict.culprits):
        raise ValueError(f"not a verdict: culprits are {verdict.culprits!r:.80}")
    for earlier in verdict.earlier:
        _check_numbers(earlier)
