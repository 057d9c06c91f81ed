"""The supervisor finds out why agents end: of many losses the cause is passed on first."""

import pytest
from msgspec.structs import replace
from simulation import Clock, seated

from jaxrun.controller.supervisor.losses import LaunchEnd, LossWatch, explain_losses
from jaxrun.job_events.events import AgentLost
from jaxrun.protocol.agent_messages import AgentSignalled, StartFailed, WorkerExited
from jaxrun.spec.backends.remote_plan import plan_remote
from jaxrun.spec.engines.mpich import MPICH
from jaxrun.spec.engines.open_mpi import OPEN_MPI
from jaxrun.spec.engines.slurm import SLURM
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import LaunchCommand

ENDED = StartFailed("mpirun ended with status 1 before the job was over")
NOT_STARTED = StartFailed("srun could not start all agents")
CLOSED = "the connection to its agent was closed"
SILENT = "nothing was heard from its host for 2 s"


def roster_of(size, *, silent=(), failed=(), unreported=()):
    """The roster of a job of so many ranks, an agent each: all have reported but some, and some are lost or fail."""
    job = Job(program=("train.py",), backend="slurm", platform="cpu", processes=size)
    plan = plan_remote(job, {}, "ab" * 16, LaunchCommand(SLURM, "srun", ()), ["h1"] * size)
    there = set(range(size)) - {*unreported}
    roster = seated(plan, there, reported=there)
    for agent in silent:
        roster.lose(agent, SILENT, is_silent=True)
    for rank in failed:
        roster.add_failure(rank)
    return roster


class Launch:
    """A LaunchProcess of one rank that has ended with this status, or runs."""

    failed, was_killed = True, False

    def __init__(self, status, *, agents_stay, engine, output="", failed_agents=()):
        self.status = status
        self.failed_agents = lambda: {*failed_agents}
        self.output = output
        self.command = LaunchCommand(engine, "mpirun", (), survive_host_loss=agents_stay)

    def last_lines(self):
        return self.output

    def describe_end(self):
        return f"mpirun ended with status {self.status}"

    def describe_failure(self, hosts, reported):
        return ENDED.text

    def describe_failed_start(self):
        return NOT_STARTED.text


class Hosts:
    """The hosts of all agents; `asked` has the times at which they were asked, `answers` whether they do."""

    answers = True

    def __init__(self, clock):
        self._clock = clock
        self.asked = []

    def ask(self):
        self.asked.append(self._clock.now)

    def unanswered(self):
        return [] if self.answers else [0]


class Losses:
    """A LossWatch of a job of four ranks; `told` are the events that reach its head."""

    def __init__(
        self, launch_status=None, *, agents_stay=False, engine=OPEN_MPI, output="", stderr="", unreported=(), failed=()
    ):
        self.clock = Clock()
        self.launch = Launch(launch_status, agents_stay=agents_stay, engine=engine, output=output, failed_agents=failed)
        self.hosts = Hosts(self.clock)
        self.roster = roster_of(4, unreported=unreported)
        self.watch = LossWatch(
            self.launch, self.roster, self.hosts, self.clock, attached=False, read_stderr=lambda rank: stderr
        )
        self.told = []

    def hold(self, *events, ask):
        for event in events:
            if isinstance(event, AgentLost):
                self.roster.lose(event.agent, event.reason, is_silent=event.reason == SILENT)
        self.watch.hold(*events, ask=ask)

    def tell(self):
        self.told += self.watch.explain({0: "h1"})


@pytest.fixture
def losses():
    return Losses()


def test_a_lost_agent_is_passed_on_after_a_moment(losses):
    losses.hold(AgentLost(3, CLOSED), ask=False)
    assert 100.0 < losses.watch.deadline < 100.1
    losses.tell()
    losses.tell()
    assert losses.told == [AgentLost(3, CLOSED)] and losses.watch.deadline is None
    losses = Losses(unreported={3})
    losses.hold(AgentLost(3, CLOSED), ask=False)
    assert losses.watch.deadline == 100.5


def test_a_launch_command_that_ends_one_agent_after_the_other_is_given_the_time_to_end(losses):
    for lost in LOST[:2]:
        losses.hold(lost, ask=False)
    assert losses.watch.deadline == 100.5
    losses.launch.status = 9
    losses.hold(ask=True)
    losses.tell()
    assert losses.told == [LOST[0], AgentLost(1, CLOSED, ended_by_launch_command=True)]


def test_hosts_are_asked_once_whether_they_are_alive_and_given_the_time_to_answer(losses):
    for losses.clock.now in (100.0, 100.2):
        losses.hold(AgentSignalled(0, 15), ask=True)
    assert losses.hosts.asked == [100.0] and losses.watch.deadline == 101.0
    assert losses.watch.unanswered() == []
    losses.hosts.answers = False
    assert losses.watch.unanswered() == [0]
    losses.clock.now = 101.0
    losses.watch.wait_for_hosts()
    assert 101.0 < losses.watch.deadline < 101.1 and not losses.told
    assert losses.watch.hold_if_asking(WorkerExited(0, 1))
    losses.hold(AgentLost(0, SILENT), ask=False)  # now it is lost
    losses.tell()
    assert losses.told == [AgentLost(0, SILENT), *[AgentSignalled(0, 15)] * 2, WorkerExited(0, 1)]
    assert losses.watch.unanswered() == [] and not losses.watch.hold_if_asking(WorkerExited(0, 1))


