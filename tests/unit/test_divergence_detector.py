"""The head finds out whether ranks diverge: by the calls that they send, and by their flight recorders."""

import signal

import pytest
from calls_by_hand import ALL, call, flight, sent
from msgspec.structs import replace

from jaxrun.analysis.lockstep.divergence import CallOrder
from jaxrun.analysis.verdict import verdict_text
from jaxrun.controller.head.call_matcher import MISMATCH_SETTLE_S
from jaxrun.job_events.events import Requested
from jaxrun.protocol.agent_messages import WorkerExited
from jaxrun.protocol.flight import PendingCall, ProgramDetails
from jaxrun.protocol.job_messages import AnswerState, StacksRequest
from jaxrun.protocol.query_messages import FlightAtEnd, RankReply
from jaxrun.protocol.worker_messages import CallMismatch, Proceed

IN_JAX = 'Thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 9 in <module>\n'


def details(shape):
    arguments = (("x", f"float32[{shape}]", "P('data',)"),)
    return ProgramDetails("step at /home/me/model.py:4", arguments, mesh="data=3: 0,1,2")


def final_report(job):
    return verdict_text.format_report(job.verdict, None)


def end_well(job):
    """All ranks end, with their recorders as they are."""
    job.handle(*(FlightAtEnd(rank, found) for rank, found in job.flights.items()))
    return job.done(0, 1, 2).exit(0, 0, 1, 2)


def same(mine, others, differing=0):
    """Flights of which one rank's differs."""
    return dict.fromkeys(range(3), others) | {differing: mine}


# ---- strict


@pytest.fixture
def strict(simulate):
    return simulate(3, lockstep="strict").run()


def test_a_lowered_program_that_is_not_known_is_like_any(strict):
    strict.handle(call(0), call(1, code=""), call(2))
    assert len(sent(strict, Proceed)) == 1
    strict.handle(call(0, 2, code=""), call(1, 2), call(2, 2, code="other")).wait(1)
    assert len(sent(strict, CallMismatch)) == 1


def test_the_divergence_is_sent_to_all_ranks_once_their_programs_are_known(strict):
    strict.programs = {(0, 7): details(32), (2, 7): details(31)}
    strict.handle(call(0), call(2, key="other")).wait(0.05).handle(call(1)).wait(0.5)
    ((time, ranks, message),) = sent(strict, CallMismatch)
    assert time == 50 + round(MISMATCH_SETTLE_S * 1000) + 2 and set(ranks) == {0, 1, 2} and message.number == 1
    assert "float32[32]@P('data') on ranks 0-1 and float32[31]@P('data') on rank 2" in message.reason
    assert strict.outcome is None  # the program may catch it


def test_without_program_details_the_divergence_is_sent_after_a_moment(strict):
    strict.handle(call(0), call(2, code="other"), call(1)).wait(2)
    ((time, _, message),) = sent(strict, CallMismatch)
    assert time <= 700 and "disagree at cross-process call #1" in message.reason


def test_a_rank_that_enters_a_diverged_call_late_is_sent_the_divergence_at_once(strict):
    strict.handle(call(0), call(2, key="other")).wait(1)
    assert not sent(strict, CallMismatch)
    strict.wait(2).handle(call(1))
    assert [ranks for _, ranks, _ in sent(strict, CallMismatch)] == [(0, 2), (1,)]


def test_a_rank_that_waits_for_a_finished_one_is_sent_its_number_of_calls(strict):
    strict.handle(FlightAtEnd(2, flight("a", "b"))).done(2)
    strict.handle(call(0, 3), call(1, 3)).wait(1)
    ((_, ranks, message),) = sent(strict, CallMismatch)
    assert ranks == (0, 1) and "has made only 2 calls and is finished" in message.reason and "rank 2" in message.reason


