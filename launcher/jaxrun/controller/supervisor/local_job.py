"""A job on this machine: the agent is in the launcher's own process, and starts all workers."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_end import HostCheckFailed
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.verdict.restarts import Stop
from jaxrun.controller.supervisor.attempt_head import AttemptHead
from jaxrun.controller.supervisor.attempt_loop import AttemptLoop, make_head
from jaxrun.controller.supervisor.supervision import Supervision
from jaxrun.job_events.events import LauncherSignalled
from jaxrun.node.agent.agent import Agent
from jaxrun.node.agent.process_tree import kill_all
from jaxrun.node.agent.spawn import WorkerSetup, with_own_variables
from jaxrun.node.agent.worker_group import OwnForkServer, WorkerGroup
from jaxrun.node.forkserver.client import ForkServer
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentOrder, HostCheck, RankOrder
from jaxrun.protocol.auth import new_token
from jaxrun.protocol.job_record import JobRecord
from jaxrun.spec.job.plan import Plan

if TYPE_CHECKING:
    from jaxrun.node.agent.gpus import GpuMemory


class LocalJob:
    """Runs the attempts of a job whose workers are all on this machine."""

    listen_addresses = ""  # there is nothing to listen for

    def __init__(self, shared: Supervision, fork_server: ForkServer | None) -> None:
        """`fork_server` is the process that imports jax for all workers, if there is one."""
        self._shared = shared
        self._fork_server = OwnForkServer(fork_server)
        self._forks = fork_server is not None
        self._gpu_memory: GpuMemory | None = None

    def run_attempt(self, plan: Plan, record: JobRecord) -> JobOutcome:
        """Run the workers to their end; nothing that they started is left, and all their output is delivered.

        record:  what is known of the job as the attempt begins
        """
        shared = self._shared
        if (check := plan.host_check) and (failure := self._check_hosts(check, plan)):
            return failure
        self._wait_for_gpus(plan)
        head = AttemptHead(shared, make_head(plan, shared, record), plan.attempt, preload=plan.job.preload)
        workers = self._prepare_workers(plan)
        agent = Agent(head.loop, workers, shared.output, head.receive, shared.clock)
        agent.start()
        outcome = AttemptLoop(shared, head, LocalLink(agent, head)).run()
        self._forks = self._forks and not workers.declined
        kill_all(keep=(shared.guard.pid, *self._fork_server.pids, *shared.outside.notifier.pids))
        agent.close()
        head.loop.close()
        return outcome

    def next_plan(self, plan: Plan, outcome: JobOutcome) -> Plan | Stop:
        """Return the plan of another attempt, which is the same one."""
        return Stop() if isinstance(outcome.end, HostCheckFailed) else plan

    def stop(self, exit_code: int, headline: str = "", culprits: Collection[int] = ()) -> None:
        """Release everything that was kept for another attempt."""
        self._fork_server.close()

    def _prepare_workers(self, plan: Plan) -> WorkerGroup:
        """Return the workers of an attempt, not yet started, with their fork server, if there is one."""
        directory, guard = self._shared.directory, self._shared.guard
        log_dir = directory.make_attempt_directory(plan.attempt)
        setup = setup_of(plan, self._shared.environ, directory.name, log_dir)
        server = self._fork_server.get(setup) if self._forks else None
        # Workers of an inherited fork server lack the mark in their environment by which the guard finds others.
        unmarked = server is not None and server.inherited
        return WorkerGroup(
            setup,
            server,
            guard.add if unmarked else None,
            keep_server=bool(plan.job.max_restarts),
        )

    def _check_hosts(self, check: HostCheck, plan: Plan) -> JobOutcome | None:
        """Run --host-check for each host that this machine simulates; returns how the job ends if one fails.

        Returns None, too, if a signal or --timeout ends the job first: its head reports that.
        """
        from jaxrun.controller.head.agent_registry import HostCheckError
        from jaxrun.node.agent.host_check import check_host

        hosts, failed = plan.host_of, dict[int, str]()
        env, attempt = plan.base_env(self._shared.environ), plan.attempt
        until = math.inf if plan.job.timeout is None else self._shared.started + plan.job.timeout

        def is_stopped() -> bool:
            return self._shared.serve_and_check() or time.time() >= until

        for rank in (worker.rank for worker in plan.workers if worker.local_rank == 0):
            host = hosts[rank]
            failure = check_host(check, env, is_stopped, host=host, rank=rank, attempt=attempt)
            failed |= {rank: failure} if failure else {}
        if not failed:
            return None
        return JobOutcome(HostCheckFailed(str(HostCheckError(failed, hosts)), failed=failed), hosts)

    def _wait_for_gpus(self, plan: Plan) -> None:
        """Before the first of several attempts, note how much of the GPUs is used; before the others, wait for it."""
        output = self._shared.output
        if not plan.job.max_restarts or not plan.device_names:
            return
        if self._gpu_memory is None:
            from jaxrun.node.agent.gpus import GpuMemory

            self._gpu_memory = GpuMemory({**self._shared.environ, **plan.job.env})
            return
        self._gpu_memory.wait_until_free(
            lambda text: output.print_line(f"jaxrun: {text}"), self._shared.serve_and_check
        )


def setup_of(plan: Plan, environ: Mapping[str, str], run_dir: str = "", flight_dir: Path | None = None) -> WorkerSetup:
    """Return how to start the workers of a plan; `environ` is the launcher's own."""
    token = new_token()
    told = tuple(replace(plan.worker_env(worker, run_dir=run_dir), rank_token=token) for worker in plan.workers)
    shared = with_own_variables(plan.base_env(environ))
    return WorkerSetup(plan.argv, shared, told, flight_dir, plan.job.wrap, plan.job.preload)


class LocalLink:
    """AgentLink to the agent in this process."""

    def __init__(self, agent: Agent, head: AttemptHead) -> None:
        self._agent = agent
        self._head = head

    def send(self, ranks: tuple[int, ...], order: RankOrder) -> None:
        self._agent.execute(ranks, order)

    def send_to_agents(self, agents: tuple[AgentId, ...], order: AgentOrder) -> None:
        raise AssertionError("the plan and the clock of this machine are known: the head orders nothing of its agent")

    def look_for_hosts(self, agents: tuple[AgentId, ...]) -> None:
        """The job has no other."""

    def on_signal(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            self._agent.on_child_exit()
        else:
            self._head.handle(LauncherSignalled(signum))
