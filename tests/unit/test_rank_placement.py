"""Which hosts and agents have which ranks: what losses, and hosts that are back, make of it."""

from unittest.mock import ANY

import pytest

from jaxrun.spec.job.rank_placement import (
    Placement,
    agents_by_rank,
    assign_agents,
    describe_left_out,
    leave_out_lost,
    replace_host,
    take_back,
    use_spares,
)

SIX = ("h1", "h1", "h2", "h2", "h3", "h3")
TWO = ("h1", "h1", "h3", "h3")


def lose(spares, lost, min_hosts):
    placed = Placement(SIX, tuple(spares.split()), whole=SIX)
    lost = {*lost.split()}
    return leave_out_lost(use_spares(placed, lost), lost, min_hosts)


def choice(hosts, spares="", left_out="", notes=(), whole=None):
    reasons = dict.fromkeys(left_out.split(), "lost")
    return Placement(
        tuple(hosts.split()), tuple(spares.split()), reasons, tuple((whole or hosts).split()), {}, {}, notes
    )


SAME = "h1 h1 h2 h2 h3 h3"
TAKES, LEAVES = ("h4 takes the place of h2",), ("h2 is left out: 4 ranks on 2 hosts",)
# The spare hosts, the lost hosts, --min-hosts, and what follows.
LOSSES = {
    "a spare host takes all ranks of the lost one": (
        "h4 h5",
        "h2",
        None,
        choice("h1 h1 h4 h4 h3 h3", "h5", "h2", TAKES),
    ),
    "several do in the order of ranks": ("h4 h5", "h3 h1", None, choice("h4 h4 h2 h2 h5 h5", "", "h1 h3", ANY)),
    "without a spare host the job stays where it is": ("", "h2", None, choice(SAME)),
    "unless it may be smaller": ("", "h2", 2, choice("h1 h1 h3 h3", "", "h2", LEAVES, SAME)),
    "but not as small as that": ("", "h2", 3, choice(SAME)),
    "spare hosts come before a smaller job": (
        "h4",
        "h1 h2 h3",
        2,
        choice("h4 h4 h3 h3", "", "h1 h2", ANY, "h4 h4 h2 h2 h3 h3"),
    ),
    "a host that the job does not use is no loss": ("h4", "h9", 1, choice(SAME, "h4")),
}


@pytest.mark.parametrize(("spares", "lost", "min_hosts", "made"), LOSSES.values(), ids=LOSSES)
def test_where_ranks_are_after_a_loss(spares, lost, min_hosts, made):
    assert lose(spares, lost, min_hosts) == made


WITH_H4, WITH_H9 = (("h1", "h1", other, other, "h3", "h3") for other in ("h4", "h9"))
# The hosts that were lost, the spare ones, those that are there again, and where ranks are, now and if all are there.
BACK = {
    "its own host": ("h2", "", ("h2",), SIX, SIX),
    "another host": ("h2", "", ("h9",), WITH_H9, WITH_H9),
    "its own rather than another": ("h2", "", ("h9", "h2"), SIX, SIX),
    "none": ("h2", "", (), TWO, SIX),
    "one that it has": ("h2", "", ("h1",), TWO, SIX),
    "one of two missing": ("h1 h2", "", ("h1",), TWO, SIX),
    "one in whose place is a spare": ("h2", "h4", ("h2",), WITH_H4, WITH_H4),
    "one where none is missing": ("", "", ("h9",), SIX, SIX),
}


@pytest.mark.parametrize(("lost", "spares", "there", "hosts", "whole"), BACK.values(), ids=BACK)
def test_a_host_that_is_there_again_takes_the_place_of_the_missing_one(lost, spares, there, hosts, whole):
    before = lose(spares, lost, 1)
    placed = take_back(before, there)
    assert (placed.hosts, placed.whole, placed.is_smaller) == (hosts, whole, len(hosts) < len(whole))
    assert not {*placed.left_out} & {*placed.hosts}
    if lost == "h1 h2":
        assert placed.notes[-1] == "h1 taken back: 4 ranks on 2 hosts" and {*placed.left_out} == {"h2"}
    if spares:
        assert placed == before


def test_a_placement_is_served_by_the_agents_of_its_ranks_except_those_that_it_waits_for():
    placed = Placement(agents={0: (0,), 1: (1,), 2: ()})
    assert placed.is_served_by({0, 1}) and not placed.is_served_by({0, 2})
    assert Placement(agents=placed.agents, awaited={1: "h2"}).is_served_by({0})