def test_waiting_first_and_the_end_of_another_later_is_the_same(strict):
    strict.handle(call(0, 1), call(1, 1)).wait(5)
    assert not sent(strict, CallMismatch)
    strict.handle(FlightAtEnd(2, flight())).done(2).wait(1)
    assert "has made no call and is finished" in sent(strict, CallMismatch)[0][2].reason


def test_groups_that_wait_for_each_other_are_sent_the_divergence(strict):
    strict.handle(call(0, group="0-1"), call(1, group="1-2", place="train.py:12 main"), call(2, group="0,2")).wait(1)
    verdict = sent(strict, CallMismatch)
    assert sorted(rank for _, ranks, _ in verdict for rank in ranks) == [0, 1, 2]
    assert "waits in call #1 of ranks 1-2, jit(step) at train.py:12 main" in verdict[0][2].reason


def test_one_that_still_works_may_come(strict):
    strict.handle(call(0, group="0-1"), call(1, group="1-2")).wait(60)
    assert not sent(strict, CallMismatch)
    strict.handle(call(2, group="1-2"))
    assert [ranks for _, ranks, _ in sent(strict, Proceed)] == [(1, 2)]


def test_all_ranks_that_were_sent_the_divergence_have_time_to_raise_it(strict):
    strict.handle(call(0), call(1), call(2, key="other")).wait(1)
    strict.handle(strict.failure(2, "DivergenceError", "the processes disagree")).exit(1, 2).wait(0.3)
    assert not strict.kills()
    strict.handle(*(strict.failure(rank, "DivergenceError", "the processes disagree") for rank in (0, 1)))
    strict.exit(1, 1).exit(1, 0).wait(1)
    verdict = strict.verdict
    assert verdict.culprits == (0, 1, 2) and not strict.kills()


def test_a_rank_that_does_not_raise_the_divergence_delays_nobody(strict):
    strict.handle(call(0), call(1), call(2, key="other")).wait(1)
    strict.handle(strict.failure(2, "DivergenceError", "the processes disagree")).exit(1, 2).wait(2)
    assert {rank for _, ranks in strict.kills() for rank in ranks} == {0, 1}


def test_a_divergence_that_ranks_raise_is_none_of_the_job_even_if_their_recorders_showed_it_first(strict):
    strict.flights = same(flight("a"), flight("b"), 2)
    assert len(strict.wait(2).printed) == 1
    strict.handle(call(0, key="b"), call(1, key="b"), call(2, key="a")).wait(1)
    assert len(sent(strict, CallMismatch)) == 1 and len(strict.printed) == 1
    assert end_well(strict).wait(5).verdict.exit_code == 0 and "disagree" in final_report(strict)


def test_a_rank_that_works_alone_waits_for_nobody(simulate):
    job = simulate(2, lockstep="strict").run().handle(FlightAtEnd(0, flight(group="0-1"))).done(0)
    job.handle(call(1, group="0-1")).wait(1)
    assert len(sent(job, CallMismatch)) == 1


# ---- record: first calls


@pytest.fixture
def record(simulate):
    return simulate(3, lockstep="record").run()


def test_first_calls_that_differ_are_reported_once_and_kept_for_the_verdict(record):
    record.programs = {(0, 7): details(32), (1, 7): details(31)}
    record.handle(call(0, waits=False), call(1, key="other", waits=False)).wait(3)
    record.handle(call(0, 2, waits=False), call(1, 2, key="other", waits=False)).wait(0.5)
    assert len(record.printed) == 1 and "argument x is float32[32]" in record.lines[0]
    assert record.outcome is None and not sent(record, CallMismatch)
    end_well(record).wait(1)
    assert record.outcome.end.reason == "ok" and record.outcome.divergences[0].number == 1
    text = final_report(record)
    assert "done in" in text and "may be wrong" in text and "argument x is float32[32]" in text


def test_first_calls_that_no_other_rank_reports_are_no_divergence(record):
    record.handle(*(call(0, number, key=f"k{number}", waits=False) for number in range(1, 3000))).wait(100)
    assert not record.printed


