"""A job whose ranks are out of step for certain, and stand still, is ended in the default mode."""

import pytest
from calls_by_hand import flight
from msgspec.structs import replace
from simulation import IN_JAX, IN_QUEUE

from jaxrun.analysis.verdict import verdict_text
from jaxrun.protocol.flight import PendingCall, ProgramInfo
from jaxrun.protocol.worker_messages import Call


def first_call(rank, key):
    return Call(rank, 0.0, "0-1", 3, 2, key, "c", f"jit({key})", "train.py:9 main", waits_for_answer=False)


@pytest.fixture
def job(simulate):
    """Both ranks have made two equal calls, and enter different ones as their third."""
    job = simulate(2, lockstep="record").run().wait(3)
    pending = PendingCall("0-1", 3, 1, 1, 3.0)
    job.flights = {rank: flight("k", "k", group="0-1", pending=pending) for rank in range(2)}
    job.stacks = dict.fromkeys(range(2), IN_JAX)
    job.handle(first_call(0, "a"), first_call(1, "b"))
    return job.wait(3)


def test_ranks_that_wait_in_calls_that_cannot_match_end_the_job_after_a_while(job):
    assert any("disagree at cross-process call #3" in text for _, text in job.printed)
    assert job.wait(5).outcome is None
    job.wait(20)
    assert (job.verdict.outcome, job.verdict.exit_code) == ("diverged", 1)
    assert "have made no call for 10 s, so the job was ended" in verdict_text.headline_of(job.verdict)
    assert job.finished_at < 26


def test_a_rank_that_is_not_in_jax_may_still_come_to_the_call(job):
    job.stacks = {0: IN_JAX, 1: IN_QUEUE}
    job.flights[1] = flight("k", "k", group="0-1")
    assert job.wait(120).outcome is None


def test_a_job_whose_ranks_go_on_is_not_ended(job):
    job.flights = {rank: flight("k", "k", "k", group="0-1") for rank in range(2)}
    assert job.wait(120).outcome is None


def test_a_compilation_for_a_call_that_cannot_match_is_no_progress(job):
    job.flights[1] = replace(job.flights[1], pending=None, compiling=("jit(b)", 3.0))
    job.stacks = {0: IN_JAX, 1: IN_QUEUE}
    assert job.wait(30).verdict.outcome == "diverged"


IN_NATIVE_CODE = """Thread 0x1 (most recent call first):
  File "/home/me/train.py", line 9 in main
"""


def test_a_rank_asleep_in_native_code_is_in_jax_only_if_its_recorder_says_so(job):
    job.stacks = {0: IN_JAX, 1: IN_NATIVE_CODE}
    assert job.wait(120).outcome is None
    job.flights[1] = replace(job.flights[1], standing=(1, 1e9))
    assert job.wait(60).verdict.outcome == "diverged"


# ---- programs that were run before, whose calls are not announced


def entered(site, *, alternates=False):
    """The flight of a rank that has called f at site 1 and g at site 2, and stands in its next call at this site."""
    made = flight("f", "g", "f", "g", group="0-1")
    sites = (1, 1, 1, 1) if alternates else (1, 2, 1, 2)
    calls = tuple(replace(call, site=number) for call, number in zip(made.calls, sites, strict=True))
    places = {number: (f"/home/me/train.py:{10 * number} main",) for number in (1, 2)}
    return replace(made, calls=calls, sites=places, entered=4.5, standing=(site, 1e9))


@pytest.fixture
def known(simulate):
    job = simulate(2, lockstep="record").run()
    job.stacks = dict.fromkeys(range(2), IN_NATIVE_CODE)
    return job


def test_ranks_in_calls_of_different_programs_that_they_have_run_before_end_the_job(known):
    known.flights = {0: entered(1), 1: entered(2)}
    known.wait(60)
    assert any("disagree at cross-process call #5" in text for _, text in known.printed)
    assert known.verdict.outcome == "diverged"


def test_a_rank_in_a_new_call_differs_from_one_in_a_known_call(known):
    pending = PendingCall("0-1", 5, 9, 1, 4.5)
    new = entered(1)
    programs = {**new.programs, 9: ProgramInfo("jit(h)", "h", "h")}
    known.flights = {0: entered(2), 1: replace(new, programs=programs, pending=pending, standing=None, entered=0.0)}
    known.stacks = {0: IN_NATIVE_CODE, 1: IN_JAX}
    assert known.wait(60).verdict.outcome == "diverged"


@pytest.mark.parametrize(
    "flights",
    [
        {0: entered(1), 1: entered(1)},
        {0: entered(1), 1: replace(entered(2), entered=0.0)},
        {0: entered(1, alternates=True), 1: entered(2)},
        {0: entered(1), 1: replace(entered(2), standing=None)},
    ],
    ids=["in the same call", "one in no call", "at a line of several programs", "elsewhere in native code"],
)
def test_ranks_that_may_be_in_the_same_call_are_left_alone(known, flights):
    known.flights = flights
    assert known.wait(300).outcome is None
    assert not known.printed
