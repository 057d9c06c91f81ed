"""Decides where the next attempt runs: without the hosts that were lost, and with those that are back. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_outcome import EndReason, JobOutcome
from jaxrun.analysis.diagnosis.root_cause import find_culprits
from jaxrun.analysis.verdict.restarts import Stop
from jaxrun.controller.roster import Roster
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


def usable_agents(plan: Plan, outcome: JobOutcome, roster: Roster) -> set[AgentId]:
    """Return the agents that another attempt can use; none once a launch command has ended that they do not outlive."""
    stay = plan.launch_command is not None and plan.launch_command.agents_stay and not outcome.uses_mpi
    return roster.usable(outcome.unanswered) if roster.has_launch or stay else set()


class Following(Struct, frozen=True):
    """The next attempt.

    awaited:  the agents that it waits for (--wait-hosts), and the hosts on which they were lost
    """

    plan: Plan
    awaited: Mapping[AgentId, str] = field(default_factory=dict)

    def is_served(self, usable: Collection[AgentId]) -> bool:
        """Whether all agents exist that its ranks need, except those that are waited for."""
        needed = (agent for agent, ranks in self.plan.agents.items() if ranks)
        return all(agent in usable or agent in self.awaited for agent in needed)


def _surviving_hosts(plan: Plan, outcome: JobOutcome, usable: Collection[AgentId]) -> dict[AgentId, str]:
    """Return the hosts of the usable agents; empty if agents cannot survive the loss of another host."""
    command = plan.launch_command
    if command is None or not command.survive_host_loss or (command.agents_stay and outcome.uses_mpi):
        return {}
    hosts = enumerate(command.agent_hosts)
    return {agent: host for number, host in hosts if (agent := AgentId(number)) in usable}


def plan_next_attempt(
    plan: Plan, outcome: JobOutcome, roster: Roster, found: Sequence[str], environ: Mapping[str, str]
) -> Following | Stop:
    """Return where another attempt runs, or why there can be none.

    roster:  the agents as the attempt has left them
    found:   hosts that the attempt lacked, and that were there
    """
    usable = usable_agents(plan, outcome, roster)
    if (waiting := _plan_to_wait(plan, outcome, roster, usable)) is not None:
        return waiting
    if plan.is_started_by_hand:
        return _plan_by_hand(plan, outcome, usable)
    hosts, lost = _surviving_hosts(plan, outcome, usable), _lost_hosts(plan, outcome, roster)
    placement, ready = tuple(worker.host for worker in plan.workers), set(hosts.values())
    there = [host for host in plan.spare_hosts if host not in roster.lost_spares()]
    spares = tuple(sorted(there, key=lambda host: host not in ready))
    choice = replace_hosts(placement, spares, lost, plan.job.min_hosts, plan.whole)
    choice = take_back(choice, [host for host in found if host not in lost])
    if failed := {plan.host_of[rank] for rank in outcome.failed_checks} - {*choice.left_out}:
        why = f"no spare host is left for {', '.join(sorted(failed))}"
        return Stop(why if plan.job.spares or plan.job.min_hosts else "")
    same_hosts = choice.placement == placement and spares == plan.spare_hosts
    if same_hosts and (Following(plan).is_served(usable) or fits_launch_command(plan)):
        return Following(plan)
    try:
        made = replan(plan, choice.placement, choice.spares, environ)
    except JaxrunError as error:
        if outcome.reason is EndReason.GROWN and found:  # no reason to end the job
            return plan_next_attempt(plan, outcome, roster, (), environ)
        return Stop(f"the job cannot be placed on other hosts: {error}")
    share = plan.launch_command is not None and plan.launch_command.agents_stay  # because a spare host has only one
    agents = assign_agents(choice.placement, hosts, choice.spares, share=share)
    if agents is not None:
        made = replace(made, launch_command=plan.launch_command, agents=agents)
    made = replace(
        made,
        left_out=tuple(host for host in (*plan.left_out, *choice.left_out) if host not in choice.placement),
        host_notes=(*plan.host_notes, *choice.notes),
        whole=choice.whole,
    )
    return Following(made)


def _plan_to_wait(plan: Plan, outcome: JobOutcome, roster: Roster, usable: Collection[AgentId]) -> Following | None:
    """The plan of an attempt on the same hosts that waits for those that were lost (--wait-hosts).

    None if there is no host to wait for, if the wait for one was in vain, or if the other agents are gone as well.
    """
    gone = [agent for agent, ranks in plan.agents.items() if ranks and agent not in usable]
    if not plan.job.host_wait or not gone or outcome.not_back or outcome.failed_checks:
        return None
    if plan.is_started_by_hand:
        if AgentId(0) in gone:
            return None
        known = plan.host_of | {worker.rank: worker.host for worker in outcome.workers}
        names = {agent: known[plan.agents[agent][0]] for agent in gone}
        # A host that was awaited already keeps its name, which the plan does not know.
        names |= {
            agent: roster.seats[agent].host for agent in gone if roster.seats[agent].host != _planned(plan, agent)
        }
        return Following(plan, names)
    there = _surviving_hosts(plan, outcome, usable)
    if not there or outcome.uses_mpi:
        return None
    return _await_host_agents(plan, there, gone)


def _await_host_agents(plan: Plan, there: Mapping[AgentId, str], gone: Sequence[AgentId]) -> Following | None:
    """Do the same for agents that an engine starts: one agent of a lost host gets all of its ranks."""
    first: dict[str, AgentId] = {}
    for agent in gone:
        first.setdefault(plan.host_of[plan.agents[agent][0]], agent)
    lost = {agent: host for host, agent in first.items()}
    placement = [worker.host for worker in plan.workers]
    agents = assign_agents(placement, {**there, **lost}, plan.spare_hosts, share=True)
    return Following(replace(plan, agents=agents), lost) if agents is not None else None


def _planned(plan: Plan, agent: AgentId) -> str:
    """The name of an agent's host in the plan."""
    return plan.workers[plan.agents[agent][0]].host


