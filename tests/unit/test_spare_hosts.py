"""Which hosts a job goes on with that has lost some."""

import pytest

from jaxrun.backends.mpi_hosts import place_on_hosts, spare_hosts
from jaxrun.errors import UsageError
from jaxrun.job.hosts import HostSlots
from jaxrun.job.job import Job
from jaxrun.job.spare_hosts import AgentNumbers, HostChoice, assign_agents, replace_hosts

PLACEMENT = ("h1", "h1", "h2", "h2", "h3", "h3")


def test_a_spare_host_takes_all_ranks_of_the_lost_one_and_every_other_rank_keeps_its_host():
    assert replace_hosts(PLACEMENT, ("h4", "h5"), {"h2"}, None) == HostChoice(
        ("h1", "h1", "h4", "h4", "h3", "h3"), ("h5",), ("h2",), ("h4 takes the place of h2",)
    )


def test_several_hosts_are_replaced_in_the_order_of_their_ranks():
    choice = replace_hosts(PLACEMENT, ("h4", "h5"), {"h3", "h1"}, None)
    assert choice.placement == ("h4", "h4", "h2", "h2", "h5", "h5") and choice.left_out == ("h1", "h3")


def test_without_a_spare_host_the_job_stays_where_it_is_unless_it_may_be_smaller():
    assert replace_hosts(PLACEMENT, (), {"h2"}, None) == HostChoice(PLACEMENT)
    assert replace_hosts(PLACEMENT, (), {"h2"}, 2) == HostChoice(
        ("h1", "h1", "h3", "h3"), (), ("h2",), ("h2 is left out: 4 ranks on 2 hosts",)
    )
    assert replace_hosts(PLACEMENT, (), {"h2"}, 3) == HostChoice(PLACEMENT)


def test_spare_hosts_come_before_a_smaller_job():
    choice = replace_hosts(PLACEMENT, ("h4",), {"h1", "h2", "h3"}, 2)
    assert choice.placement == ("h4", "h4", "h3", "h3") and choice.left_out == ("h1", "h2")


def test_a_host_that_the_job_does_not_use_is_no_loss():
    assert replace_hosts(PLACEMENT, ("h4",), {"h9"}, 1) == HostChoice(PLACEMENT, ("h4",))


AGENTS = dict(enumerate((*PLACEMENT, "h4", "h4", "h5", "h5")))  # those behind the ranks' own wait


def without(*lost):
    return {number: host for number, host in AGENTS.items() if host not in lost}


def test_agents_that_wait_take_the_ranks_of_a_lost_host_and_every_other_rank_keeps_its_agent():
    numbers = assign_agents(("h1", "h1", "h4", "h4", "h3", "h3"), without("h2"), ("h5",))
    assert numbers == AgentNumbers((0, 1, 6, 7, 4, 5), frozenset({8, 9}))
    assert [numbers.of_rank(rank) for rank in range(6)] == [0, 1, 6, 7, 4, 5]
    assert numbers.ranks[7] == 3 and 2 not in numbers.ranks
    assert [number for number in AGENTS if not numbers.includes(number)] == [2, 3]
    again = assign_agents(("h5", "h5", "h4", "h4", "h3", "h3"), without("h1", "h2"))
    assert again == AgentNumbers((8, 9, 6, 7, 4, 5))


def test_a_smaller_job_keeps_the_agents_of_the_hosts_that_are_left():
    assert assign_agents(("h1", "h1", "h3", "h3"), without("h2", "h4", "h5")) == AgentNumbers((0, 1, 4, 5))


def test_without_an_agent_for_each_rank_nobody_goes_on():
    placement = ("h1", "h1", "h4", "h4", "h3", "h3")
    assert assign_agents(placement, without("h2", "h4")) is None
    assert assign_agents(placement, {number: host for number, host in AGENTS.items() if number != 7}) is None
    assert assign_agents(placement, {}) is None


def test_an_attempt_that_names_no_agents_has_those_whose_numbers_are_the_ranks():
    numbers = AgentNumbers(waiting=frozenset({6, 7}))
    assert (numbers.of_rank(3), numbers.ranks, numbers.includes(3)) == (3, {}, True)


def job(**wanted):
    return Job(**{"program": ("p",), "backend": "mpirun", "max_restarts": 1, **wanted})


NAMED = [HostSlots(name, 2) for name in ("h1", "h2", "h3")]


@pytest.mark.parametrize(
    ("wanted", "placed", "spare"),
    [
        ({"spares": 1}, "h1 h1 h2 h2", "h3"),
        ({"spares": 1, "hosts": 1}, "h1 h1", "h2"),
        ({"spares": 2, "processes": 2}, "h1 h1", "h2 h3"),
        ({"spares": 1, "processes": 2}, "h1 h2", "h3"),
        ({}, "h1 h1 h2 h2 h3 h3", ""),
        ({"spares": 1, "placement": ("h3", "h1")}, "h3 h1", "h3"),
    ],
)
def test_the_spare_hosts_are_those_behind_the_hosts_of_the_job(wanted, placed, spare):
    assert place_on_hosts(job(**wanted), NAMED, None) == tuple(placed.split())
    assert spare_hosts(job(**wanted), NAMED, None) == tuple(spare.split())


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"spares": 3}, "--spares 3 leave no host for the job, and there are 3 hosts"),
        ({"spares": 1, "hosts": 3}, "-N 3 and --spares 1 take 4 hosts, and there are 3 hosts"),
    ],
)
def test_too_few_hosts_for_the_spares_are_refused(wanted, words):
    with pytest.raises(UsageError, match=words):
        place_on_hosts(job(**wanted), NAMED, None)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"spares": -1}, "--spares must be 0 or more, not -1"),
        ({"min_hosts": 0}, "--min-hosts must be 1 or more, not 0"),
        ({"spares": 1, "max_restarts": 0}, "--spares 1 needs --max-restarts"),
        ({"min_hosts": 1, "max_restarts": 0}, "--min-hosts 1 needs --max-restarts"),
        ({"min_hosts": 3, "hosts": 2}, "--min-hosts 3 is more than -N 2"),
    ],
)
def test_contradictions_are_refused(wanted, words):
    with pytest.raises(UsageError, match=words):
        job(**wanted)
