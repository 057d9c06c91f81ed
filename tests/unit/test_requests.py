"""A running job is asked from elsewhere: how far all ranks are, for profiles of the same calls"""

import pytest

from jaxrun.analysis.diagnosis.overview import Overview, RankEnd
from jaxrun.analysis.lockstep.profile_plan import ProfiledCalls, calls_per_step, plan_profile
from jaxrun.controller.head import requests
from jaxrun.controller.head.head_state import JobPhase
from jaxrun.errors import UnavailableError, UsageError
from jaxrun.job_client import job_requests
from jaxrun.job_client.running_job import RequestRefused
from jaxrun.job_events.events import AgentLost, Requested
from jaxrun.protocol.flight import DispatchedCall, Flight, PendingCall
from jaxrun.protocol.flight_file import COMPILATIONS, EVERY_CALL
from jaxrun.protocol.job_messages import (
    Answer,
    AnswerState,
    OverviewRequest,
    ProfileRequest,
)
from jaxrun.protocol.query_messages import RankDetail
from jaxrun.protocol.worker_messages import ProfileCalls, ProfileEnded


def calls_made(made, *, group="0-3", per_second=10.0, pattern=(1,), pending=None, **more):
    """The flight of a rank that has made so many calls, of the programs of `pattern` in turn."""
    first = max(1, made - 15)
    calls = tuple(
        DispatchedCall(n / per_second, group, n, n, pattern[n % len(pattern)], 7) for n in range(first, made + 1)
    )
    return Flight(EVERY_CALL, calls=calls, call_counts={group: made, **more}, pending=pending)


def overview(job):
    """What the last request was answered by."""
    _, answer = job.answered[-1]
    assert answer.state is AnswerState.DONE
    assert isinstance(answer.content, Overview)
    return answer.content


def test_a_job_that_starts_is_answered_for_the_processes_that_there_are(simulate):
    job = simulate(3)
    job.spawn(0, 1)
    job.handle(Requested("1", OverviewRequest())).wait(0.2)
    assert job.queries[-1][1:] == (RankDetail.VITALS, (0, 1))
    assert (overview(job).phase, overview(job).live, overview(job).ends) == ("starting", (0, 1), {})


def test_all_that_ask_get_the_answer_and_ranks_that_have_ended_say_how(simulate):
    job = simulate(3).run()
    job.flights = {rank: Flight(EVERY_CALL, call_counts={"0-2": 5}) for rank in range(3)}
    job.done(1)
    job.handle(Requested("1", OverviewRequest()), Requested("2", OverviewRequest())).wait(0.2)
    assert [number for number, _ in job.answered] == ["1", "2"]
    assert overview(job).phase == "running" and overview(job).ends == {
        1: RankEnd("finished", is_failure=False, has_finished=True)
    }
    assert overview(job).flights[2].call_counts == {"0-2": 5}
    job.handle(job.failure(2)).handle(Requested("3", OverviewRequest())).wait(0.2)
    assert overview(job).ends[2] == RankEnd("raised ValueError") and overview(job).phase != "running"


def test_how_many_calls_a_step_has_is_known_from_recorders_that_were_read_for_another_reason(simulate):
    job = simulate(2, lockstep="record").run()
    job.flights = dict.fromkeys(range(2), calls_made(12, group="0-1", pattern=(1, 2)))
    job.wait(5.0)
    job.handle(Requested("1", OverviewRequest())).wait(0.2)
    assert overview(job).calls_per_step == 2


# ---- a fault in jaxrun


def fail(*args, **more):
    raise OverflowError("too large")


