"""srun, for the engine Slurm: inside an allocation, one srun starts an agent for each rank.

srun gets everything on its command line: it would read missing options from SLURM_* variables, which may belong to
another step. No value of a variable stands there, because srun passes on its own environment.

Agents end with status 0 once they have started. So an agent with another status could not be started, and
--kill-on-bad-exit ends the others. Tried with Slurm 22.05: srun ends by itself when all tasks have ended; a SIGTERM to
it ends all tasks at once, by SIGKILL; a SIGKILL to it leaves them running.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.protocol.settings import STDIN_RANK_0
from jaxrun.spec.backends.batch_script import has_option
from jaxrun.spec.backends.remote_plan import count_without_spares, leave_out, plan_remote
from jaxrun.spec.backends.sbatch import check_slurm_args, sbatch_options
from jaxrun.spec.backends.slurm_allocation import Allocation, read_allocation, spread_tasks, without_nodes
from jaxrun.spec.engines.slurm import SLURM
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import AGENT_ARGV, LaunchCommand, Plan
from jaxrun.spec.job.rank_placement import UNPLACED, Placement
from jaxrun.text import UNKNOWN_HOST, plural

# srun reads these as its own options, and no word on its command line can undo them.
_SRUN_INPUT_VARIABLES = (
    "SLURM_BCAST", "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_HOSTFILE", "SLURM_IMMEDIATE", "SLURM_LABELIO",
    "SLURM_NO_KILL", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_SOCKET", "SLURM_OPEN_MODE", "SLURM_REMOTE_CWD", "SLURM_STDERRMODE", "SLURM_STDOUTMODE",
    "SLURM_TIMELIMIT", "SLURM_UNBUFFEREDIO", "SLURM_WORKING_DIR",
)  # fmt: skip
_STEP_BINDING_VARIABLES = (
    "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE", "SLURM_MEM_BIND"
)  # fmt: skip
_GPU_REQUEST_VARIABLES = ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK")
_GPU_VARIABLES = (*_GPU_REQUEST_VARIABLES, "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
_HOST_CHOICE_OPTIONS = (
    "--nodelist", "-w", "--exclude", "-x", "--nodefile", "-F", "--relative", "-r", "--distribution", "-m"
)  # fmt: skip
_OVERCOMMIT_OPTIONS = ("--overcommit", "-O")


class _Shape(Struct, frozen=True):
    """The number of processes on each used node, from the first node on, and the CPUs of each process."""

    counts: tuple[int, ...]
    cpus: int

    @property
    def processes(self) -> int:
        return sum(self.counts)


def plan(job: Job, environ: Mapping[str, str], job_id: str, placed: Placement = UNPLACED) -> Plan:
    """Plan one srun in the allocation of `environ`. Raises UsageError without one, saying what to type instead."""
    srun = shutil.which("srun", path=environ.get("PATH"))
    if srun is None:
        raise UnavailableError(
            f"--backend slurm needs srun, which is not on PATH ({environ.get('PATH', 'not set')}). On a machine of a "
            "cluster it may come with: module load slurm. Without Slurm, leave --backend out, or take --backend mpirun"
        )
    allocation = read_allocation(environ)
    if allocation is None:
        raise UsageError(_no_allocation_message(job))
    check_slurm_args(job.slurm_args)
    room = dict(zip(allocation.nodes, allocation.cpus, strict=True))
    spares, left_out = placed.spares, dict[str, str]()
    if placed.hosts:
        allocation = _only_nodes(allocation, placed.hosts)
    else:
        job, left_out = leave_out(job, allocation.nodes, placed.left_out)
        allocation = without_nodes(allocation, left_out)
    if job.spares and not placed.hosts:
        used = count_without_spares(job, len(allocation.nodes))
        job, spares = replace(job, hosts=used), allocation.nodes[used : used + job.spares]
    shape = _shape(job, allocation, "SLURM_OVERCOMMIT" in environ or has_option(job.slurm_args, _OVERCOMMIT_OPTIONS))
    hosts = placed.hosts or _hosts(job, allocation, shape)
    waiting = [spare for spare in spares for _ in range(_room_for_waiting(shape, room.get(spare, 1)))]
    survives = job.outlives_hosts or bool(placed.hosts)
    how = _StepShape((*hosts, *waiting), shape, exact=bool(placed.hosts), survives=survives)
    command = LaunchCommand(
        engine=SLURM,
        title=f"srun in Slurm job {allocation.job_id}",
        argv=(
            *(srun, *_srun_options(job, how, environ)),
            *(*job.slurm_args, *AGENT_ARGV),
        ),
        set_env={"SRUN_CPUS_PER_TASK": str(shape.cpus)},
        unset_env=_hidden_variables(job, allocation, environ),
        agent_hosts=(*hosts, *waiting),
        size=len(hosts) + len(waiting),
        survive_host_loss=survives,
    )
    # The launchers of one requeued job share this; it shows that they continue each other's work.
    requeue_id = f"slurm {environ.get('SLURM_CLUSTER_NAME', '')} {allocation.job_id}"
    planned = plan_remote(job, environ, job_id, command, hosts, _notes(job, allocation), spares, left_out)
    return replace(planned, requeue_id=requeue_id) if job.requeue else planned


def _only_nodes(allocation: Allocation, hosts: Sequence[str]) -> Allocation:
    """Return the allocation with only the nodes that have ranks, in the order of the ranks."""
    cpus = dict(zip(allocation.nodes, allocation.cpus, strict=True))
    nodes = tuple(dict.fromkeys(hosts))
    return replace(allocation, nodes=nodes, cpus=tuple(cpus.get(node, 1) for node in nodes))


def _room_for_waiting(shape: _Shape, cpus: int) -> int:
    """Return how many agents wait on a spare node with so many CPUs: as many as any node has, if there is room."""
    return max(1, min(max(shape.counts), cpus // shape.cpus))


def _no_allocation_message(job: Job) -> str:
    asked = " ".join(sbatch_options(job))
    return (
        "--backend slurm starts processes in a Slurm allocation, but this shell is not in one: SLURM_JOB_ID is "
        "not set. Add --submit before the program to submit the job and follow it, or --sbatch job.sh to write a batch "
        f"script; or begin with: salloc {asked}"
    )


def _shape(job: Job, allocation: Allocation, overcommit: bool) -> _Shape:
    hosts = _host_count(job, allocation)
    cpus = allocation.cpus[:hosts]
    processes = job.processes or _default_processes(job, allocation, hosts)
    each = job.cpus_per_process or allocation.cpus_per_task or 0
    if not job.cpus_per_process and (not each or processes > sum(count // each for count in cpus)):
        # Nobody gave a number of CPUs per process: use all. Slurm would bind a process to a single one.
        tasks = spread_tasks(processes, cpus)
        each = max(1, min(count // max(number, 1) for count, number in zip(cpus, tasks, strict=True)))
    room = [count // each for count in cpus]
    counts = spread_tasks(processes, room)
    if not overcommit:
        _check_room(allocation, counts, room, each)
    if job.processes_per_host and set(counts) != {job.processes_per_host}:
        raise UsageError(
            f"--processes-per-host {job.processes_per_host} does not fit Slurm job {allocation.job_id}: with "
            f"{plural(each, 'CPU')} a process, {_node_numbers(allocation, room)} of them can run there"
        )
    return _Shape(counts, each)


def _host_count(job: Job, allocation: Allocation) -> int:
    """Return the number of nodes of the allocation to use. Raises UsageError if there are fewer."""
    per_host, processes, nodes = job.processes_per_host, job.processes, len(allocation.nodes)
    hosts = job.hosts or nodes
    if per_host and processes:
        hosts = processes // per_host
    elif processes:
        hosts = min(hosts, processes)
    if hosts > nodes:
        raise UsageError(
            f"{plural(hosts, 'host')} were requested, but Slurm job {allocation.job_id} has {plural(nodes, 'node')}: "
            f"{_abbreviated(allocation.nodes)}; give a smaller -N, or get more with salloc or sbatch"
        )
    return hosts


def _default_processes(job: Job, allocation: Allocation, hosts: int) -> int:
    """Return the default for -n: the allocation's number of tasks, else one for each GPU, else one for each host."""
    if job.processes_per_host:
        return hosts * job.processes_per_host
    if allocation.tasks is not None:
        each = allocation.cpus_per_task or 1
        return max(hosts, sum(spread_tasks(allocation.tasks, [count // each for count in allocation.cpus])[:hosts]))
    gpus = 0 if job.platform == "cpu" else job.gpus_per_host or allocation.gpus or 0
    return hosts * max(1, gpus // (job.devices_per_process or 1))


def _check_room(allocation: Allocation, counts: Sequence[int], room: Sequence[int], each: int) -> None:
    if 0 in counts or any(count > limit for count, limit in zip(counts, room, strict=True)):
        made_for = f", made for {plural(allocation.tasks, 'task')}" if allocation.tasks else ""
        raise UsageError(
            f"{sum(counts)} processes x {plural(each, 'CPU')} do not fit Slurm job {allocation.job_id}{made_for}: its "
            f"CPUs are {_node_numbers(allocation, allocation.cpus[: len(room)])}. Ask salloc or sbatch for "
            f"-n {sum(counts)} -c {each}, start fewer with -n, or let processes share CPUs: --slurm-args --overcommit"
        )


class _StepShape(Struct, frozen=True):
    """The agents of a step.

    agents:    the host of each: the ranks' hosts, then the hosts of agents that wait
    shape:     of the ranks
    exact:     it is decided which host each rank has
    survives:  the step continues after the loss of a host
    """

    agents: tuple[str, ...]
    shape: _Shape
    exact: bool
    survives: bool


def _srun_options(job: Job, step: _StepShape, environ: Mapping[str, str]) -> list[str]:
    """Return the words that start an agent on each host of the step."""
    agents, shape = step.agents, step.shape
    on_host = Counter(agents)
    counts = tuple(on_host.values()) if UNKNOWN_HOST not in on_host else shape.counts
    alike = len(set(counts)) == 1
    words = [f"--nodes={len(counts)}", f"--ntasks={len(agents)}"]
    if step.exact or not (alike or len(agents) == shape.processes):
        # srun would reorder the nodes of any other distribution, and fill them in another way.
        words += [f"--cpus-per-task={shape.cpus}", "--distribution=arbitrary", f"--nodelist={','.join(agents)}"]
    else:
        if alike:  # srun prints warnings about any other
            words.append(f"--ntasks-per-node={counts[0]}")
        words += [f"--cpus-per-task={shape.cpus}", "--distribution=block"]
        if UNKNOWN_HOST not in on_host:
            # Otherwise srun prefers nodes on which no other step runs, and waits for a node that is down.
            words.append(f"--nodelist={','.join(on_host)}")
    if job.gpus_per_host:
        words.append(f"--gpus-per-node={job.gpus_per_host}")
    if (job.gpus_per_host or any(map(environ.get, _GPU_VARIABLES))) and "SLURM_GPU_BIND" not in environ:
        words.append("--gpu-bind=none")  # a process that cannot see its neighbours' GPUs has no NVLink to them
    # --overlap: share CPUs with other steps of the job. --wait=0: the head decides when to end the others.
    if not has_option(job.slurm_args, ("--exclusive",)):  # srun accepts only one of the two
        words.append("--overlap")
    # Otherwise the loss of a host or an agent, even a waiting one, would end all others.
    words += ["--no-kill", "--kill-on-bad-exit=0"] if step.survives else ["--kill-on-bad-exit=1"]
    return [*words, "--wait=0", f"--input={job.stdin or STDIN_RANK_0}", "--export=ALL"]


def _hidden_variables(job: Job, allocation: Allocation, environ: Mapping[str, str]) -> tuple[str, ...]:
    names = [*_SRUN_INPUT_VARIABLES, *(_GPU_REQUEST_VARIABLES if job.gpus_per_host else ())]
    if allocation.in_step:
        names += _STEP_BINDING_VARIABLES  # set for this process's own step, which has few CPUs
    if re.fullmatch(r"cpu[=:][0-9]+", environ.get("SLURM_TRES_PER_TASK", "")):
        names.append("SLURM_TRES_PER_TASK")  # must not differ from --cpus-per-task
    return tuple(name for name in names if name in environ)


def _hosts(job: Job, allocation: Allocation, shape: _Shape) -> list[str]:
    """Return the host of each rank, UNKNOWN_HOST if the user's options choose the hosts."""
    if has_option(job.slurm_args, _HOST_CHOICE_OPTIONS):
        return [UNKNOWN_HOST] * shape.processes
    return [node for node, count in zip(allocation.nodes, shape.counts, strict=False) for _ in range(count)]


def _notes(job: Job, allocation: Allocation) -> list[str]:
    given = {"--partition": job.partition, "--time": job.time_limit, "--account": job.account}
    ignored = ", ".join(option for option, value in given.items() if value)
    return [f"{ignored} cannot change Slurm job {allocation.job_id}, which is already running"] if ignored else []


def _node_numbers(allocation: Allocation, numbers: Sequence[int]) -> str:
    """Write, for example, `h1 4, h2 4`."""
    return _abbreviated([f"{node} {number}" for node, number in zip(allocation.nodes, numbers, strict=False)])


def _abbreviated(items: Sequence[str]) -> str:
    """Write all `items`, or only the first and the last of many."""
    return ", ".join(items if len(items) <= 6 else [*items[:3], "...", items[-1]])
