"""The line about ranks that outnumber the cores of this machine: when it is worth one, and what it says."""

import pytest

from jaxrun.protocol.flight import Flight

LINE = "4 ranks wait for 2 cores 75 % of the time; -n 1 -d 4 has the same devices in one process"
LOSSES = {
    "ranks that exchange data": ({}, 60, 0.75, 30, 1),
    "a short program": ({}, 9, 0.75, 30, 0),
    "ranks that hardly wait": ({}, 60, 0.3, 30, 0),
    "ranks that compute by themselves": ({}, 60, 0.75, 3, 0),
    "enough cores": ({"cores": 4}, 60, 0.75, 30, 0),
    "nobody wants to know": ({"cores": 0}, 60, 0.75, 30, 0),
    "GPUs": ({"platform": "gpu"}, 60, 0.75, 30, 0),
}


@pytest.mark.parametrize(("changes", "seconds", "share", "calls", "lines"), LOSSES.values(), ids=LOSSES)
def test_one_line_says_that_ranks_lose_much_time_on_few_cores(simulate, changes, seconds, share, calls, lines):
    job = simulate(4, **{"lockstep": "record", "cores": 2, "stall_notice": 0.0, **changes}).run()
    job.core_wait = lambda now: 5.0 + share * now
    job.flights = dict.fromkeys(range(4), Flight(call_counts={"0-3": calls}))
    job.wait(seconds)
    assert job.lines == [LINE] * lines
