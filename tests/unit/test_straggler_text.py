"""The sentence about a rank that comes last."""

from dataclasses import replace

import pytest

from jaxrun.diagnosis.straggler import Straggler
from jaxrun.verdict.straggler_text import format_straggler

ONE = Straggler((5,), "0-7", "", 500, 490, 0.94, 0.038, 0.31, 0.3, True, "data.py:10 load")
HOSTS = {rank: f"h{rank // 2 + 1}" for rank in range(8)}


@pytest.mark.parametrize(
    ("straggler", "hosts", "text"),
    [
        (
            ONE,
            HOSTS,
            "rank 5 (h3) came last to 94 % of calls, by 38 ms on average: the others waited 31 % of the time; "
            "it was in data.py:10 load",
        ),
        (
            replace(ONE, frame="", late_s=1.234, place="train.py:88 main"),
            dict.fromkeys(range(8), "h1"),
            "rank 5 came last to 94 % of the calls at train.py:88, by 1.2 s on average: the others waited 31 % "
            "of the time",
        ),
        (
            replace(ONE, ranks=(4, 5), frame="", late_s=0.00123),
            HOSTS,
            "ranks 4-5 (h3) came last to 94 % of calls, by 1.2 ms on average: the others waited 31 % of the time",
        ),
        (
            replace(ONE, group="4-5", frame=""),
            HOSTS,
            "rank 5 (h3) came last to 94 % of calls of ranks 4-5, by 38 ms on average: rank 4 waited 31 % of the time",
        ),
    ],
)
def test_it_names_who_came_last_and_what_that_cost(straggler, hosts, text):
    assert format_straggler(straggler, hosts) == text


def test_a_straggler_comes_back_as_it_was_sent():
    assert Straggler.from_content(ONE.to_content()) == ONE
    for wrong in ({}, [], None, {**ONE.to_content(), "late_s": None}):
        with pytest.raises(ValueError):
            Straggler.from_content(wrong)
