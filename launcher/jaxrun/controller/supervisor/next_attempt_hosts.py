"""Decides where the next attempt runs: without the hosts that were lost, and with those that are back. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxrun.analysis.diagnosis.job_outcome import EndReason, JobOutcome
from jaxrun.analysis.diagnosis.root_cause import find_culprits
from jaxrun.analysis.verdict.restarts import Stop
from jaxrun.errors import JaxrunError
from jaxrun.protocol.agent_id import AgentId
from jaxrun.spec.backends.manual import replan_manual
from jaxrun.spec.backends.planning import replan
from jaxrun.spec.backends.remote_plan import (
    assign_agents,
    describe_size,
    replace_hosts,
    starting_agents,
    take_back,
)
from jaxrun.spec.job.plan import Plan


@dataclass(frozen=True, slots=True)
class AgentsLeft:
    """The remaining agents of an attempt.

    usable:       the agents that another attempt can use; empty if a launch command has ended that they do not
                  outlive
    hosts:        hosts of the usable agents; None if agents cannot survive the loss of another host
    reported:     the ranks whose agents have reported
    lost_spares:  the spare hosts that were lost while they waited
    found:        hosts that the attempt lacked, and that were there
    """

    usable: Collection[AgentId] = ()
    hosts: Mapping[AgentId, str] | None = None
    reported: Collection[int] = ()
    lost_spares: Collection[str] = ()
    found: tuple[str, ...] = ()

    def serve(self, plan: Plan) -> bool:
        """Whether all agents exist that the ranks of this plan need, except those that the plan waits for."""
        return all(agent in self.usable or agent in plan.awaited for agent, ranks in plan.agents.items() if ranks)


def plan_next_attempt(plan: Plan, outcome: JobOutcome, left: AgentsLeft, environ: Mapping[str, str]) -> Plan | Stop:
    """Return the plan of another attempt, or why there can be none."""
    if (waiting := _plan_to_wait(plan, outcome, left)) is not None:
        return waiting
    plan = replace(plan, awaited={})
    if plan.is_started_by_hand:
        return _plan_by_hand(plan, outcome, left)
    hosts, lost = left.hosts or {}, _lost_hosts(plan, outcome, left)
    placement, ready = tuple(worker.host for worker in plan.workers), set(hosts.values())
    there = [host for host in plan.spare_hosts if host not in left.lost_spares]
    spares = tuple(sorted(there, key=lambda host: host not in ready))
    choice = replace_hosts(placement, spares, lost, plan.job.min_hosts, plan.whole)
    choice = take_back(choice, [host for host in left.found if host not in lost])
    if failed := {plan.host_of[rank] for rank in outcome.failed_checks} - {*choice.left_out}:
        why = f"no spare host is left for {', '.join(sorted(failed))}"
        return Stop(why if plan.job.spares or plan.job.min_hosts else "")
    same_hosts = choice.placement == placement and spares == plan.spare_hosts
    if same_hosts and (left.serve(plan) or fits_launch_command(plan)):
        return plan
    try:
        made = replan(plan, choice.placement, choice.spares, environ)
    except JaxrunError as error:
        if outcome.reason is EndReason.GROWN and left.found:  # no reason to end the job
            return plan_next_attempt(plan, outcome, replace(left, found=()), environ)
        return Stop(f"the job cannot be placed on other hosts: {error}")
    share = plan.launch_command is not None and plan.launch_command.agents_stay  # because a spare host has only one
    agents = assign_agents(choice.placement, hosts, choice.spares, share=share)
    if agents is not None:
        made = replace(made, launch_command=plan.launch_command, agents=agents)
    return replace(
        made,
        left_out=tuple(host for host in (*plan.left_out, *choice.left_out) if host not in choice.placement),
        host_notes=(*plan.host_notes, *choice.notes),
        whole=choice.whole,
    )


def _plan_to_wait(plan: Plan, outcome: JobOutcome, left: AgentsLeft) -> Plan | None:
    """The plan of an attempt on the same hosts that waits for those that were lost (--wait-hosts).

    None if there is no host to wait for, if the wait for one was in vain, or if the other agents are gone as well.
    """
    gone = [agent for agent, ranks in plan.agents.items() if ranks and agent not in left.usable]
    if not plan.job.host_wait or not gone or outcome.not_back or outcome.failed_checks:
        return None
    if plan.is_started_by_hand:
        if AgentId(0) in gone:
            return None
        known = plan.host_of | {worker.rank: worker.host for worker in outcome.workers}
        names = {agent: known[plan.agents[agent][0]] for agent in gone}
        return replace(plan, awaited=names | {agent: host for agent, host in plan.awaited.items() if agent in names})
    if not left.hosts or outcome.uses_mpi:
        return None
    return _await_host_agents(plan, left.hosts, gone)


def _await_host_agents(plan: Plan, there: Mapping[AgentId, str], gone: Sequence[AgentId]) -> Plan | None:
    """Do the same for agents that an engine starts: one agent of a lost host gets all of its ranks."""
    first: dict[str, AgentId] = {}
    for agent in gone:
        first.setdefault(plan.host_of[plan.agents[agent][0]], agent)
    lost = {agent: host for host, agent in first.items()}
    placement = [worker.host for worker in plan.workers]
    agents = assign_agents(placement, {**there, **lost}, plan.spare_hosts, share=True)
    return replace(plan, agents=agents, awaited=lost) if agents is not None else None


def _plan_by_hand(plan: Plan, outcome: JobOutcome, left: AgentsLeft) -> Plan | Stop:
    """Return the plan of another attempt with the existing agents: all that it had, or with --min-hosts fewer."""
    may_shrink = plan.job.min_hosts is not None and 0 in left.usable
    failed = {agent for agent, ranks in plan.agents.items() if outcome.failed_checks.keys() & set(ranks)}
    made = replan_manual(plan, set(left.usable) - failed) if may_shrink else plan
    if made is None or not left.serve(made) or (failed and made is plan):
        return Stop("" if failed else "agents are gone that jaxrun did not start")
    if made.agents == plan.agents:
        return plan
    lost = [host for host in plan.hosts if host not in made.hosts]
    back = [host for host in made.hosts if host not in plan.hosts]
    news = [*(f"{host} is left out" for host in lost), *(f"{host} is taken back" for host in back)]
    again = "; the same command, typed there again, takes it back" if lost else ""
    note = f"{', '.join(news)}: {describe_size([worker.host for worker in made.workers])}{again}"
    left_out = tuple(host for host in (*plan.left_out, *lost) if host not in back)
    return replace(made, left_out=left_out, host_notes=(*plan.host_notes, note))


def plan_new_agents(plan: Plan, environ: Mapping[str, str]) -> Plan:
    """Return the plan for agents that a launch command starts anew: each gets the ranks that this command gives it."""
    if fits_launch_command(plan):
        return plan
    return replan(plan, [worker.host for worker in plan.workers], plan.spare_hosts, environ)


def fits_launch_command(plan: Plan) -> bool:
    """Whether the agents have the ranks with which the launch command of the plan starts them."""
    command = plan.launch_command
    started = command is not None and dict(plan.agents) == starting_agents(command, len(plan.workers))
    return plan.is_started_by_hand or started


def _lost_hosts(plan: Plan, outcome: JobOutcome, left: AgentsLeft) -> set[str]:
    """The hosts that cannot be used: lost by silence or otherwise, or without an agent that has reported."""
    culprits = find_culprits(outcome.workers) if outcome.workers else []
    lost = {worker.rank for worker in culprits if worker.lost_reason}
    lost.update(outcome.unanswered, outcome.failed_checks, outcome.lost_early)
    if outcome.reason is EndReason.UNAVAILABLE and left.reported:
        lost.update(rank for rank in plan.host_of if rank not in left.reported)
    return {host for rank, host in plan.host_of.items() if rank in lost}
