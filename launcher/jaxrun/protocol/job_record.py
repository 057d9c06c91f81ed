"""What agents keep of a job for a head that takes the place of the one that they have lost (--wait-hosts).

The command of host 0 is started again, and knows nothing of the job. The first agent that reports tells it: which job
this is, which attempt ran, and how the attempts before it have ended, so that the count of restarts goes on.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from jaxrun.text import format_status


class AlikeFailure(Struct, frozen=True, forbid_unknown_fields=True):
    """What is equal for failures that are alike: the exception and its place, the status (negative for a signal).

    With neither, the ranks were out of step at this place; without one, some had finished before the others.
    """

    error: str = ""
    status: int = 0
    place: str = ""
    stage: str = ""

    def __str__(self) -> str:
        """What the job did: `raised ValueError at train.py:88`."""
        stage = f" ({self.stage})" if self.stage else ""
        if self.error == "SystemExit":
            return f"{format_status(self.status)}{self.place}{stage}"
        if self.error:
            return f"raised {self.error}{self.place}{stage}"
        if self.status:
            return format_status(self.status, "was ")
        return f"had its ranks out of step{self.place}" if self.place else "had some ranks finish before the others"


class AttemptEnd(Struct, frozen=True, forbid_unknown_fields=True):
    """What counts of the end of an attempt, when it is decided whether there is another one.

    kind:        what --restart-on tells apart
    failure:     what is equal for failures that are alike; None for what is no fault of the program
    hopeless:    why another attempt would do no good; empty where it may
    saved_step:  the last step that the program has said to be saved
    returns:     how many times lost ranks were started again, alone, while the others went on
    """

    kind: str
    failure: AlikeFailure | None = None
    hopeless: str = ""
    saved_step: int | None = None
    returns: int = 0


class JobRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """A job and its attempts so far. Times are seconds since the epoch, on the clock of the head's host.

    run_dir:     the run directory on the head's host; empty where the job leaves no files
    attempt:     the attempt that runs; began: when it began
    started:     when the job began
    hosts:       the host of each rank, as far as it was known
    ends:        how the attempts before it have ended
    verdicts:    the same for people, each as the text of a verdict.json
    saved_step:  the last step that the attempt has saved
    head_left:   the attempt is over, because the pod of the head was drained
    """

    job_id: str
    run_dir: str
    attempt: int
    started: float
    began: float
    hosts: Mapping[int, str] = field(default_factory=dict)
    ends: tuple[AttemptEnd, ...] = ()
    verdicts: tuple[str, ...] = ()
    saved_step: int | None = None
    head_left: bool = False