def test_a_first_call_that_needs_a_finished_rank_is_reported(record):
    record.handle(FlightAtEnd(2, flight("a"))).done(2).handle(call(0, 2, waits=False)).wait(3)
    assert len(record.printed) == 1 and "has made only 1 call and is finished" in record.lines[0]


def test_a_finished_rank_is_not_missed_in_calls_that_it_made(record):
    record.handle(FlightAtEnd(2, flight("a", "b"))).done(2).handle(call(0, 2, waits=False)).wait(0.5)
    assert not record.printed


# ---- record: recorders


def test_recorders_are_read_more_and_more_rarely(record):
    record.flights = {rank: flight("a", "b") for rank in range(3)}
    record.wait(300)
    times = [round(time) for time, detail, _ in record.queries if detail == "calls"]
    assert times[:4] == [1, 3, 5, 8] and 30 <= times[-1] - times[-2] <= 31 and not record.printed


def test_histories_that_differ_are_found_while_the_job_runs(record):
    record.flights = same(flight("a", "a", "b"), flight("a", "b", "a"), 2)
    record.wait(2)
    assert [ranks for _, detail, ranks in record.queries if detail == "history"] == [(0, 2)]
    assert len(record.printed) == 1 and "cross-process call #2" in record.lines[0] and record.outcome is None
    record.wait(100)
    assert len(record.printed) == 1


def test_what_follows_a_divergence_is_not_told(record):
    before, after = ["a"] * 5, ["a", "b", "a"]
    record.flights = same(flight(*before, "log", *after), flight(*before, *after))
    record.wait(2)
    record.flights = same(flight(*before, "log", *after, "c", "a"), flight(*before, *after, "d", "a"))
    record.wait(100)
    end_well(record).wait(5)
    assert [text.partition("\n")[0] for text in record.lines] == ["the processes disagree at cross-process call #6"]
    assert final_report(record).count("disagree") == 1


# ---- record: programs of replicated values


def replicated(rank, code, key="k"):
    return call(rank, 0, key=key, code=code, waits=False, name="jit(update)")


def test_a_program_that_exchanges_nothing_may_be_run_by_one_rank(record):
    record.handle(replicated(0, "log"), replicated(1, "c"), replicated(2, "c"), replicated(0, "c"))
    record.handle(replicated(0, "c", key="of other shapes"))
    end_well(record.wait(100)).wait(5)
    assert not record.printed and record.outcome.divergences == ()


@pytest.mark.parametrize("seconds", [0, 100])
def test_a_program_that_exchanges_nothing_must_be_the_same_where_all_run_it(record, seconds):
    record.handle(replicated(0, "c"), replicated(1, "c"), replicated(2, "other")).wait(seconds)
    end_well(record).wait(5)
    (found,) = record.outcome.divergences
    assert "the processes disagree at a program of replicated values\n" in final_report(record)
    assert [group.ranks for group in found.call_groups] == [(0, 1), (2,)] and len(record.printed) == (seconds > 0)


def test_a_request_for_stacks_compares_the_histories(record):
    record.wait(200)
    record.flights = same(flight("a", "a"), flight("a", "b"), 2)
    record.handle(Requested("1", StacksRequest())).wait(1)
    assert len(record.printed) == 1 and "cross-process call #2" in record.lines[0]


def test_a_job_that_only_looks_for_what_to_say_at_its_end_refuses_requests(record):
    record.flights = same(flight("b", "a"), flight("a", "b"), 2)
    end_well(record).handle(Requested("1", StacksRequest()))
    ((number, answer),) = record.answered
    assert number == "1" and answer.state is AnswerState.REFUSED and "ending" in answer.text


def test_other_chains_of_the_same_programs_are_no_news(record):
    usual = flight("a", "b")
    odd = replace(usual, calls=tuple(replace(made, chain=made.chain + 1) for made in usual.calls))
    record.flights = same(odd, usual, 2)
    record.wait(100)
    end_well(record).wait(5)
    assert not record.printed and record.outcome.divergences == ()


