"""Decides where the next attempt runs. Pure: each question is a function of the plan, the roster and the outcome,
or of what others have answered.

    Which agents can another attempt use?                   usable_agents
    Is a lost host waited for, at full size? --wait-hosts   wait_for_hosts
    Which agents that people started go on?                 regroup_agents
    Which hosts are lost?                                   lost_hosts
    Which spare hosts are there to replace them? --spares   ready_spares
    Which lost host is left out? --min-hosts                leave_out_hosts
    Which host is taken back, or takes a free place?        grow
    Which agents keep their ranks, and who gets the others? keep_agents

`plan_next_attempt` asks them, in this order, and nothing else does. Which hosts other jobs should avoid is another
question, which quarantine_decision.py answers. What the hosts become is in spec/job/rank_placement.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_end import Grown, HostCheckFailed, HostsNotBack, LostAtStart, Unavailable
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.diagnosis.root_cause import find_culprits
from jaxrun.analysis.verdict.restarts import Stop
from jaxrun.controller.roster import Roster
from jaxrun.controller.seat import SeatState
from jaxrun.errors import JaxrunError
from jaxrun.protocol.agent_id import AgentId
from jaxrun.spec.backends.planning import replan
from jaxrun.spec.backends.remote_plan import starting_agents
from jaxrun.spec.engines.by_hand import replan_manual
from jaxrun.spec.job.plan import Plan
from jaxrun.spec.job.rank_placement import (
    LOST,
    Placement,
    assign_agents,
    describe_size,
    leave_out_lost,
    take_back,
    use_spares,
)


def plan_next_attempt(
    plan: Plan, roster: Roster, outcome: JobOutcome, found: Sequence[str], environ: Mapping[str, str]
) -> Plan | Stop:
    """Return the plan of another attempt, or why there can be none.

    roster:  the agents as the attempt has left them
    found:   hosts that the attempt lacked, and that were there
    """
    waiting = wait_for_hosts(plan, roster, outcome)
    if waiting is not None:
        return replace(plan, placement=waiting)
    plan = replace(plan, placement=replace(plan.placement, awaited={}))
    if plan.is_started_by_hand:
        return regroup_agents(plan, roster, outcome)
    placed = choose_hosts(plan, roster, outcome, found)
    if isinstance(placed, Stop):
        return placed
    before, usable = plan.placement, usable_agents(plan, roster, outcome)
    is_unchanged = (placed.hosts, placed.spares) == (before.hosts, before.spares)
    if is_unchanged and (before.is_served_by(usable) or fits_launch_command(plan)):
        return plan
    try:
        made = replan(plan, placed, environ)
    except JaxrunError as error:
        if isinstance(outcome.end, Grown) and found:  # no reason to end the job
            return plan_next_attempt(plan, roster, outcome, (), environ)
        return Stop(f"the job cannot be placed on other hosts: {error}")
    agents = keep_agents(plan, roster, outcome, placed)
    if agents is None:
        return made
    return replace(made, launch_command=plan.launch_command, placement=replace(placed, agents=agents))


def choose_hosts(plan: Plan, roster: Roster, outcome: JobOutcome, found: Sequence[str]) -> Placement | Stop:
    """Return the hosts of another attempt, whose agents are not assigned yet; or why there can be none."""
    lost = lost_hosts(plan, roster, outcome)
    placed = use_spares(replace(plan.placement, spares=ready_spares(plan, roster, outcome)), lost)
    placed = leave_out_hosts(plan, placed, lost)
    placed = grow(placed, found, lost)
    if isinstance(outcome.end, HostCheckFailed):
        left = {plan.host_of[rank] for rank in outcome.end.failed} & {*placed.hosts}
        if left:
            why = f"no spare host is left for {', '.join(sorted(left))}"
            return Stop(why if plan.job.spares or plan.job.min_hosts else "")
    return placed


def usable_agents(plan: Plan, roster: Roster, outcome: JobOutcome) -> set[AgentId]:
    """Return the agents that another attempt can use; none once a launch command has ended that they do not outlive."""
    stay = plan.launch_command is not None and plan.launch_command.agents_stay and not outcome.uses_mpi
    return roster.usable(outcome.unanswered) if roster.has_launch or stay else set()


def lost_hosts(plan: Plan, roster: Roster, outcome: JobOutcome) -> set[str]:
    """Return the hosts that cannot be used: lost by silence or otherwise, or without an agent that has reported."""
    culprits = find_culprits(outcome.workers) if outcome.workers else []
    lost = {one.rank for one in culprits if one.lost_reason and not outcome.is_host_replaced(one)}
    lost.update(outcome.unanswered)
    match outcome.end:
        case HostCheckFailed(failed=ranks) | LostAtStart(lost=ranks):
            lost.update(ranks)
    if isinstance(outcome.end, Unavailable) and roster.reports:
        lost.update(_unreported_ranks(plan, roster, outcome))
    return {host for rank, host in plan.host_of.items() if rank in lost}


def _unreported_ranks(plan: Plan, roster: Roster, outcome: JobOutcome) -> list[int]:
    """Return the ranks whose agents have not reported: if some of these agents were lost, only theirs.

    The other agents were still checking their hosts as the loss ended the attempt. If all agents end with the launch
    command, their losses do not say which host is at fault.
    """
    unreported = [seat for seat in roster.with_ranks() if seat.agent not in roster.reports]
    gone = [seat for seat in unreported if seat.state in (SeatState.SUSPECTED, SeatState.LOST)]
    at_fault = gone if gone and usable_agents(plan, roster, outcome) else unreported
    return [rank for seat in at_fault for rank in seat.ranks]


def ready_spares(plan: Plan, roster: Roster, outcome: JobOutcome) -> tuple[str, ...]:
    """Return the spare hosts that are left and can be used; first those on which agents wait."""
    ready, unfit = {*_surviving_hosts(plan, roster, outcome).values()}, (SeatState.LOST, SeatState.EXCLUDED)
    left_out = {seat.host for seat in roster.waiting() if seat.state in unfit}
    there = [host for host in plan.placement.spares if host not in left_out]
    return tuple(sorted(there, key=lambda host: host not in ready))


def leave_out_hosts(plan: Plan, placed: Placement, lost: set[str]) -> Placement:
    """Leave out lost hosts that no spare one replaces, down to --min-hosts."""
    return leave_out_lost(placed, lost, plan.job.min_hosts)


def grow(placed: Placement, found: Sequence[str], lost: set[str]) -> Placement:
    """Take hosts back that were found, unless they were lost in this attempt."""
    return take_back(placed, [host for host in found if host not in lost])


def keep_agents(
    plan: Plan, roster: Roster, outcome: JobOutcome, placed: Placement
) -> dict[AgentId, tuple[int, ...]] | None:
    """Give the ranks of these hosts to agents that are there; None if they are too few, or cannot stay."""
    there = _surviving_hosts(plan, roster, outcome)
    share = plan.launch_command is not None and plan.launch_command.agents_stay  # because a spare host has only one
    return assign_agents(placed.hosts, there, placed.spares, share=share)


def wait_for_hosts(plan: Plan, roster: Roster, outcome: JobOutcome) -> Placement | None:
    """Return the placement of an attempt on the same hosts that waits for those that were lost.

    None if there is no host to wait for, if the wait for one was in vain, or if the other agents are gone as well.
    """
    usable, agents = usable_agents(plan, roster, outcome), plan.placement.agents
    gone = [agent for agent, ranks in agents.items() if ranks and agent not in usable]
    if not plan.job.host_wait or not gone or isinstance(outcome.end, HostsNotBack | HostCheckFailed):
        return None
    if plan.is_started_by_hand:
        return _await_commands(plan, roster, outcome, gone) if AgentId(0) not in gone else None
    there = _surviving_hosts(plan, roster, outcome)
    if not there or outcome.uses_mpi:
        return None
    return _await_host_agents(plan, there, gone)


def _await_commands(plan: Plan, roster: Roster, outcome: JobOutcome, gone: Sequence[AgentId]) -> Placement:
    """Wait for agents that people, or a cluster, start again."""
    known = plan.host_of | {worker.rank: worker.host for worker in outcome.workers}
    names = {}
    for agent in gone:
        first = plan.placement.agents[agent][0]
        # A host that was awaited already keeps its name, which the plan does not know.
        is_awaited = roster.seats[agent].host != plan.host_of[first]
        names[agent] = roster.seats[agent].host if is_awaited else known[first]
    return replace(plan.placement, awaited=names)


def _await_host_agents(plan: Plan, there: Mapping[AgentId, str], gone: Sequence[AgentId]) -> Placement | None:
    """Wait for agents that an engine starts: one agent of a lost host gets all of its ranks."""
    first: dict[str, AgentId] = {}
    for agent in gone:
        first.setdefault(plan.host_of[plan.placement.agents[agent][0]], agent)
    lost = {agent: host for host, agent in first.items()}
    agents = assign_agents(plan.placement.hosts, {**there, **lost}, plan.placement.spares, share=True)
    return replace(plan.placement, agents=agents, awaited=lost) if agents is not None else None


def _surviving_hosts(plan: Plan, roster: Roster, outcome: JobOutcome) -> dict[AgentId, str]:
    """Return the hosts of the usable agents; empty if agents cannot survive the loss of another host."""
    command = plan.launch_command
    if command is None or not command.survive_host_loss or (command.agents_stay and outcome.uses_mpi):
        return {}
    usable = usable_agents(plan, roster, outcome)
    hosts = enumerate(command.agent_hosts)
    return {agent: host for number, host in hosts if (agent := AgentId(number)) in usable}


def regroup_agents(plan: Plan, roster: Roster, outcome: JobOutcome) -> Plan | Stop:
    """Return the plan of another attempt with the agents that people started: all, or with --min-hosts fewer."""
    usable, agents = usable_agents(plan, roster, outcome), plan.placement.agents
    may_shrink = plan.job.min_hosts is not None and 0 in usable
    unfit = outcome.end.failed.keys() if isinstance(outcome.end, HostCheckFailed) else ()
    failed = {agent for agent, ranks in agents.items() if not set(ranks).isdisjoint(unfit)}
    made = replan_manual(plan, usable - failed) if may_shrink else plan
    if made is None or not made.placement.is_served_by(usable) or (failed and made is plan):
        return Stop("" if failed else "agents are gone that jaxrun did not start")
    if made.placement.agents == agents:
        return plan
    lost = [host for host in plan.hosts if host not in made.hosts]
    back = [host for host in made.hosts if host not in plan.hosts]
    news = [*(f"{host} is left out" for host in lost), *(f"{host} is taken back" for host in back)]
    again = "; the same command, typed there again, takes it back" if lost else ""
    note = f"{', '.join(news)}: {describe_size(made.placement.hosts)}{again}"
    left_out = {**plan.placement.left_out, **dict.fromkeys(lost, LOST)}
    left_out = {host: why for host, why in left_out.items() if host not in back}
    notes = (*plan.placement.notes, note)
    return replace(made, placement=replace(made.placement, left_out=left_out, notes=notes))


def plan_new_agents(plan: Plan, environ: Mapping[str, str]) -> Plan:
    """Return the plan for agents that a launch command starts anew: each gets the ranks that this command gives it."""
    return plan if fits_launch_command(plan) else replan(plan, plan.placement, environ)


def fits_launch_command(plan: Plan) -> bool:
    """Whether the agents have the ranks with which the launch command of the plan starts them."""
    command = plan.launch_command
    started = command is not None and dict(plan.placement.agents) == starting_agents(command, len(plan.workers))
    return plan.is_started_by_hand or started
