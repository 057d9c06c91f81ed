"""What the head knows of each rank."""

from jaxrun.head.events import Exited
from jaxrun.head.roster import Roster


def test_a_rank_that_had_finished_and_is_killed_later_ends_when_it_is_killed():
    roster = Roster({0: "h1", 1: "h1"})
    for rank in (0, 1):
        roster.spawned(rank)
        roster.done(rank, 5.0)
    roster.exited(Exited(0, 0), 50.0)
    roster.exited(Exited(1, -9), 60.0)
    assert [end.time for end in roster.ends(70.0)] == [5.0, 60.0]