def test_the_end_of_the_job_does_not_wait_forever_for_an_answer(record):
    for rank, key in enumerate("aab"):  # nobody can be asked any more
        record.handle(FlightAtEnd(rank, flight(key)))
    end_well(record).wait(5)
    assert record.outcome.end.reason == "ok" and record.finished_at < 1


def test_an_end_that_is_in_step_is_not_put_off(record):
    record.flights = dict.fromkeys(range(3), flight("a", "b"))
    assert end_well(record).outcome.divergences == ()


def test_a_late_answer_of_another_rank_does_not_bring_back_calls_from_before_a_ranks_end(record):
    record.answers = False  # they come by hand
    record.wait(1.1)
    ((_, _, asked),) = record.queries
    answers = [RankReply(rank, 1, flight=flight("a")) for rank in asked]
    record.handle(*answers[:2], FlightAtEnd(0, flight("a", "b"))).done(0)
    record.handle(answers[2], *(FlightAtEnd(rank, flight("a", "b")) for rank in (1, 2))).done(1, 2)
    assert record.exit(0, 0, 1, 2).wait(5).outcome.end.reason == "ok" and record.outcome.divergences == ()


def test_extra_calls_of_some_ranks_are_reported_after_success(record):
    record.flights = same(flight("a", "b"), flight("a"))
    end_well(record).wait(5)
    text = final_report(record)
    assert "only rank 0 made this call" in text and "ranks 1-2" in text
    assert record.outcome.divergences[0].number == 2 and record.finished_at < 1


def test_fewer_calls_of_stopped_ranks_are_not_a_divergence(record):
    record.handle(FlightAtEnd(1, flight("a", "b")), record.failure(1)).exit(1, 1).wait(0.04)
    record.handle(FlightAtEnd(0, flight("a")), FlightAtEnd(2, flight("a"))).wait(5)
    assert record.outcome.end.reason == "failed" and record.outcome.divergences == ()


def test_a_crash_is_a_consequence_of_ranks_out_of_step(record):
    record.handle(call(0, waits=False), call(1, key="other", waits=False), call(2, waits=False)).wait(0.05)
    record.handle(WorkerExited(1, -6, stderr_tail="gloo::EnforceNotMet")).wait(5)
    verdict = record.verdict
    assert verdict.outcome == "diverged" and verdict.exit_code == 134
    assert verdict.headline.startswith(
        "the ranks were out of step at cross-process call #1 (jit(step), train.py:9); rank 1"
    )


def test_a_ranks_own_error_stays_the_headline(record):
    record.handle(call(0, waits=False), call(1, key="other", waits=False)).wait(0.5).handle(record.failure(1)).exit(
        1, 1
    ).wait(5)
    verdict = record.verdict
    assert verdict.outcome == "failed" and "raised ValueError" in verdict.headline and "disagree" in verdict.divergence


def test_a_rank_that_went_on_without_a_finished_one_is_stopped_soon(record):
    record.stacks = {0: IN_JAX, 1: IN_JAX}
    entered = PendingCall(ALL, 2, 1, 1, 3.0)
    record.flights = {0: flight("a", pending=entered), 1: flight("a", pending=entered), 2: flight("a")}
    record.handle(FlightAtEnd(2, flight("a"))).done(2).wait(8)
    assert record.outcome.end.reason == "early-exit" and record.outcome.decided_at < 4


def test_a_finished_rank_that_has_made_the_call_is_not_said_to_lack_it(record):
    usual = ["a"] * 7
    record.flights = {0: flight(*usual[:4]), 1: flight(*usual), 2: flight(*usual[:3])}
    record.handle(*(FlightAtEnd(rank, record.flights[rank]) for rank in (1, 2))).done(1, 2)
    record.handle(call(0, 5, key="b", waits=False)).wait(4)
    (text,) = record.lines
    assert "rank 2:  has made only 3 calls and is finished" in text and "rank 1: not known" in text
    assert "made only 7" not in text and "only rank 0" not in text


