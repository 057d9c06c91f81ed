"""`scripts/bench lockstep`: what it concludes from samples, and that its program measures and counts in a real job."""

from __future__ import annotations

import os
import struct
import sys
from importlib import import_module
from pathlib import Path

import pytest

from jaxrun.protocol import flight_file

BENCH = Path(__file__).parents[2] / "scripts/bench.d"
sys.path.insert(0, str(BENCH))  # its files import each other by name
_price, _price_report, lockstep = map(import_module, ("_price", "_price_report", "lockstep"))
sys.path.remove(str(BENCH))

US = 1e-6
KINDS = (*_price.EACH_CALL, *_price.ONCE)


def sample(mode, turn, least, *, ratio=1.0, pace=4 * US, wrong=""):
    """A job of two ranks in which every kind of call takes `least`, and half as much again in the median."""
    paced = ("local", "global")
    return _price.Sample(
        mode=mode,
        size=2,
        round=turn,
        least=dict.fromkeys(KINDS, least),
        median=dict.fromkeys(KINDS, 1.5 * least),
        ratio=dict.fromkeys(paced, ratio),
        pace=dict.fromkeys(paced, pace),
        wrong=wrong,
    )


def of(summaries, kind, mode):
    (found,) = (one for one in summaries if (one.kind, one.mode) == (kind, mode))
    return found


def rounds(off, again, record, ratio=1.0):
    """Samples of several rounds from the least times of each mode, in microseconds; `ratio` is that of record."""
    modes = {"off": off, _price.AGAIN: again, "record": record}
    return [
        sample(mode, turn, value * US, ratio=ratio if mode == "record" else 1.0)
        for mode, values in modes.items()
        for turn, value in enumerate(values, 1)
    ]


def test_what_a_mode_adds_is_taken_within_its_round():
    # The machine is three times as slow in the second round.
    found = of(_price.summarize(rounds([100, 300, 200], [100, 300, 200], [101, 301, 201])), "psum", "record")
    assert found.more_least == pytest.approx(1 * US) and found.adds.most == pytest.approx(1 * US)
    assert found.more_median == pytest.approx(1.5 * US)
    assert found.rounds == 3 and found.reached == "yes"


def test_where_there_is_a_pace_the_least_does_not_count():
    samples = rounds([4, 4], [4, 4], [8, 8], ratio=1.25)
    summaries = _price.summarize(samples)
    assert of(summaries, "global", "record").adds.median == pytest.approx(1 * US)
    assert of(summaries, "psum", "record").adds.median == pytest.approx(4 * US)


def test_a_call_that_waits_for_the_others_is_not_held_against_a_pace():
    strict = [sample("strict", turn, 500 * US, ratio=130.0) for turn in (1, 2)]
    summaries = _price.summarize([*rounds([4, 4], [4, 4], [5, 5]), *strict])
    assert of(summaries, "global", "strict").adds.median == pytest.approx(496 * US)
    assert of(summaries, "local", "strict").adds.median == pytest.approx(516 * US)


def test_the_noise_is_how_far_the_jobs_that_are_off_are_apart_or_half_the_span_of_the_rounds():
    apart = of(_price.summarize(rounds([100] * 3, [100, 130, 100], [100, 115, 100])), "psum", "record")
    assert apart.noise == pytest.approx(30 * US) and apart.reached == "noise"
    span = of(_price.summarize(rounds([100] * 3, [100] * 3, [90, 130, 110])), "psum", "record")
    assert span.noise == pytest.approx(20 * US) and span.reached == "noise"


def test_two_rounds_are_no_result():
    found = of(_price.summarize(rounds([100] * 2, [100] * 2, [101] * 2)), "psum", "record")
    assert found.noise is None and found.reached == "noise"


@pytest.mark.parametrize(
    ("adds", "noise", "goal", "reached"),
    [
        (1.5, 0.4, 2.0, "yes"),
        (1.5, 0.6, 2.0, "noise"),
        (2.5, 0.6, 2.0, "noise"),
        (2.5, 0.4, 2.0, "no"),
        (-5.0, 1.0, 2.0, "noise"),
        (0.2, 0.3, 0.0, "yes"),
        (0.4, 0.3, 0.0, "no"),
        (-0.4, 0.3, 0.0, "noise"),
        (0.1, None, 2.0, "noise"),
    ],
)
def test_a_goal_is_reached_only_beyond_the_noise(adds, noise, goal, reached):
    assert _price.against_goal(adds, noise, goal) == reached


def test_a_job_that_went_wrong_counts_for_nothing():
    samples = [*rounds([100, 100], [100, 100], [101, 101]), sample("record", 3, 900 * US, wrong="status 1")]
    assert of(_price.summarize(samples), "psum", "record").rounds == 2
    assert not any(one.mode == "strict" for one in _price.summarize([*samples, sample("strict", 1, 1, wrong="hung")]))


def test_the_table_has_a_line_for_each_kind_and_mode_with_units_of_its_own():
    text = _price_report.render(_price.summarize(rounds([100] * 3, [100] * 3, [101.5] * 3)))
    each, once = text.split("\n\n")
    (psum,) = (line.split() for line in each.splitlines() if line.startswith("psum") and "record" in line)
    assert psum[1:5] == ["2", "record", "102", "152"] and psum[-3:] == ["<=", "2.00", "yes"]
    (first,) = (line.split() for line in once.splitlines() if line.startswith("first") and "record" in line)
    assert first[-8:-6] == ["0.10", "0.15"]
    assert len(each.splitlines()) == 1 + 2 * len(_price.EACH_CALL)


def recorder(directory, made, level=flight_file.EVERY_CALL, strict=0):
    run_dir = directory / "jaxrun-runs" / "latest"
    run_dir.mkdir(parents=True)
    header = [0] * flight_file.HEADER_WORDS
    header[flight_file.RECORD_COUNT_WORD], header[flight_file.LEVEL_WORD], header[flight_file.STRICT_WORD] = (
        made,
        level,
        strict,
    )
    (run_dir / flight_file.flight_file_name(0)).write_bytes(struct.pack(f"={flight_file.HEADER_WORDS}Q", *header))


@pytest.mark.parametrize(
    ("mode", "header", "fault"),
    [
        ("record", {"made": 10}, ""),
        ("record", {"made": 9}, "recorded 9 of 10"),
        ("record", {"made": 10, "level": flight_file.FIRST_CALLS}, "level 2 of 3"),
        ("strict", {"made": 10}, "strict: 0"),
        ("strict", {"made": 10, "strict": 1}, ""),
        ("record", None, "no flight recorder"),
        ("off", {"made": 10}, "a flight recorder"),
        ("off", None, ""),
    ],
)
def test_a_mode_that_was_not_in_force_is_found_out(tmp_path, mode, header, fault):
    if header is not None:
        recorder(tmp_path, **header)
    found = lockstep._misrecorded(tmp_path, mode, [{"made": 10}])
    assert fault in found and bool(found) is bool(fault)


def test_a_short_job_is_measured_and_all_its_calls_were_recorded():
    effort = lockstep.Effort(blocks=1, seconds=0.1, programs=1)
    done = lockstep.measure("record", 2, 1, effort, dict(os.environ))
    assert not done.wrong
    assert done.least.keys() == done.median.keys() == set(KINDS)
    assert done.ratio.keys() == done.pace.keys() == {"local", "global"}
    assert all(0 < seconds <= done.median[kind] for kind, seconds in done.least.items())