def test_a_request_that_fails_in_jaxrun_is_answered_with_the_error_and_the_job_continues(job, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(requests, "plan_profile", fail)
        ask(job)
    assert last_answer(job).state is AnswerState.REFUSED
    assert "OverflowError: too large (test_requests.py:" in last_answer(job).text
    ask(job, "2")
    assert last_answer(job).state is AnswerState.PROGRESS and job.head.phase is JobPhase.RUNNING


def test_a_question_whose_replies_cannot_be_used_is_answered_with_the_error(job, monkeypatch):
    monkeypatch.setattr(requests, "steps_in", fail)
    job.handle(Requested("1", OverviewRequest())).wait(0.2)
    assert "jaxrun failed at this request: OverflowError" in last_answer(job).text
    assert job.head.phase is JobPhase.RUNNING


# ---- profiles

REQUEST = ProfileRequest(5, "/runs/profile", "2026_11_22", 1.0)


def ended(rank, *, error="", last=35, late=False, session=REQUEST.session):
    return ProfileEnded(rank, 1.0, 0.5, session, f"/runs/{rank}", 100, last, error, late)


@pytest.fixture
def job(simulate):
    job = simulate(3, lockstep="record").run()
    job.flights = dict.fromkeys(range(3), calls_made(20, group="0-2"))
    return job


def ask(job, number="1"):
    return job.handle(Requested(number, REQUEST)).wait(0.01)


def last_answer(job):
    return job.answered[-1][1]


def test_all_ranks_get_the_same_order_and_the_answer_comes_when_all_have_written(job):
    ask(job)
    ((_, ranks, order),) = [sent for sent in job.sent if isinstance(sent[2], ProfileCalls)]
    assert ranks == (0, 1, 2)
    assert order == ProfileCalls("0-2", 31, 35, REQUEST.directory, REQUEST.session)
    assert last_answer(job).state is AnswerState.PROGRESS and last_answer(job).text == "calls #31-35 of ranks 0-2"
    job.handle(ended(0), ended(2), ended(2), ended(1, session="another"))
    assert last_answer(job).state is AnswerState.PROGRESS
    job.handle(ended(1))
    assert last_answer(job).state is AnswerState.DONE and last_answer(job).content == {"files": 3, "bytes": 300}


def test_one_profile_at_a_time(job):
    ask(job)
    ask(job, "2")
    assert job.answered[-1][0] == "2" and "already being taken" in last_answer(job).text
    job.handle(*(ended(rank) for rank in range(3)))
    ask(job, "3")
    assert job.answered[-1][0] == "3" and last_answer(job).state is AnswerState.PROGRESS


def test_ranks_without_a_profile_are_named_with_the_reason(job):
    ask(job).handle(ended(0), ended(1, error="its program is taking a profile of its own"), AgentLost(2, "gone"))
    answer = last_answer(job)
    assert answer.state is AnswerState.REFUSED and not answer.content["again"]
    assert answer.text == (
        "1 rank of 3 took their profile; rank 1: its program is taking a profile of its own; rank 2: it ended before"
    )


def test_ranks_that_were_late_are_worth_another_attempt(job):
    ask(job).handle(ended(0), ended(1), ended(2, error="it had made call #50 already", late=True))
    assert last_answer(job).content["again"] and "rank 2: it had made call #50 already" in last_answer(job).text


def test_a_program_that_ends_meanwhile_has_a_shorter_profile(job):
    ask(job).handle(ended(0, last=33), ended(1, last=33), ended(2, last=33))
    assert (last_answer(job).state, last_answer(job).text) == (AnswerState.DONE, "the program ended after call #33")


def test_before_the_first_calls_one_may_ask_again(simulate, job):
    job.flights[1] = Flight(EVERY_CALL)
    ask(job)
    assert last_answer(job).content == {"again": True} and "have made a cross-process call" in last_answer(job).text
    starting = ask(simulate(3, lockstep="record").join())
    assert last_answer(starting).content == {"again": True}


def test_calls_that_are_not_recorded_cannot_be_profiled(simulate, job):
    job.flights[1] = Flight(COMPILATIONS)
    ask(job)
    assert last_answer(job).text == "not every call of rank 1 is recorded"
    without = ask(simulate(3, lockstep="off").run())
    assert "--lockstep off" in last_answer(without).text and not last_answer(without).content["again"]


def test_a_job_that_ends_is_not_profiled(job):
    job.handle(job.failure(1))
    assert job.head.phase is not JobPhase.RUNNING
    ask(job)
    assert "the job is ending" in last_answer(job).text


def test_a_job_that_fails_before_its_calls_are_known_answers(job):
    job.handle(Requested("1", REQUEST), *(AgentLost(rank, "gone") for rank in range(3)))
    assert last_answer(job).state is AnswerState.REFUSED and last_answer(job).text == "ranks 0-2: it ended before"


# ---- which calls are profiled


THREE = {0: calls_made(100), 1: calls_made(103), 2: calls_made(99)}
ENTERED = PendingCall("0-3", 101, 1, 7, 10.1)
PLANS = {
    "once the order has had its time": (THREE, 5, 1.0, (114, 118)),
    "which may be long": (THREE, 5, 4.0, (144, 148)),
    "not many steps later where they are slow": ({0: calls_made(100, per_second=0.01)}, 1, 1.0, (103, 103)),
    "a rank that has entered a call is there": ({**THREE, 1: calls_made(100, pending=ENTERED)}, 1, 0.0, (104, 104)),
    "calls repeat themselves with each step": ({0: calls_made(100, pattern=(1, 1, 2))}, 4, 0.0, (103, 114)),
}


@pytest.mark.parametrize(("flights", "steps", "lead_s", "calls"), PLANS.values(), ids=PLANS)
def test_all_ranks_profile_the_same_calls(flights, steps, lead_s, calls):
    assert plan_profile(flights, flights, steps, lead_s) == (ProfiledCalls("0-3", *calls, tuple(flights)),)


@pytest.mark.parametrize(
    ("calls", "period"),
    [("", 1), ("a", 1), ("aa", 1), ("ab", 1), ("abab", 2), ("babab", 2), ("aabaab", 3), ("aaaab", 1), ("xabab", 1)],
)
def test_how_many_calls_a_step_has(calls, period):
    assert calls_per_step([(ord(call), 0) for call in calls]) == period


def test_each_rank_is_profiled_by_its_largest_group():
    flights = {
        0: calls_made(50, group="0-1", **{"0-3": 0}),
        1: calls_made(50, group="0-1"),
        2: calls_made(9, group="2-3"),
    }
    flights[3] = calls_made(9, group="2-3", **{"3,7": 2})
    groups = [(part.group, part.ranks) for part in plan_profile(flights, range(4), 1, 1.0)]
    assert groups == [("0-1", (0, 1)), ("2-3", (2, 3))]


@pytest.mark.parametrize("other", [Flight(), Flight(EVERY_CALL), Flight(EVERY_CALL, call_counts={"0-3": 0})])
def test_nothing_is_planned_before_all_have_made_a_call(other):
    assert plan_profile({0: calls_made(5), 1: other}, (0, 1), 5, 1.0) == ()
    assert plan_profile({0: calls_made(5)}, (0, 1), 5, 1.0) == ()


# ---- jaxrun profile

DONE = Answer(AnswerState.DONE, content={"files": 2, "bytes": 3 * 2**20})
EARLY = Answer(AnswerState.REFUSED, "too early", {"again": True})
LATE = Answer(AnswerState.REFUSED, "rank 1: it had made call #9 already", {"again": True, "files": 1, "bytes": 5})


class AnsweringJob:
    """A RunningJob whose launcher gives these answers, one a request."""

    def __init__(self, run_dir, *answers):
        self.run_dir = run_dir
        self.leads = []
        self._answers = list(answers)

    def ask(self, request, timeout, on_progress):
        self.leads.append(request.lead_s)
        found = self._answers.pop(0)
        if found.state is AnswerState.REFUSED:
            raise RequestRefused(found)
        on_progress(Answer(AnswerState.PROGRESS, "calls #5-6 of ranks 0-1"))
        return found


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Asks a job that answers so; returns what is printed, and how long the order may take at each attempt."""

    def ask(*answers):
        monkeypatch.setattr(job_requests, "_RETRY_S", 0.0)
        lines, job = [], AnsweringJob(tmp_path, *answers)
        done = job_requests.take_profile(job, 2, None, lines.append)
        return [*lines, done], job.leads

    return ask


def test_before_the_first_calls_it_waits_and_says_so_once(asked, tmp_path):
    lines, leads = asked(EARLY, EARLY, DONE)
    assert lines[:2] == ["too early; trying again", "profiling 2 steps: calls #5-6 of ranks 0-1 ..."]
    assert lines[2].startswith("2 profiles, 3 MiB, in ") and f"xprof --logdir {tmp_path}/profile" in lines[2]
    assert len(set(leads)) == 1


def test_a_late_order_gets_more_time_at_the_next_try_up_to_a_limit(asked):
    _, leads = asked(LATE, LATE, DONE)
    assert leads == sorted(set(leads))
    with pytest.raises(UnavailableError, match="no profile of all ranks: rank 1: it had made call #9 already"):
        asked(LATE, LATE, LATE, DONE)


def test_other_refusals_are_final(asked):
    with pytest.raises(UnavailableError, match="its program is taking a profile"):
        asked(Answer(AnswerState.REFUSED, "its program is taking a profile of its own", {"again": False}), DONE)


def test_a_file_is_refused_as_the_directory_for_profiles(tmp_path):
    (tmp_path / "f").touch()
    with pytest.raises(UsageError, match="is a file, not a directory"):
        job_requests.take_profile(AnsweringJob(tmp_path), 1, tmp_path / "f", print)
