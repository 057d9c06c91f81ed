"""Where the next attempt runs: one table for each question that its plan answers."""

import pytest
from msgspec.structs import replace
from remote_plans import CLOSED, follow, hand_plan, mpirun_plan, with_placement
from simulation import report, seated

from jaxrun.analysis.diagnosis.job_end import Grown, HostCheckFailed, HostsNotBack, LostAtStart, RankFailed, Unavailable
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome, WorkerOutcome
from jaxrun.analysis.verdict.restarts import Stop
from jaxrun.controller.supervisor.next_attempt_hosts import (
    choose_hosts,
    fits_launch_command,
    keep_agents,
    lost_hosts,
    plan_new_agents,
    ready_spares,
    usable_agents,
    wait_for_hosts,
)
from jaxrun.spec.job.rank_placement import use_spares


def lost(plan, *ranks, **more):
    """The outcome of an attempt that has lost the agents of these ranks."""
    names = {rank: f"h{rank // (len(plan.workers) // 3) + 1}" for rank in plan.host_of}
    workers = tuple(WorkerOutcome(rank, names[rank], 1.0, None, lost_reason=CLOSED * (rank in ranks)) for rank in names)
    return JobOutcome(RankFailed(), names, workers, run_at=1.0, **more)


def engine_plan(spares=("h4",), **wanted):
    """An mpirun on three hosts, one rank on each, which waits for no host."""
    return mpirun_plan(("h1", "h2", "h3"), spares=spares, **{"wait_hosts": None, **wanted})


# ---- which agents can be used again

FAILED = JobOutcome(RankFailed())
USES_MPI = JobOutcome(RankFailed(), uses_mpi=True)
SICK = JobOutcome(HostCheckFailed("h2 failed --host-check", failed={1: "sick"}))
IN_VAIN = JobOutcome(HostsNotBack("h2 was not back", ranks=(1,)))
# Whether the launch command runs, how the attempt ended, and the agents of which all but number 1 are there.
USABLE = {
    "those that are there": (True, FAILED, {0, 2, 3}),
    "not one that has not answered": (True, JobOutcome(RankFailed(), unanswered=(2,)), {0, 3}),
    "they outlive the launch command": (False, FAILED, {0, 2, 3}),
    "unless the program uses MPI": (False, USES_MPI, set()),
}


@pytest.mark.parametrize(("has_launch", "outcome", "usable"), USABLE.values(), ids=USABLE)
def test_the_agents_that_can_be_used_again(has_launch, outcome, usable):
    plan = engine_plan()
    roster = seated(plan, {0, 2, 3})
    if not has_launch:
        roster.end_launch()
    assert usable_agents(plan, roster, outcome) == usable


# ---- which hosts are lost, and which spare hosts are there


# How the attempt ended, the agents that have reported, and the lost hosts.
LOST = {
    "none": (FAILED, {0, 1, 2}, set()),
    "that of a lost rank": (lost(engine_plan(), 1), {0, 1, 2}, {"h2"}),
    "that of a rank that was killed and did not answer": (
        JobOutcome(RankFailed(), unanswered=(2,)),
        {0, 1, 2},
        {"h3"},
    ),
    "one that failed its check": (
        JobOutcome(HostCheckFailed("x", failed={0: "sick"})),
        {0, 1, 2},
        {"h1"},
    ),
    "one lost before the workers were there": (JobOutcome(LostAtStart("x", lost={1: CLOSED})), {0, 1, 2}, {"h2"}),
    "those that have not reported where others have": (JobOutcome(Unavailable("x")), {0}, {"h2", "h3"}),
    "none where nobody has reported": (JobOutcome(Unavailable("x")), set(), set()),
}


@pytest.mark.parametrize(("outcome", "reported", "hosts"), LOST.values(), ids=LOST)
def test_the_hosts_that_are_lost(outcome, reported, hosts):
    plan = engine_plan()
    there = {0, 1, 2} - {worker.rank for worker in outcome.workers if worker.lost_reason}
    assert lost_hosts(plan, seated(plan, there, reported=reported), outcome) == hosts