def _plan_by_hand(plan: Plan, outcome: JobOutcome, usable: Collection[AgentId]) -> Following | Stop:
    """Return the plan of another attempt with the existing agents: all that it had, or with --min-hosts fewer."""
    may_shrink = plan.job.min_hosts is not None and 0 in usable
    failed = {agent for agent, ranks in plan.agents.items() if outcome.failed_checks.keys() & set(ranks)}
    made = replan_manual(plan, set(usable) - failed) if may_shrink else plan
    if made is None or not Following(made).is_served(usable) or (failed and made is plan):
        return Stop("" if failed else "agents are gone that jaxrun did not start")
    if made.agents == plan.agents:
        return Following(plan)
    lost = [host for host in plan.hosts if host not in made.hosts]
    back = [host for host in made.hosts if host not in plan.hosts]
    news = [*(f"{host} is left out" for host in lost), *(f"{host} is taken back" for host in back)]
    again = "; the same command, typed there again, takes it back" if lost else ""
    note = f"{', '.join(news)}: {describe_size([worker.host for worker in made.workers])}{again}"
    left_out = tuple(host for host in (*plan.left_out, *lost) if host not in back)
    return Following(replace(made, left_out=left_out, host_notes=(*plan.host_notes, note)))


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


def _lost_hosts(plan: Plan, outcome: JobOutcome, roster: Roster) -> set[str]:
    """The hosts that cannot be used: lost by silence or otherwise, or without an agent that has reported."""
    culprits = find_culprits(outcome.workers) if outcome.workers else []
    lost = {worker.rank for worker in culprits if worker.lost_reason}
    lost.update(outcome.unanswered, outcome.failed_checks, outcome.lost_early)
    reported = {rank for agent in roster.reports for rank in roster.ranks_of(agent)}
    if outcome.reason is EndReason.UNAVAILABLE and reported:
        lost.update(rank for rank in plan.host_of if rank not in reported)
    return {host for rank, host in plan.host_of.items() if rank in lost}
