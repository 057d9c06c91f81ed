"""A question to several parties is over when the last one has answered, or will not, or at its deadline."""

from jaxrun.controller.head.round import Round
from jaxrun.controller.head.timers import Timer, Timers


def ended(ends):
    """A continuation that notes how the round has ended."""

    def then(answers, now):
        ends.append((dict(answers), now))
        return []

    return then


def test_the_last_answer_is_told_from_the_others():
    one = Round(["a", "b"], ended([]))
    assert not one.add("a", 1) and one.missing == {"b"} and not one.is_over
    assert one.add("b", 2) and one.is_over and one.answers == {"a": 1, "b": 2}


def test_answers_that_nobody_waits_for_change_nothing():
    one = Round(["a", "b"])
    assert not one.add("c", 0) and not one.add("a", 1)
    assert not one.add("a", 9) and one.answers == {"a": 1}


def test_who_cannot_answer_is_not_waited_for():
    one = Round(["a", "b"])
    assert not one.remove("c") and not one.remove("a") and one.add("b", 2)
    assert one.answers == {"b": 2} and one.asked == ("a", "b")


def test_at_the_deadline_the_answers_so_far_count_and_later_ones_do_not():
    timers, ends = Timers(), []
    one = Round(["a", "b"], ended(ends))
    one.limit(timers, Timer.QUERY, 5.0, of=1)
    one.add("a", 1)
    assert timers.fire(4.9) == [] and not ends
    timers.fire(5.0)
    assert ends == [({"a": 1}, 5.0)] and not one.add("b", 2)


def test_a_round_that_is_over_has_no_deadline_any_more():
    timers, ends = Timers(), []
    one = Round(["a"], ended(ends))
    one.limit(timers, Timer.QUERY, 5.0, of=1)
    if one.add("a", 1):
        one.end(2.0)
    assert timers.next_at() is None and timers.fire(9.0) == [] and ends == [({"a": 1}, 2.0)]


def test_a_question_to_nobody_is_over_at_once():
    assert Round(()).is_over