@pytest.mark.parametrize("explained", [True, False])
def test_a_host_that_is_still_checked_as_another_is_lost_is_not_lost_with_it(explained):
    plan, outcome = engine_plan(), JobOutcome(Unavailable("x"))
    roster = seated(plan, {0, 1, 2, 3}, reported={0})
    roster.lose(2, CLOSED)
    if explained:
        roster.explain(2)
    assert lost_hosts(plan, roster, outcome) == {"h3"}
    assert choose_hosts(plan, roster, outcome, ()).hosts == ("h1", "h2", "h4")


def test_agents_that_end_with_the_launch_command_do_not_say_which_host_is_lost():
    plan = mpirun_plan(("h1", "h2", "h3"), wait_hosts=None)
    roster = seated(plan, {0, 2}, reported={0})
    for agent in (0, 2):
        roster.lose(agent, CLOSED)
    roster.end_launch()
    assert lost_hosts(plan, roster, JobOutcome(Unavailable("x"))) == {"h2", "h3"}


def test_a_spare_host_on_which_a_lost_rank_was_started_again_is_not_lost_with_it():
    plan = engine_plan()
    roster = seated(plan, {0, 2, 3}, reported={0, 1, 2})
    outcome = replace(lost(plan, 1, 2), hosts={0: "h1", 1: "h4", 2: "h3"})
    placed = replace(use_spares(plan.placement, {"h2"}), agents={0: (0,), 2: (2,), 3: (1,)})
    roster.seat_spare(placed)
    roster.lose(2, CLOSED)
    workers = tuple(replace(worker, host=placed.hosts[worker.rank]) for worker in plan.workers)
    assert lost_hosts(replace(plan, workers=workers, placement=placed), roster, outcome) == {"h3"}


def test_a_spare_host_that_has_taken_a_place_while_the_others_ran_is_not_the_lost_one():
    plan = mpirun_plan(("h1", "h4", "h3"), wait_hosts=None)
    outcome = lost(plan, 1)  # on h2
    outcome = replace(outcome, hosts={**outcome.hosts, 1: "h4"})
    assert lost_hosts(plan, seated(plan, {0, 1, 2}, reported={0, 1, 2}), outcome) == set()


def test_a_spare_host_is_ready_once_its_agent_waits_and_not_used_again_once_it_was_lost():
    plan = engine_plan(("h4", "h5", "h6"))
    roster = seated(plan, {0, 2, 4, 5})
    assert ready_spares(plan, roster, FAILED) == ("h5", "h6", "h4")
    roster.lose(5, CLOSED)
    assert ready_spares(plan, roster, FAILED) == ("h5", "h4")


def test_a_spare_host_that_cannot_be_used_takes_no_place():
    plan = engine_plan(("h4", "h5"), min_hosts=2)
    roster = seated(plan, {0, 2, 3, 4}, reported={0, 1, 2})
    roster.add_report(report(3, "h4", 3), unusable="h4 has another version")
    assert ready_spares(plan, roster, FAILED) == ("h5",)
    roster.add_report(report(4, "h5", 3), unusable="h5 has another version")
    assert choose_hosts(plan, roster, lost(plan, 1), ()).hosts == ("h1", "h3")


# ---- which host takes which place


def smaller_plan(**wanted):
    """A job that has lost h2 in an earlier attempt, and runs on h1 and h3."""
    options = {"wait_hosts": None, "min_hosts": 1, **wanted}
    return with_placement(mpirun_plan(("h1", "h3"), **options), whole=("h1", "h2", "h3"), left_out={"h2": "lost"})


