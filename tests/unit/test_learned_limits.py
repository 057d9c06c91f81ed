"""--stall-timeout auto on hours of training, in simulated time: it ends what hangs, and nothing else."""

from collections.abc import Mapping

import pytest
from calls_by_hand import flight_after
from msgspec.structs import replace
from simulation import IN_JAX, IN_QUEUE

from jaxrun.analysis.lockstep.pauses import PauseTimes
from jaxrun.analysis.lockstep.stage_times import UnionOfSpans
from jaxrun.analysis.verdict.restarts import stall_patience
from jaxrun.cli.make_job import make_job
from jaxrun.protocol.flight import TimeTotals
from jaxrun.protocol.job_record import AttemptEnd
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.option_kinds import AUTO_S

MINUTE, HOUR = 60.0, 3600.0
START_S, STEP_S = 10.0, 1.0
IN_PYTHON = """Thread 0x1 (most recent call first):
  File "/home/me/train.py", line 31 in bleu
  File "/home/me/train.py", line 2 in <module>
"""


class Phase:
    """What two ranks do instead of steps, with these stacks; each uses so many `cores`.

    Once a phase is over that `compiles` or `saves`, the flight recorders say so; compiling is also seen meanwhile.
    """

    def __init__(self, seconds, *stacks, cores=0.0, compiles=False, saves=False):
        self.seconds, self.stacks, self.cores = seconds, stacks, cores
        self.compiles, self.saves = compiles, saves


class PerRank(Mapping):
    def __init__(self, find):
        self.find = find

    def __getitem__(self, rank):
        return self.find(rank)

    def __iter__(self):
        return iter(range(2))

    def __len__(self):
        return 2


class Training:
    """A job of two ranks that makes a step each second, three times interrupted by a phase, and then hangs."""

    def __init__(self, job, phase, every):
        self.job, self.phase = job, phase
        self.starts = [START_S + every + number * (every + phase.seconds) for number in range(3)]
        self.hangs_at = self.starts[-1] + phase.seconds + every
        self.pauses, self.stages, self.made, self.next = PauseTimes(), UnionOfSpans(), 0, START_S
        job.flights, job.stacks = PerRank(self.flight), PerRank(self.stack)
        job.identities = PerRank(lambda rank: {"call_counters": (self.update(),)})
        job.cpu = self.cpu

    @property
    def started(self):
        """When the phase has started that lasts; None if none does."""
        return next((start for start in self.starts if start <= self.job.now < start + self.phase.seconds), None)

    def update(self):
        """Make the calls up to now; returns how many there are."""
        while self.next <= min(self.job.now, self.hangs_at):
            self.pauses.add(self.next, self.next + 0.01)
            self.made += 1
            self.next += STEP_S
            if (
                start := next((start for start in self.starts if start <= self.next < start + STEP_S), None)
            ) is not None:
                self.next = start + self.phase.seconds
                if self.phase.compiles or self.phase.saves:
                    self.stages.add(start, self.next)
        return self.made

    def cpu(self, now):
        paused = sum(min(self.phase.seconds, max(0.0, now - start)) for start in self.starts)
        return self.phase.cores * paused + 0.3 * (min(now, self.hangs_at) - paused)

    def stack(self, rank):
        return IN_JAX if self.started is None else self.phase.stacks[rank]

    def flight(self, rank):
        compiling = ("jit(step)", self.started) if self.phase.compiles and self.started is not None else None
        found = flight_after(self.update(), "0-1", compiling=compiling)
        pausing = self.pauses.seconds(self.stages.overlap)
        return replace(found, totals=TimeTotals(pausing=pausing, longest=self.pauses.longest))


PHASES = {
    "an evaluation on GPUs, which waiting ranks poll": ("gpu", Phase(9 * MINUTE, IN_JAX, IN_JAX, cores=1.0)),
    "an evaluation of one rank in Python": ("cpu", Phase(9 * MINUTE, IN_PYTHON, IN_JAX, cores=0.5)),
    "a save of which nothing is seen": ("cpu", Phase(5 * MINUTE, IN_QUEUE, IN_QUEUE)),
    "a save by orbax": ("cpu", Phase(9 * MINUTE, IN_QUEUE, IN_QUEUE, saves=True)),
    "a compilation": ("gpu", Phase(20 * MINUTE, IN_JAX, IN_JAX, cores=1.0, compiles=True)),
    "data that is late once an epoch": ("cpu", Phase(9 * MINUTE, IN_QUEUE, IN_QUEUE)),
}


@pytest.mark.parametrize(("platform", "phase"), PHASES.values(), ids=PHASES)
def test_no_phase_of_a_long_training_ends_it_by_default_and_a_hang_does(simulate, platform, phase):
    least_s = Job(program=("t.py",), max_restarts=1).least_learned_stall
    job = simulate(2, platform=platform, lockstep="record", stall_notice=30.0, learns_stall=least_s).run()
    training = Training(job, phase, every=10 * MINUTE)
    job.wait(training.hangs_at)
    assert job.outcome is None
    job.wait(HOUR)
    assert job.verdict.outcome == "stall"
    longest = 0.0 if phase.saves or phase.compiles else phase.seconds
    assert training.hangs_at + max(least_s, 5 * longest) < job.finished_at < training.hangs_at + 5 * longest + 700
    assert "no rank has made a call for" in job.verdict.headline


@pytest.mark.parametrize(
    ("given", "least"),
    [
        ({}, None),
        ({"max_restarts": 3}, 600.0),
        ({"max_restarts": 3, "stall_timeout": 0.0}, None),
        ({"max_restarts": 3, "stall_timeout": 90.0}, None),
        ({"max_restarts": 3, "stall_timeout": AUTO_S}, 60.0),
        ({"stall_timeout": AUTO_S}, 60.0),
    ],
)
def test_a_limit_is_learned_where_it_is_asked_for_or_a_job_restarts(given, least):
    assert make_job({"program": ("t.py",), **given}, {}).least_learned_stall == least


def test_after_an_attempt_that_was_ended_for_a_stall_the_next_one_may_take_longer():
    stall, failure = AttemptEnd("stall", saved_step=3), AttemptEnd("lost")
    for history, patience in (((), 1), ((failure, stall), 2), ((stall, failure), 1), ((stall, stall, stall), 4)):
        assert stall_patience(history) == patience
