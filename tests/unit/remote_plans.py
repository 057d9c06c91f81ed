"""Plans of jobs on other hosts, and what follows an attempt of theirs."""

from msgspec.structs import replace
from simulation import JOB_ID, seated

from jaxrun.controller.supervisor.next_attempt_hosts import plan_next_attempt
from jaxrun.protocol.probe_messages import Machine
from jaxrun.spec.backends.remote_plan import plan_remote
from jaxrun.spec.engines import by_hand
from jaxrun.spec.engines.open_mpi import OPEN_MPI
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import LaunchCommand

WAIT, INIT = 300.0, 60.0
CLOSED = "the connection to its agent was closed"


def hand_plan(each=1, **wanted):
    """One command on each of three hosts."""
    options = {"max_restarts": 1, "wait_hosts": WAIT, "init_timeout": INIT, **wanted}
    job = Job(
        program=("train.py",), backend="hosts", platform="cpu", hosts=3, host_rank=0, head="h1:7",
        processes_per_host=each, **options,
    )  # fmt: skip
    return by_hand.plan(job, {}, JOB_ID, Machine("h1", (0, 1), {}, False, False))


def mpirun_plan(hosts=("h1", "h1", "h2", "h2"), *, spares=(), **wanted):
    """Agents of mpirun, one for each rank and one on each spare host, which outlive the loss of a host."""
    options = {"max_restarts": 1, "wait_hosts": WAIT, "init_timeout": INIT, "spares": len(spares), **wanted}
    job = Job(program=("train.py",), backend="mpirun", platform="cpu", processes=len(hosts), **options)
    argv, all_hosts = ("mpirun", "python", "-m", "jaxrun.node.agent"), (*hosts, *spares)
    command = LaunchCommand(OPEN_MPI, "mpirun", argv, agent_hosts=all_hosts, size=len(hosts), survive_host_loss=True)
    return plan_remote(job, {}, JOB_ID, command, hosts, (), spares)


def with_placement(plan, **changes):
    """The same plan with another placement: `awaited` has agents that are waited for, and their hosts."""
    return replace(plan, placement=replace(plan.placement, **changes))


def follow(plan, outcome, there, *, reported=(), found=(), environ=None):
    """The plan of the attempt after one that has left these agents, or why there is none."""
    return plan_next_attempt(plan, seated(plan, there, reported=reported), outcome, found, environ or {})