def differ(job, ours, theirs):
    """Ranks 0 and 1 differ in their first calls, as their recorders show 1 s into the run."""
    job.programs = {(0, 1): details(32), (1, 1): details(31)}
    job.flights = {0: ours, 1: theirs}
    return job


def test_the_advice_waits_for_further_calls_if_the_first_ones_show_no_cause(record):
    differ(record, flight("a", code=""), flight("b", code="")).wait(1.2)
    assert not record.printed
    record.flights = {0: flight("a", "b", code=""), 1: flight("b", "a", code="")}
    record.wait(1)
    assert len(record.printed) == 1 and "in another order" in " ".join(record.lines[0].split())


def test_a_report_does_not_wait_for_late_calls_and_its_advice_follows_once_they_show_more(record):
    differ(record, flight("a", code=""), flight("b", code="")).wait(2)
    assert len(record.printed) == 1 and "another order" not in record.lines[0]
    record.wait(20)
    assert len(record.printed) == 1  # nothing is new
    record.flights = {0: flight("a", "b", code=""), 1: flight("b", "a", code="")}
    record.wait(31)
    assert len(record.printed) == 2 and record.lines[1].startswith(
        "the next calls after cross-process call #1 show more"
    )
    assert "make the same calls in another order" in record.lines[1]
    end_well(record).wait(5)
    (divergence,) = record.outcome.divergences
    assert divergence.order is CallOrder.REORDERED and record.outcome.shown_divergences == (divergence,)
    assert len(record.printed) == 2


def test_the_advice_follows_at_the_end_of_the_job_at_the_latest(record):
    differ(record, flight("a", code=""), flight("b", code="")).wait(2)
    record.flights = {0: flight("a", "b", code=""), 1: flight("b", "a", code=""), 2: flight()}
    end_well(record).wait(1)
    assert len(record.printed) == 2 and "make the same calls in another order" in record.lines[1]
    assert record.finished_at < 3 and record.outcome.divergences[0].order is CallOrder.REORDERED


def test_calls_that_decide_nothing_are_no_longer_read_after_many(record):
    differ(record, flight("a", code=""), flight("b", code="")).wait(2)
    record.flights = {rank: flight(first, *"cdefg" * 20, code="") for rank, first in enumerate("ab")}
    record.wait(40)
    assert not record.head._divergence.reports._pending and len(record.printed) == 1


def test_a_rank_that_tells_its_calls_too_late_does_not_decide_the_advice(record):
    differ(record, flight("a", code=""), flight("b", code=""))
    record.programs = {}  # nobody answers
    record.wait(3)
    assert len(record.printed) == 1 and "last batch" not in record.lines[0]
    record.programs = {(0, 1): details(32), (1, 1): details(31)}
    record.flights = {0: flight("a", "b", code=""), 1: flight("b", "a", code="")}
    record.wait(31)
    assert "make the same calls in another order" in record.lines[-1]


def test_a_job_that_ends_before_its_further_calls_were_read_still_reports(record):
    differ(record, flight("a", code=""), flight("b", code="")).wait(1.2)
    assert not record.printed
    record.flights[2] = flight()
    end_well(record).wait(1)
    assert record.outcome.divergences and "jit(b) on rank 1" in final_report(record)


def searching():
    return replace(flight("a"), nan_search=(0.5, 1.5)), flight("b")


def test_a_search_for_a_nan_is_not_shown_if_its_error_follows(record):
    differ(record, *searching()).wait(1.5).handle(record.failure(1)).exit(1, 1).wait(5)
    assert not any("disagree" in line for line in record.lines)
    verdict = record.verdict
    assert "raised ValueError" in verdict.headline and not verdict.divergence


def test_a_search_for_a_nan_is_shown_if_the_job_goes_on(record):
    differ(record, *searching()).wait(2)
    assert not record.printed
    record.wait(2)
    assert len(record.printed) == 1 and "jax_debug_nans" in record.lines[0]