# The plan, the ranks that are lost, the hosts that were found, and what follows: the hosts of ranks, the spare hosts,
# the hosts that are left out, and the agents that keep or get ranks, if they are enough.
CHOSEN = {
    "a spare host takes the place of a lost one": (
        engine_plan(), (1,), (), ("h1", "h4", "h3"), (), {"h2"}, {0: (0,), 3: (1,), 2: (2,)},
    ),
    "without a spare host one is left out": (
        engine_plan((), min_hosts=2), (1,), (), ("h1", "h3"), (), {"h2"}, {0: (0,), 2: (1,)},
    ),
    "unless too few would be left": (engine_plan((), min_hosts=3), (1,), (), ("h1", "h2", "h3"), (), set(), None),
    "a host that is back is taken back, but no agent is there": (
        smaller_plan(), (), ("h2",), ("h1", "h2", "h3"), (), set(), None,
    ),
    "unless it was lost in this attempt": (smaller_plan(), (1,), ("h3",), ("h1",), (), {"h2", "h3"}, {0: (0,)}),
    "where nothing was lost all stay": (
        engine_plan(), (), (), ("h1", "h2", "h3"), ("h4",), set(), {0: (0,), 1: (1,), 2: (2,), 3: ()},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "gone", "found", "hosts", "spares", "left_out", "agents"), CHOSEN.values(), ids=CHOSEN
)
def test_which_host_takes_which_place(plan, gone, found, hosts, spares, left_out, agents):
    there = {agent for agent, ranks in plan.placement.agents.items() if not {*ranks} & {*gone}}
    outcome, roster = JobOutcome(RankFailed(), unanswered=gone), seated(plan, there)
    made = choose_hosts(plan, roster, outcome, found)
    assert (made.hosts, made.spares, {*made.left_out}) == (hosts, spares, left_out)
    assert keep_agents(plan, roster, outcome, made) == agents


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (engine_plan(), "no spare host is left for h2"),
        (engine_plan((), min_hosts=3), "no spare host is left for h2"),
        (engine_plan(()), ""),
    ],
    ids=["its spare hosts are used up", "it may not be smaller", "it asked for neither"],
)
def test_no_attempt_runs_on_a_host_that_has_failed_its_check(plan, why):
    roster = seated(plan, {0, 1, 2}, reported={0, 1, 2})
    for spare in roster.waiting():
        roster.lose(spare.agent, CLOSED)
    assert choose_hosts(plan, roster, SICK, ()) == Stop(why)


def test_agents_that_the_program_needs_started_anew_get_no_ranks():
    plan = engine_plan()
    assert keep_agents(plan, seated(plan, {0, 1, 2, 3}), USES_MPI, plan.placement) is None


def test_a_job_that_nothing_was_lost_of_keeps_its_plan_and_what_was_awaited_is_not_awaited_any_more():
    plan = engine_plan()
    assert follow(with_placement(plan, awaited={1: "h2"}), FAILED, {0, 1, 2, 3}) == plan


def test_after_a_failed_attempt_to_grow_the_job_stays_as_it_is():
    """Its backend cannot plan for more hosts: here there is no mpirun."""
    plan = smaller_plan()
    grown = JobOutcome(Grown("h2 is back"))
    assert follow(plan, grown, {0, 1}, found=("h2",), environ={"PATH": ""}) == plan
    end = follow(plan, FAILED, {0, 1}, found=("h2",), environ={"PATH": ""})
    assert isinstance(end, Stop) and end.why.startswith("the job cannot be placed on other hosts")


def test_agents_started_anew_need_another_plan_only_where_they_get_other_ranks_than_the_command_says():
    plan = engine_plan()
    assert fits_launch_command(plan) and plan_new_agents(plan, {}) is plan
    assert not fits_launch_command(with_placement(plan, agents={0: (0,), 2: (1, 2)}))
    assert fits_launch_command(hand_plan())


# ---- which lost host is waited for (--wait-hosts)


def test_of_an_engines_agents_one_takes_all_ranks_of_a_lost_host():
    plan = mpirun_plan(spares=("h3",))
    following = follow(plan, FAILED, {0, 1, 4}).placement
    assert following.agents == {0: (0,), 1: (1,), 2: (2, 3), 4: ()} and following.awaited == {2: "h2"}
    assert following.spares == ("h3",) and following.is_served_by({0, 1, 4})
    one_of_two = follow(plan, FAILED, {0, 1, 2, 4}).placement
    assert (one_of_two.agents, one_of_two.awaited) == (plan.placement.agents, {3: "h2"})


