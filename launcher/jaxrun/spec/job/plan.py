"""The plan: everything to start for a job, as a frozen value that a backend makes from a Job.

A Plan has everything that is known before the first process starts; a worker's descriptors are added when it is
spawned.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import asdict

from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentReport, HostCheck
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.protocol.names import JOB_ID
from jaxrun.protocol.worker_command import program_of
from jaxrun.spec.engines.engine import Engine
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.rank_placement import UNPLACED, Placement


class Worker(Struct, frozen=True):
    """One process: its rank and host, and the devices and cores that it uses.

    local_device_ids:  ordinals among the accelerators that its host shows; empty for all of them
    cpus:              the cores that it stays on; empty for all of them
    """

    rank: int
    local_rank: int
    local_size: int
    host: str
    local_device_ids: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    simulated_boot_id: str = ""


AGENT_ARGV = (sys.executable, "-m", "jaxrun.node.agent")  # a LaunchCommand runs this once for each rank


class LaunchCommand(HidesFields, frozen=True):
    """The mpirun or srun that starts the agents on their hosts; jaxrun relies on it for nothing else.

    engine:            the product that starts the agents, or has started them
    title:             its name for people: "Open MPI 5.0.11"
    argv:              the whole command, with AGENT_ARGV at its end; no variable's value, which other users could read
    set_env:           variables for the command itself, besides those for the workers
    unset_env:         names that the command must not see
    attached:          whether the engine has started all processes already, and `argv` starts only rank 0's agent
    agent_hosts:       the host of each agent: first the agents with ranks, then those that wait on spare hosts;
                       empty if a person or another program starts each agent
    size:              how many of agent_hosts this command starts; the others are started by one command each
    survive_host_loss: whether the agents survive when the host of another agent is lost
    agents:            each agent's ranks at its start, none for an agent that waits; empty if each agent has one
    """

    hidden = frozenset({"set_env"})

    engine: Engine
    title: str
    argv: tuple[str, ...]
    set_env: Mapping[str, str] = field(default_factory=dict)
    unset_env: tuple[str, ...] = ()
    attached: bool = False
    agent_hosts: tuple[str, ...] = ()
    size: int = 0
    survive_host_loss: bool = False
    agents: Mapping[AgentId, tuple[int, ...]] = field(default_factory=dict)

    @property
    def passes_stdin(self) -> bool:
        """Whether standard input reaches any rank, or all, as --stdin says; else only rank 0."""
        return self.engine.passes_stdin and not self.attached

    @property
    def sigterm_at_start(self) -> bool:
        """Whether it handles a SIGTERM safely while it starts the agents; else it gets SIGKILL then."""
        return self.engine.sigterm_at_start or self.attached

    @property
    def agents_stay(self) -> bool:
        """Whether agents outlive the command itself."""
        return self.engine.agents_stay and self.survive_host_loss


class Plan(HidesFields, frozen=True):
    """Everything that is decided before anything starts.

    job:            the request, with its processes and platform decided
    job_id:         32 hex digits
    workers:        by rank
    argv:           the command of every worker
    set_env:        variables to set in all workers, besides each one's own
    unset_env:      names that must not reach a worker
    local_devices:  devices that every process must show; None if only JAX can tell
    device_names:   names of the host's accelerators, by ordinal; empty on CPU
    fork:           start the workers by forking one process that has imported jax
    notes:          remarks on these decisions for the user
    launch_command: the command that starts the agents; None if the launcher starts the workers
    attempt:        the number of this attempt, from 1
    restart_reason: why the attempt before it ended, in one line
    ends_at:        with --save-time, when Slurm ends the job, in seconds since the epoch; None if it does not
    placement:      which hosts and agents have which ranks
    requeue_id:     what the launchers of one requeued job share; empty if it is not requeued
    reports:        what the agents report that are in the launcher's own process; empty if each has its own
    """

    hidden = frozenset({"set_env"})

    job: Job
    job_id: str
    workers: tuple[Worker, ...]
    argv: tuple[str, ...]
    set_env: Mapping[str, str]
    unset_env: tuple[str, ...]
    local_devices: int | None
    device_names: tuple[str, ...]
    fork: bool
    notes: tuple[str, ...] = ()
    launch_command: LaunchCommand | None = None
    attempt: int = 1
    restart_reason: str = ""
    ends_at: float | None = None
    placement: Placement = UNPLACED
    requeue_id: str = ""
    reports: Mapping[AgentId, AgentReport] = field(default_factory=dict)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Each host once, in the order of first ranks."""
        return tuple(dict.fromkeys(worker.host for worker in self.workers))

    @property
    def host_of(self) -> dict[int, str]:
        """The host of each rank."""
        return {worker.rank: worker.host for worker in self.workers}

    @property
    def program_argv(self) -> tuple[str, ...]:
        """The words of every worker's command after the runtime."""
        return program_of(self.argv)

    @property
    def is_started_by_hand(self) -> bool:
        """Whether jaxrun starts only some of the agents."""
        attached = self.launch_command is not None and self.launch_command.attached
        return self.job.host_rank is not None or attached

    @property
    def head_may_return(self) -> bool:
        """Whether agents wait for the command of host 0, which has the head, to be started again (--wait-hosts)."""
        command = self.launch_command
        if not self.job.host_wait or command is None or not self.is_started_by_hand:
            return False
        return self.job.host_rank is not None or command.engine.starts_ranks_again

    @property
    def host_check(self) -> HostCheck | None:
        """The --host-check to run on each host; None if there is none."""
        job = self.job
        return HostCheck(job.host_check, job.init_timeout, {**job.env, JOB_ID: self.job_id}) if job.host_check else None

    def base_env(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment that all workers share, from the launcher's own `environ` and the job's id."""
        kept = {name: value for name, value in environ.items() if name not in self.unset_env}
        return {**kept, **self.set_env, JOB_ID: self.job_id}

    def worker_env(self, worker: Worker, *, run_dir: str) -> WorkerEnv:
        """Return the protocol's variables for `worker`; its descriptors are not known yet."""
        return WorkerEnv(
            job_id=self.job_id,
            rank=worker.rank,
            size=len(self.workers),
            local_rank=worker.local_rank,
            local_size=worker.local_size,
            host=worker.host,
            run_dir=run_dir,
            simulated_boot_id=worker.simulated_boot_id,
            local_device_ids=worker.local_device_ids,
            cpus=worker.cpus,
            attempt=self.attempt,
            restart_reason=self.restart_reason,
            **asdict(self.job.worker_settings),
        )
