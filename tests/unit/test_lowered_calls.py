"""Calls that ranks announce before their programs are compiled."""

import pytest
from calls_by_hand import call, lowered, sent

from jaxrun.protocol.worker_messages import CallMismatch, Proceed

# ---- strict


@pytest.fixture
def strict(simulate):
    return simulate(3, lockstep="strict").run()


def proceeded(job):
    return [sorted(ranks) for _, ranks, _ in sent(job, Proceed)]


def test_all_compile_once_all_have_lowered_and_call_once_all_have_compiled(strict):
    strict.handle(lowered(0, waits=True), lowered(1, waits=True))
    assert not proceeded(strict)
    strict.handle(lowered(2, waits=True))
    assert proceeded(strict) == [[0, 1, 2]]
    strict.handle(call(1), call(0)).wait(100)
    assert proceeded(strict) == [[0, 1, 2]]
    strict.handle(call(2)).wait(1)
    assert proceeded(strict) == [[0, 1, 2], [0, 1, 2]] and not sent(strict, CallMismatch)


def test_a_rank_that_has_the_program_waits_while_the_others_compile(strict):
    strict.handle(call(0), lowered(1, waits=True), lowered(2, waits=True))
    assert proceeded(strict) == [[1, 2]]
    strict.handle(call(1), call(2)).wait(1)
    assert proceeded(strict) == [[1, 2], [0, 1, 2]] and not sent(strict, CallMismatch)


def test_after_a_compilation_that_fails_everywhere_another_program_may_be_the_call(strict):
    strict.handle(*(lowered(rank, code="too large", waits=True) for rank in range(3)))
    strict.handle(*(lowered(rank, waits=True) for rank in range(3))).handle(*(call(rank) for rank in range(3))).wait(1)
    assert proceeded(strict) == [[0, 1, 2]] * 3 and not sent(strict, CallMismatch)


def test_a_program_that_differs_is_never_compiled(strict):
    strict.handle(lowered(0, waits=True), lowered(1, waits=True), lowered(2, code="other", waits=True)).wait(0.9)
    ((_, ranks, message),) = sent(strict, CallMismatch)
    assert sorted(ranks) == [0, 1, 2] and message.number == 1 and not proceeded(strict)


def test_a_rank_that_compiles_and_one_that_runs_another_program_differ(strict):
    strict.handle(lowered(0, waits=True), lowered(1, waits=True), call(2, code="other")).wait(0.9)
    assert len(sent(strict, CallMismatch)) == 1 and not proceeded(strict)


# ---- record


@pytest.fixture
def record(simulate):
    return simulate(3, lockstep="record").run()


def test_lowered_programs_that_differ_are_reported_within_a_second_while_they_are_compiled(record):
    record.handle(lowered(0), lowered(1, code="other")).wait(0.9)  # and rank 2 has not come
    assert len(record.printed) == 1 and "disagree at cross-process call #1" in record.lines[0]
    record.handle(lowered(2), *(call(rank, code="other" if rank == 1 else "c", waits=False) for rank in range(3)))
    record.wait(100)
    assert len(record.printed) == 1


def test_programs_that_are_alike_are_silent(record):
    for number in range(1, 30):
        record.handle(*(lowered(rank, number) for rank in (2, 0, 1)))
        record.handle(*(call(rank, number, waits=False) for rank in (1, 0, 2)))
    record.wait(100)
    assert not record.printed and not sent(record, Proceed)


def test_ranks_may_come_to_a_failed_compilation_at_different_times(record):
    record.handle(lowered(0, code="too large"), lowered(0), call(0, waits=False), lowered(1, code="too large"))
    record.wait(1).handle(lowered(1), lowered(2, code="too large"), lowered(2)).wait(100)
    assert not record.printed


def test_a_program_that_was_lowered_in_another_order_may_still_come(record):
    record.handle(lowered(0, code="of a thread"), lowered(1), lowered(2)).wait(0.05).handle(lowered(0)).wait(100)
    assert not record.printed