def test_one_command_a_host_begins_the_next_attempt_at_full_size():
    plan = hand_plan(2, min_hosts=2)
    following = follow(plan, lost(plan, 2, 3), {0, 4})
    assert following == with_placement(plan, awaited={2: "h2"})
    assert following.placement.is_served_by({0, 4}) and not following.placement.is_served_by({0})


def test_a_host_that_is_awaited_still_keeps_its_name():
    plan = with_placement(hand_plan(), awaited={1: "box"})
    assert follow(plan, lost(plan, 2), {0}).placement.awaited == {1: "box", 2: "h3"}


# The plan, how the attempt ended, and the agents that are there.
NOBODY = {
    "not asked for": (hand_plan(wait_hosts=None), FAILED, {0, 2}),
    "the agent of host 0 is gone": (hand_plan(), FAILED, {1, 2}),
    "a host is sick": (hand_plan(), SICK, {0, 2}),
    "the wait was in vain": (hand_plan(), IN_VAIN, {0, 2}),
    "none is lost": (hand_plan(), FAILED, {0, 1, 2}),
    "all agents are gone": (mpirun_plan(), FAILED, set()),
    "the program uses MPI": (mpirun_plan(), USES_MPI, {0, 1}),
}


@pytest.mark.parametrize(("plan", "ended", "there"), NOBODY.values(), ids=NOBODY)
def test_nobody_is_waited_for(plan, ended, there):
    assert wait_for_hosts(plan, seated(plan, there), ended) is None


# ---- which agents go on that people have started


# The plan, how the attempt ended, the agents that are there, and what follows: the ranks of each, or why there is none.
REGROUPED = {
    "without a loss all do": (hand_plan(), FAILED, {0, 1, 2}, {0: (0,), 1: (1,), 2: (2,)}),
    "with --min-hosts those that are there": (
        hand_plan(min_hosts=2, wait_hosts=None), FAILED, {0, 2}, {0: (0,), 1: (), 2: (1,)},
    ),
    "not those that are sick": (
        hand_plan(min_hosts=2), SICK, {0, 1, 2}, {0: (0,), 1: (), 2: (1,)},
    ),
    "after a wait in vain too": (hand_plan(min_hosts=2), IN_VAIN, {0, 2}, {0: (0,), 1: (), 2: (1,)}),
    "without --min-hosts none": (hand_plan(), IN_VAIN, {0, 2}, "agents are gone that jaxrun did not start"),
    "a sick host ends the job": (hand_plan(), SICK, {0, 1, 2}, ""),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "ended", "there", "wanted"), REGROUPED.values(), ids=REGROUPED)
def test_which_agents_that_people_started_go_on(plan, ended, there, wanted):
    following = follow(plan, ended, there)
    if isinstance(wanted, str):
        assert following == Stop(wanted)
        return
    placed = following.placement
    assert placed.agents == wanted and not placed.awaited and placed.is_smaller == (() in wanted.values())
    assert [worker.host for worker in following.workers] == [*placed.hosts]


def test_a_host_that_people_started_again_is_taken_back_and_both_are_told():
    plan = hand_plan(min_hosts=2, wait_hosts=None)
    smaller = follow(plan, FAILED, {0, 2})
    assert smaller.placement.left_out == {"--host-rank 1": "lost"}
    again = follow(smaller, FAILED, {0, 1, 2})
    assert (again.placement.agents, again.placement.left_out) == (plan.placement.agents, {})
    assert again.placement.notes == (
        "--host-rank 1 is left out: 2 ranks on 2 hosts; the same command, typed there again, takes it back",
        "--host-rank 1 is taken back: 3 ranks on 3 hosts",
    )