# ---- agents

AGENTS = dict(enumerate((*SIX, "h4", "h4", "h5", "h5")))  # those behind the ranks' own wait


def without(*lost):
    return {number: host for number, host in AGENTS.items() if host not in lost}


def test_agents_that_wait_take_the_ranks_of_a_lost_host_and_every_other_rank_keeps_its_agent():
    numbers = assign_agents(WITH_H4, without("h2"), ("h5",))
    assert numbers == {0: (0,), 1: (1,), 6: (2,), 7: (3,), 4: (4,), 5: (5,), 8: (), 9: ()}
    again = assign_agents(("h5", "h5", "h4", "h4", "h3", "h3"), without("h1", "h2"))
    assert again == {8: (0,), 9: (1,), 6: (2,), 7: (3,), 4: (4,), 5: (5,)}


def test_a_smaller_job_keeps_the_agents_of_the_hosts_that_are_left():
    assert assign_agents(TWO, without("h2", "h4", "h5")) == {0: (0,), 1: (1,), 4: (2,), 5: (3,)}


# While the job runs: the lost host, the spare hosts, the agents that wait there, and the agents that get its ranks.
# Nothing changes for the other agents.
REPLACED = {
    "one agent for each rank": ("h2", "h4 h5", {6: "h4", 7: "h4"}, False, {6: (2,), 7: (3,)}),
    "the first spare host that has enough": ("h2", "h4 h5", {6: "h4", 8: "h5", 9: "h5"}, False, {8: (2,), 9: (3,)}),
    "one agent for all ranks, if it may": ("h2", "h4", {6: "h4"}, True, {6: (2, 3)}),
    "else none": ("h2", "h4", {6: "h4"}, False, None),
    "no agent waits": ("h2", "h4", {}, True, None),
    "no spare host is left": ("h2", "", {6: "h4", 7: "h4"}, False, None),
}


@pytest.mark.parametrize(("lost", "spares", "waiting", "share", "taken"), REPLACED.values(), ids=REPLACED)
def test_a_spare_host_takes_the_place_of_a_lost_one_while_the_others_go_on(lost, spares, waiting, share, taken):
    before = Placement(
        SIX, tuple(spares.split()), whole=SIX, agents={n: (n,) for n in range(6)} | dict.fromkeys(waiting, ())
    )
    placed = replace_host(before, lost, waiting, share=share)
    if taken is None:
        assert placed is None
        return
    host = waiting[min(taken)]
    assert placed.hosts == placed.whole == tuple(host if each == lost else each for each in SIX)
    assert placed.spares == tuple(each for each in spares.split() if each != host) and placed.left_out == {lost: "lost"}
    kept = {n: (n,) for n in range(6) if SIX[n] != lost}
    assert placed.agents == {**kept, **dict.fromkeys(waiting.keys() - taken, ()), **taken}
    assert placed.notes == (f"{host} takes the place of {lost}",)


def test_without_an_agent_for_each_rank_the_job_does_not_continue():
    assert assign_agents(WITH_H4, without("h2", "h4")) is None
    assert assign_agents(WITH_H4, {number: host for number, host in AGENTS.items() if number != 7}) is None
    assert assign_agents(WITH_H4, {}, share=True) is None


def test_the_ranks_of_a_host_may_share_the_agents_that_are_there():
    hosts = ("h1", "h4", "h4", "h4", "h1")
    there = {0: "h1", 1: "h1", 6: "h4", 7: "h4", 8: "h5"}
    assert assign_agents(hosts, there, ("h5",), share=True) == {0: (0,), 1: (4,), 6: (1,), 7: (2, 3), 8: ()}


def test_at_first_each_rank_has_the_agent_of_its_number_and_the_others_wait():
    assert agents_by_rank(2) == {0: (0,), 1: (1,)}
    assert agents_by_rank(2, 4) == {0: (0,), 1: (1,), 2: (), 3: ()}


# ---- for people


def test_hosts_that_are_left_out_are_named_with_the_way_back(tmp_path):
    assert describe_left_out({}, tmp_path / "bad") == ""
    assert describe_left_out({"h2": "--exclude-hosts", "h3": "bad: lost"}, None) == (
        "without h2 (--exclude-hosts), h3 (bad: lost)"
    )
    assert describe_left_out({"h3": "bad: lost"}, tmp_path / "bad").endswith(
        f"; to use a host again, delete its line in {tmp_path / 'bad'}"
    )
