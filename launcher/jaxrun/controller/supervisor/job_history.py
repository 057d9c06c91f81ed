"""The attempts of a job so far, as one value, whoever knows of them; and whether there is another attempt.

this launcher's own attempts            add
verdict.json, after a requeue      ──▶  of_verdicts  ──▶ JobHistory ── decide ──▶ Restart or Stop
what agents kept for another head       of_record
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.analysis.verdict import verdict as verdict_file
from jaxrun.analysis.verdict.restarts import Restart, Stop, decide_restart
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.protocol.job_record import AttemptEnd, JobRecord
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import Plan

_RECORDED_VERDICTS = 20  # the latest attempts


class PastAttempt(Struct, frozen=True):
    """An attempt that is over.

    verdict:  for people; None if it was so long ago that nobody has kept it
    end:      what counts when it is decided whether there is another attempt; None before a requeue, which counts anew
    """

    verdict: Verdict | None
    end: AttemptEnd | None


class JobHistory(Struct, frozen=True):
    """The attempts of a job so far. Times are seconds since the epoch.

    started:   when the job began
    began:     when the attempt that follows them begins
    attempts:  the earliest first
    """

    started: float
    began: float
    attempts: tuple[PastAttempt, ...] = ()

    @classmethod
    def of_verdicts(cls, started: float, verdicts: Sequence[Verdict]) -> JobHistory:
        """Return the history of a job that another launcher has begun; its restarts count anew."""
        return cls(started, started, tuple(PastAttempt(verdict, None) for verdict in verdicts))

    @classmethod
    def of_record(cls, record: JobRecord, now: float) -> JobHistory:
        """Return what agents have kept, without the attempt that runs; the next one begins `now`."""
        verdicts = [verdict_file.from_json(text) for text in record.verdicts]
        pairs = zip_longest(reversed(verdicts), reversed(record.ends))
        return cls(record.started, now, tuple(PastAttempt(verdict, end) for verdict, end in pairs)[::-1])

    @property
    def ends(self) -> tuple[AttemptEnd, ...]:
        return tuple(attempt.end for attempt in self.attempts if attempt.end is not None)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(attempt.verdict for attempt in self.attempts if attempt.verdict is not None)

    @property
    def has_run(self) -> bool:
        """Whether the program has run in any of the attempts."""
        return any(verdict.run is not None for verdict in self.verdicts)

    def add(self, verdict: Verdict, end: AttemptEnd, now: float) -> JobHistory:
        """Return the history after one more attempt."""
        return replace(self, began=now, attempts=(*self.attempts, PastAttempt(verdict, end)))

    def decide(self, job: Job, attempt: int) -> Restart | Stop:
        """Decide what follows the last attempt, which has this number."""
        first = attempt - len(self.ends) + 1
        return decide_restart(self.ends, job.max_restarts, job.restart_on, first_attempt=first)

    def make_record(self, plan: Plan, run_dir: str, known: Mapping[int, str]) -> JobRecord:
        """Return what agents keep from the start of an attempt on; `known` are hosts of the attempt before."""
        latest = [replace(each, traceback="", details=()) for each in self.verdicts[-_RECORDED_VERDICTS:]]
        return JobRecord(
            job_id=plan.job_id,
            run_dir=run_dir,
            attempt=plan.attempt,
            started=self.started,
            began=self.began,
            hosts=plan.host_of | dict(known),
            ends=self.ends,
            verdicts=tuple(map(verdict_file.to_json, latest)),
        )
