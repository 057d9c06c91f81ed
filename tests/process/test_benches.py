"""`scripts/bench`: what `--against` reads and shows, and that the benchmark of lockstep measures what it says."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
from harness import extended

BENCH = Path(__file__).parents[2] / "scripts/bench.d"
sys.path.insert(0, str(BENCH))  # its files import each other by name
against, lockstep = map(import_module, ("_against", "lockstep"))
sys.path.remove(str(BENCH))


def test_measurements_of_two_checkouts_are_compared_by_name_within_their_rounds() -> None:
    def measured(seconds: float, **more: object) -> dict[str, float]:
        samples = [
            {"contender": "jaxrun", "size": 4, "round": 1, "seconds": seconds, "least": {"psum": 1.0}, **more},
            {"contender": "jaxrun", "size": 8, "round": 1, "seconds": 0.0, "wrong": "status 1"},
        ]
        return against.read(samples)

    assert measured(2.0) == {"jaxrun 4 seconds": 2.0, "jaxrun 4 least psum": 1.0}
    rounds = [(measured(2.0), measured(1.0)), (measured(30.0), measured(10.0)), (measured(1.0), measured(1.0, size=2))]
    header, seconds, psum = against.render(rounds).splitlines()
    assert header.split() == ["measured", "here", "there", "ratio", "min-max", "rounds"]
    assert seconds.split() == ["jaxrun", "4", "seconds", "16", "5.5", "2.50", "2.00-3.00", "2"]
    assert psum.split()[-3:] == ["1.00", "1.00-1.00", "2"]


@pytest.mark.parametrize(("mode", "wrong"), [("record", ""), extended("off", "rank 0 has no flight recorder")])
def test_a_job_is_measured_and_what_it_recorded_is_looked_at(mode: str, wrong: str, monkeypatch) -> None:
    if wrong:  # the job is off, and should have recorded
        found = lockstep.misrecorded
        monkeypatch.setattr(
            lockstep, "misrecorded", lambda directory, mode, details: found(directory, "record", details)
        )
    done = lockstep.measure(mode, 2, 1, lockstep.Effort(blocks=1, seconds=0.1, programs=1))
    assert done.wrong == wrong
    if not wrong:
        assert done.least.keys() == {*lockstep.EACH_CALL, *lockstep.ONCE}
        assert done.ratio.keys() == done.pace.keys() == {"local", "global"}
        assert all(0 < seconds <= done.median[kind] for kind, seconds in done.least.items())
