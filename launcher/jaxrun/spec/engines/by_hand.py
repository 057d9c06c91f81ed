"""Jobs whose agents are started one by one: by a command on each host, or as the processes of `jaxrun attach`.

Hosts with neither MPI nor Slurm each run `jaxrun --hosts 2 --host-rank 1 --head h1:7777 …`, and each command starts
the agent of its host's ranks. Host 0 has the first ranks, host 1 the next ones, and so on; all hosts have equally
many. supervisor/attach.py describes how the agents meet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from jaxrun.errors import UsageError
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.auth import job_fingerprint
from jaxrun.protocol.names import POD_MARKER, TOKEN
from jaxrun.protocol.probe_messages import Machine
from jaxrun.spec.backends.remote_plan import make_workers, plan_remote
from jaxrun.spec.engines.engine import PMI_1, Engine
from jaxrun.spec.job.devices import probe_machine
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.layout import decide_layout, wanted_platforms
from jaxrun.spec.job.plan import AGENT_ARGV, LaunchCommand, Plan
from jaxrun.text import UNKNOWN_HOST

BY_HAND = Engine(
    key="by hand",
    title="processes started by hand",
    abort=PMI_1,  # --rank also serves where an mpirun has started the processes, and its variables are hidden
    starts_ranks_again=True,
)


def plan(job: Job, environ: Mapping[str, str], job_id: str, machine: Machine | None = None) -> Plan:
    """Plan the whole job, and the command that starts the agent of this host.

    Raises UsageError if the processes cannot be divided equally among the hosts, or if this host lacks what they need.
    """
    assert job.hosts is not None and job.host_rank is not None
    each = _processes_of_each_host(job, environ, machine)
    ranks = range(job.host_rank * each, (job.host_rank + 1) * each)
    size = each * job.hosts
    command = LaunchCommand(
        engine=BY_HAND,
        title="the agent of this host",
        argv=(*AGENT_ARGV, f"{ranks[0]}-{ranks[-1]}", str(size)),
        agents={AgentId(first): tuple(range(first, first + each)) for first in range(0, size, each)},
    )
    hosts = [f"--host-rank {number}" for number in range(job.hosts) for _ in range(each)]  # until they have reported
    return replace(plan_remote(job, environ, job_id, command, hosts), requeue_id=_lasting_id(job, environ))


def _lasting_id(job: Job, environ: Mapping[str, str]) -> str:
    """What pods that take the place of others know of their job: its token is in a Secret. Empty outside of pods."""
    token = environ.get(TOKEN, "")
    is_kept = job.run_dir is not None and POD_MARKER in environ  # --run-dir may be in a volume that outlives the pods
    return f"token {job_fingerprint(token)}" if is_kept and token else ""


def replan_manual(plan: Plan, there: Collection[AgentId]) -> Plan | None:
    """Return the plan of the same job on the hosts of the agents `there`; None if they are too few."""
    before = plan.placement
    each = len(before.whole) // len(before.agents)
    agents = [agent for agent in sorted(before.agents) if agent in there]
    count = len(agents)
    if 0 not in agents or count < (plan.job.min_hosts or len(before.agents)):
        return None
    ranks = {agent: tuple(range(index * each, (index + 1) * each)) for index, agent in enumerate(agents)}
    hosts = tuple(before.whole[agent] for agent in agents for _ in range(each))
    return replace(
        plan,
        job=replace(plan.job, hosts=count, processes=count * each),
        workers=make_workers(hosts),
        placement=replace(before, hosts=hosts, agents={agent: ranks.get(agent, ()) for agent in before.agents}),
    )


def _processes_of_each_host(job: Job, environ: Mapping[str, str], machine: Machine | None = None) -> int:
    """Return the number of processes per host: as requested, else one per GPU of this host. Raises UsageError."""
    hosts, total, each = job.hosts or 1, job.processes, job.processes_per_host
    if total is not None and total % hosts:
        raise UsageError(
            f"-n {total} processes cannot be divided equally among --hosts {hosts}; "
            f"give a multiple of {hosts}, such as -n {(total // hosts + 1) * hosts}"
        )
    if total is not None:
        each = total // hosts
    given = {**environ, **job.env}
    here = replace(job, processes=each, hosts=1, host_rank=0, processes_per_host=None, min_hosts=None, grow=None)
    machine = machine or probe_machine(wanted_platforms(job, given), given)
    return decide_layout(here, machine, given).processes


def plan_attached(job: Job, engine: Engine, size: int, environ: Mapping[str, str], job_id: str) -> Plan:
    """Plan `jaxrun attach` on rank 0 of `size`: all processes exist already, and rank 0 starts its own agent as all do.

    The hosts of the ranks become known when their agents report.
    """
    command = LaunchCommand(engine, "the agent of rank 0", (*AGENT_ARGV, "0", str(size)), attached=True)
    return plan_remote(job, environ, job_id, command, [UNKNOWN_HOST] * size)
