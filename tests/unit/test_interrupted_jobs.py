"""A job that is asked to end has ended within the grace and what follows it, whatever its ranks do meanwhile."""

import signal

from examples import given
from hypothesis import strategies as st
from simulation import Simulation

from jaxrun.job_events.actions import Send
from jaxrun.job_events.events import AgentLost
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import WorkerExited
from jaxrun.protocol.stop_messages import PollCount, StopPolled
from jaxrun.protocol.worker_messages import Done, Exit, Interrupted

SIZE = 3
LONGEST_S = 60.0  # a grace of 30 s, a second for late ranks, 5 s for those that leave, and 10 s for silent agents


class Ranks(Simulation):
    """Ranks, each on a host of its own, that leave when they may. Nothing is heard of one that is gone."""

    def __init__(self, **options):
        super().__init__(SIZE, hosts={rank: f"h{rank}" for rank in range(SIZE)}, **options)
        self.hanging = set()  # ranks that only SIGKILL ends

    def handle(self, *events):
        there = [event for event in events if getattr(event, "rank", None) not in self.exited]
        for event in there:
            if isinstance(event, AgentLost):
                self.exited[int(event.agent)] = None
                self.stuck.add(int(event.agent))
        return super().handle(*there)

    def _execute(self, action):
        super()._execute(action)
        match action:
            case Send(ranks=ranks, message=Exit()):
                for rank in set(ranks) - self.hanging:
                    self._later(0.01, WorkerExited(rank, 0))


# What a rank does after the job was asked to end, and after how many seconds.
FATES = {
    "works on": lambda job, rank: (),
    "catches KeyboardInterrupt": lambda job, rank: (Interrupted(rank, job.now),),
    "answers should_stop": lambda job, rank: (PollCount(rank, 7),),
    "ends well": lambda job, rank: (Done(rank, job.now),),
    "fails": lambda job, rank: (job.failure(rank),),
    "exits": lambda job, rank: (WorkerExited(rank, 0),),
    "dies": lambda job, rank: (WorkerExited(rank, -11),),
    "loses its host": lambda job, rank: (AgentLost(AgentId(rank), "its host is gone"),),
}
MOMENTS = st.sampled_from((0.0, 0.01, 0.3, 2.0, 4.9, 5.05, 6.5, 12.0, 29.9, 30.05, 31.5))
STEPS = st.lists(st.tuples(MOMENTS, st.integers(0, SIZE - 1), st.sampled_from(list(FATES))), max_size=6)
ASKED = {
    "Ctrl-C": lambda job: job.interrupt(signal.SIGINT),
    "SIGTERM": lambda job: job.interrupt(signal.SIGTERM),
    "SIGTERM that ranks handle": lambda job: job.listen().interrupt(signal.SIGTERM),
    "SIGTERM where ranks ask should_stop": lambda job: job.handle(*map(StopPolled, range(SIZE))).interrupt(
        signal.SIGTERM
    ),
    "the time limit": lambda job: job.listen().wait(70),
}


@given(
    asked=st.sampled_from(list(ASKED)),
    steps=STEPS,
    hanging=st.sets(st.integers(0, SIZE - 1)),
    keep_survivors=st.booleans(),
)
def test_a_job_that_is_asked_to_end_has_ended_in_time(asked, steps, hanging, keep_survivors):
    job = Ranks(keep_survivors=keep_survivors, job=100.0, save=30.0).run()
    job.hanging = hanging
    ASKED[asked](job)
    began = job.now
    for moment, rank, fate in sorted(steps):
        job.wait(max(0.0, began + moment - job.now))
        if rank not in job.exited and job.outcome is None:
            job.handle(*FATES[fate](job, rank))
    job.wait(began + LONGEST_S - job.now)
    assert job.outcome is not None, (job.head.phase, job.lines)