# ---- the end of a job whose programs have ended well


@pytest.mark.parametrize(("mode", "exit_code"), [("record", 0), ("check", 1), ("strict", 1)])
def test_a_success_out_of_step_is_a_failure_unless_differences_are_only_recorded(simulate, mode, exit_code):
    job = simulate(3, lockstep=mode).run()
    job.flights = same(flight("a", "b"), flight("a"))
    verdict = end_well(job).wait(5).verdict
    assert (verdict.outcome, verdict.exit_code) == ("diverged" if exit_code else "ok", exit_code)
    report = final_report(job)
    assert "only rank 0 made this call" in report and ("--lockstep record" in report) == (exit_code == 1)
    assert verdict.headline.startswith("ran to its end in ") or not exit_code


def test_a_success_in_step_is_one_and_so_is_a_preemption_out_of_step(simulate):
    job = simulate(3, lockstep="check").run()
    job.flights = dict.fromkeys(range(3), flight("a", "b"))
    assert end_well(job).outcome.end.reason == "ok"
    job = simulate(3, lockstep="check").run().listen()
    job.interrupt(signal.SIGTERM)
    job.flights = same(flight("a", "b"), flight("a", "c"))
    assert end_well(job).wait(5).verdict.exit_code == 75


# ---- fail


@pytest.fixture
def failing(simulate):
    return simulate(3, lockstep="fail").run()


def is_failed(job):
    verdict = job.verdict
    assert (job.outcome.end.reason, verdict.outcome, verdict.exit_code) == ("diverged", "diverged", 1)
    assert verdict.headline.startswith("the ranks were out of step at cross-process call #")
    assert verdict.divergence.startswith("the processes disagree at cross-process call #")
    return final_report(job)


def test_fail_stops_all_ranks_as_soon_as_first_calls_differ(failing):
    failing.handle(call(0, waits=False), call(1, key="other", waits=False), call(2, waits=False)).wait(1.0)
    assert not sent(failing, Proceed) and not sent(failing, CallMismatch)  # no call waits for an answer
    assert failing.outcome.decided_at < 1
    assert all(worker.killed_by_launcher for worker in failing.outcome.workers)
    assert len(failing.printed) == 1 and "disagree" in failing.lines[0]
    assert "--lockstep fail ended the job" in is_failed(failing)


def test_fail_stops_all_ranks_as_soon_as_their_recorders_differ(failing):
    failing.flights = same(flight("a", "a", "b"), flight("a", "b", "a"), 2)
    failing.wait(2.5)
    is_failed(failing)


def test_fail_turns_a_success_into_a_failure(failing):
    failing.flights = same(flight("a", "b"), flight("a"))
    end_well(failing).wait(5)
    assert "only rank 0 made this call" in is_failed(failing)


def test_a_job_that_diverged_does_not_count_as_preempted(failing):
    failing.listen()
    failing.interrupt(signal.SIGTERM)
    failing.flights = same(flight("a", "b"), flight("a", "c"))
    end_well(failing).wait(5)
    is_failed(failing)


def test_fail_leaves_an_error_of_its_own_alone(failing):
    failing.handle(failing.failure(1)).exit(1, 1).wait(5)
    assert (failing.verdict.outcome, failing.verdict.exit_code) == ("failed", 1)


def test_fail_lets_a_search_for_a_nan_come_to_its_error(failing):
    differ(failing, *searching()).wait(1.5).handle(failing.failure(1)).exit(1, 1).wait(5)
    assert failing.verdict.outcome == "failed" and "raised ValueError" in failing.verdict.headline


def test_fail_leaves_ranks_in_step_alone(failing):
    failing.flights = dict.fromkeys(range(3), flight("a", "b"))
    assert end_well(failing).outcome.end.reason == "ok"


def test_off_reads_nothing(simulate):
    job = simulate(3, lockstep="off").run().wait(1000)
    assert not job.queries and job.head.deadline() is None