def test_no_host_is_waited_for_once_the_head_ends_the_job(losses):
    losses.hosts.answers = False
    losses.hold(AgentSignalled(0, 15), ask=True)
    losses.watch.stop_asking()
    assert losses.watch.deadline == 100.0 and losses.watch.unanswered() == []
    losses.tell()
    losses.hold(AgentSignalled(0, 15), ask=True)
    assert losses.watch.deadline < 100.1 and not losses.watch.hold_if_asking(WorkerExited(0, 1))
    assert losses.told == [AgentSignalled(0, 15)] and losses.hosts.asked == [100.0]


def test_the_end_of_a_launch_command_is_the_end_of_a_job_whose_agents_do_not_stay(losses):
    losses.launch.status = 1
    losses.hold(ask=True)
    losses.tell()
    assert losses.told == [ENDED]


@pytest.mark.parametrize("failed", [{3}, {0}, set()], ids=["by a bad host", "by another that had come", "by a person"])
def test_a_signal_to_the_others_is_the_launch_commands_that_could_not_start_one(failed):
    losses = Losses(engine=SLURM, unreported={3}, failed=failed)
    losses.hold(AgentSignalled(0, 15), ask=True)
    losses.tell()
    assert losses.told == [*[NOT_STARTED] * (3 in failed), AgentSignalled(0, 15)]


@pytest.mark.parametrize("ended_before", [True, False], ids=["in an earlier attempt", "in this one"])
def test_a_launch_command_that_agents_outlive_is_not_the_cause_of_later_losses(ended_before):
    losses = Losses(1 if ended_before else None, agents_stay=True)
    if not ended_before:
        losses.launch.status = 1
        losses.hold(ask=True)
        losses.tell()
    losses.hold(*LOST[:2], ask=False)
    losses.tell()
    assert losses.told == LOST[:2]


def test_agents_that_are_lost_with_the_launch_command_went_with_it():
    losses = Losses(agents_stay=True)
    losses.launch.status = 1
    losses.hold(*LOST[:2], ask=True)
    losses.tell()
    assert losses.told == [LOST[0], AgentLost(1, CLOSED, ended_by_launch_command=True)]


ABORT = "step 7\nAbort(773) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 773) - process 1"


@pytest.mark.parametrize(
    ("engine", "output", "stderr", "told"),
    [
        (MPICH, "", ABORT, WorkerExited(0, 5, stderr_tail=ABORT)),  # 773 & 255
        (MPICH, "", "step 7\n", "MPI_Abort(5) or an error of MPI"),
        (MPICH, "", ABORT.replace("773", "6"), "MPI_Abort(5) or an error of MPI"),  # of something else
        (MPICH, "BAD TERMINATION", "", AgentLost(0, CLOSED)),
        (OPEN_MPI, "", ABORT, AgentLost(0, CLOSED)),  # its agents report by themselves
    ],
)
def test_a_rank_that_called_mpi_abort_is_the_cause_where_the_engine_kills_all_agents(engine, output, stderr, told):
    losses = Losses(engine=engine, output=output, stderr=stderr)
    losses.launch.status = 5
    losses.hold(AgentLost(0, CLOSED), ask=False)
    losses.tell()
    first = losses.told[0]
    assert told in first.text if isinstance(told, str) else first == told
    assert losses.told[1:] == (
        [] if first == AgentLost(0, CLOSED) else [replace(LOST[0], ended_by_launch_command=True)]
    )


LOST = [AgentLost(rank, CLOSED) for rank in range(4)]
TERM = [AgentSignalled(rank, 15) for rank in range(2)]
FAILED = LaunchEnd(ENDED, failed=True)
# What was held, what is known of the agents, how the launch command ended, and what is passed on, the cause first.
CAUSES = {
    "hosts that are silent": (
        [TERM[0], AgentLost(4, SILENT), LOST[1], AgentLost(5, SILENT)],
        {"silent": {4, 5, 6}},
        LaunchEnd(ENDED),
        [*(AgentLost(rank, SILENT) for rank in (4, 5)), TERM[0], LOST[1]],
    ),
    "a launch command that was killed": ([LOST[2]], {}, LaunchEnd(ENDED), [ENDED, LOST[2]]),
    "the first agent that was lost, of a launch command that fails": (
        [WorkerExited(0, 1), LOST[3], LOST[2]],
        {},
        FAILED,
        [LOST[3], WorkerExited(0, 1), AgentLost(2, CLOSED, ended_by_launch_command=True)],
    ),
    "an agent that was not signalled, and whose worker had not failed": (
        [TERM[1], LOST[1], LOST[0], LOST[2]],
        {"failed": {0}},
        FAILED,
        [LOST[2], TERM[1], *(AgentLost(rank, CLOSED, ended_by_launch_command=True) for rank in (1, 0))],
    ),
    "a rank that called MPI_Abort, also if JAX ended it while MPI did": (
        [LOST[2], WorkerExited(1, -6), WorkerExited(3, -6)],
        {},
        replace(FAILED, mpi_abort=WorkerExited(1, 5)),
        [WorkerExited(1, 5), AgentLost(2, CLOSED, ended_by_launch_command=True), WorkerExited(3, -6)],
    ),
    "a launch command that could not start all agents": (
        [LOST[0]],
        {"unreported": {0}},
        FAILED,
        [ENDED, LOST[0]],
    ),
    "a scheduler that signals all": (TERM, {}, LaunchEnd(ENDED), TERM),
    "a launch command that was killed, whose daemons signal all": (
        TERM,
        {},
        LaunchEnd(ENDED, was_killed=True),
        [ENDED, *TERM],
    ),
}


@pytest.mark.parametrize(("held", "known", "end", "explained"), CAUSES.values(), ids=CAUSES)
def test_the_cause_of_losses_is_passed_on_first(held, known, end, explained):
    assert explain_losses(held, roster_of(7, **known), end) == explained
