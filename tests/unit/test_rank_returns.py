"""--keep-survivors with --max-restarts: the head starts a lost rank again, and takes it back in live_devices."""

import signal

import pytest
from live_devices_by_hand import ALL, answer, asks, sent, start_again

from jaxrun.analysis.lockstep.reader import FlightReader
from jaxrun.analysis.verdict.restarts import summarize_end
from jaxrun.job_events.events import AgentLost
from jaxrun.protocol import flight_file
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    StartAgain,
    StartFailed,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.stop_messages import StopPolled
from jaxrun.protocol.survivor_messages import LiveRanks, LiveRanksAsked, RanksLost
from jaxrun.protocol.worker_messages import Exit, Join, PreemptionNotice, Run
from jaxrun_runtime.lockstep.flight_recorder import FlightRecorder


@pytest.fixture
def job(simulate):
    return simulate(4, keep_survivors=True, returns=2).run()


def test_a_lost_rank_alone_is_started_again_joins_and_is_taken_back_in_live_devices(job):
    before = len(sent(job, Run, 2))
    job.wait(1.0).exit(-9, 2)
    assert len(sent(job, StartAgain, 2)) == 1 and not any(sent(job, StartAgain, rank) for rank in (0, 1, 3))
    asks(job, 0, 1, 3)
    assert answer(job) == ((0, 1, 3), {0: 1, 1: 1, 3: 1}), "nobody waits for it while it starts"
    job.wait(0.5)
    start_again(job, 2)
    assert sent(job, Join, 2)[-1].address == "127.0.0.1:4711" and len(sent(job, Run, 2)) == before + 1
    asks(job, 0, 1, 3)
    assert answer(job)[1] == {0: 1, 1: 1, 3: 1}, "nor until it has come"
    asks(job, 2)
    assert len(job.lines) == 1, job.lines
    asks(job, 0, 1, 3)
    assert answer(job) == (ALL, {0: 1, 1: 1, 2: 2, 3: 1})
    assert job.lines[-1] == "rank 2 is back, 0.50 s after it was lost: ranks 0-3 go on"
    asks(job, 0, 1, 3)
    assert answer(job)[0] == ALL
    asks(job, 2)
    assert len([1 for _, _, message in job.sent if isinstance(message, LiveRanks)]) == 4, "a full member again"
    job.done(*ALL).exit(0, 1, 2, 3)
    job.exit(0, 0)
    assert job.outcome.end.reason == "ok" and job.outcome.lost == ()
    assert [(back.worker.rank, back.worker.status, back.seconds) for back in job.outcome.returns] == [(2, -9, 0.5)]
    assert (
        "rank 2 of 4 was killed by SIGKILL (9), 1.0 s into the run, and was back after 0.50 s." in job.verdict.details
    )


def test_its_second_loss_is_told_with_its_incarnation_and_no_restart_left_ends_the_attempt(job):
    for incarnation in (1, 2):
        job.exit(-9, 2)
        assert sent(job, RanksLost, 0)[-1].incarnations == {2: incarnation}
        start_again(job, 2)
        asks(job, *ALL)
        assert answer(job)[1][2] == incarnation + 1
    job.exit(-9, 2).wait(1)
    assert job.outcome.end.reason == "failed" and job.verdict.culprits == (2,) and job.outcome.started_again == 2
    assert job.lines[-1] == "rank 2 failed; all 2 restarts of a lost rank are used up; stopping 3 others"


def test_restarts_of_a_lost_rank_are_counted_over_all_attempts(simulate):
    job = simulate(4, keep_survivors=True, returns=2, returns_used=1).run().exit(-9, 2)
    assert len(sent(job, StartAgain, 2)) == 1
    job.exit(-9, 3).wait(1)
    assert job.outcome.end.reason == "failed" and job.outcome.started_again == 1
    assert job.lines[-1] == "ranks 2-3 failed; all 2 restarts of a lost rank are used up; stopping 2 others"
    later = simulate(4, keep_survivors=True, returns=1, returns_used=1).run().exit(-9, 2).wait(1)
    assert later.lines == ["rank 2 failed; the one restart of a lost rank is used up; stopping 3 others"]
    end = summarize_end(job.outcome, has_run_before=False)
    assert (end.kind, end.returns) == ("lost", 1)


def test_without_rank_0_all_end_and_the_line_says_why(job):
    job.exit(-9, 0).wait(1)
    why = "rank 0 has JAX's coordinator, without which no rank goes on"
    assert job.lines == [f"rank 0 failed; {why}; stopping 3 others"] and not any(sent(job, StartAgain, 0))


def test_once_rank_0_has_ended_well_a_lost_rank_is_not_wanted_back_and_the_others_end_well(job):
    job.done(0).exit(-9, 2)
    assert not sent(job, StartAgain, 2) and len(sent(job, RanksLost, 1)) == 1
    job.done(1, 3).exit(0, 1, 3)
    job.exit(0, 0)
    assert job.outcome.end.reason == "ok" and job.outcome.lost == (2,)


def test_a_rank_that_has_raised_is_started_once_its_process_has_ended(job):
    job.handle(job.failure(2))
    assert not sent(job, StartAgain, 2) and len(sent(job, RanksLost, 0)) == 1
    job.exit(1, 2)
    assert len(sent(job, StartAgain, 2)) == 1 and len(sent(job, RanksLost, 0)) == 1


def test_a_process_that_does_not_end_after_its_failure_is_killed(job):
    job.handle(job.failure(2)).wait(6)
    assert job.kills() == [(5000, (2,))] and len(sent(job, StartAgain, 2)) == 1


def test_a_rank_that_dies_while_it_joins_is_started_again_as_long_as_restarts_are_left(job):
    job.exit(-9, 2).handle(WorkerSpawned(2, 2002)).exit(-11, 2)
    assert len(sent(job, StartAgain, 2)) == 2
    job.handle(WorkerSpawned(2, 3002)).exit(-11, 2).wait(1)
    assert job.outcome.end.reason == "failed" and job.outcome.workers[2].status == -11


def test_a_rank_that_cannot_be_started_again_is_given_up_and_the_others_go_on(job):
    job.exit(-9, 2).handle(StartFailed("Cannot allocate memory", rank=2))
    assert job.lines[-1] == "rank 2 cannot be started again: Cannot allocate memory"
    asks(job, 0, 1, 3)
    assert answer(job) == ((0, 1, 3), {0: 1, 1: 1, 3: 1})
    job.done(0, 1, 3).exit(0, 1, 3).exit(0, 0)
    assert job.outcome.end.reason == "ok" and job.outcome.lost == (2,)


def test_a_rank_of_which_no_process_appears_is_given_up_and_those_that_wait_for_it_are_answered(simulate):
    job = simulate(3, keep_survivors=True, returns=5, init=20.0).run()
    everyone = (0, 1, 2)
    asks(job, *everyone, about=everyone)
    for rank in (2, 1, 2, 1):  # after that, ranks 0 and 1 have been connected in every order
        others = [each for each in everyone if each != rank]
        asks(job.exit(-9, rank), *others, about=everyone)
        start_again(job, rank)
        asks(job, rank, *others, about=everyone)
    answered = len(sent(job, LiveRanks, 0))
    asks(job.exit(-9, 2), 0, 1, about=everyone).wait(19)
    assert len(sent(job, LiveRanks, 0)) == answered
    job.wait(2)
    why = "rank 2 cannot be started again: there was no process within 20 s (--init-timeout)"
    assert job.lines[-1] == why and len(sent(job, LiveRanks, 0)) == answered + 1 and answer(job)[0] == (0, 1)


def test_a_program_that_has_ended_well_is_not_started_again_if_its_process_dies_then(job):
    job.done(2).exit(-11, 2)
    assert sent(job, StartAgain, 2) == [] and job.lines[-1].startswith("rank 2 is lost")
    job.done(0, 1, 3).exit(0, 1, 3).exit(0, 0)
    assert job.outcome.end.reason == "ok"


def test_a_process_that_dies_before_it_is_back_causes_no_later_failure(simulate):
    hosts = {rank: f"h{rank}" for rank in ALL}
    job = simulate(4, hosts=hosts, keep_survivors=True, returns=3).run().wait(1).exit(-9, 2)
    for _ in range(2):
        asks(job, 0, 1, 3)
    job.handle(WorkerSpawned(2, 2002)).wait(5).exit(-11, 2).wait(0.2)
    job.handle(AgentLost(AgentId(3), "nothing was heard from its host for 2 s")).wait(2)
    assert (job.verdict.culprits, job.verdict.exit_code) == ((3,), 69)


def test_ranks_come_back_after_a_signal_that_asked_nobody_to_stop(job):
    job.handle(PreemptionNotice(2)).wait(60).exit(-9, 2)
    start_again(job, 2)
    asks(job, *ALL)
    assert answer(job)[0] == ALL


def test_a_rank_that_does_not_join_in_time_is_killed_and_that_counts(simulate):
    job = simulate(4, keep_survivors=True, returns=1, init=20.0).run().exit(-9, 2)
    job.handle(WorkerSpawned(2, 2002)).wait(21)
    assert job.kills()[0] == (20_000, (2,)) and job.outcome.end.reason == "failed"


def test_a_rank_that_differs_from_the_others_cannot_come_back_and_the_attempt_ends_with_the_first_cause(job):
    job.exit(-9, 2).handle(WorkerSpawned(2, 2002), job.hello(2, program_hash="f" * 16)).wait(1)
    assert any("rank 2 cannot come back: the processes differ in program" in line for line in job.lines)
    assert job.outcome.end.reason == "failed" and job.verdict.culprits == (2,) and job.outcome.workers[2].status == -9


def test_the_verdict_has_a_sentence_for_each_return_of_one_rank(job):
    for _ in range(2):
        job.wait(1).exit(-9, 2).wait(0.5)
        start_again(job, 2)
        asks(job, 2, 0, 1, 3)
    job.done(*ALL).exit(0, 1, 2, 3)
    job.exit(0, 0)
    killed = "rank 2 of 4 was killed by SIGKILL (9), {} s into the run, and was back after 0.50 s."
    assert [line for line in job.verdict.details if "back" in line] == [killed.format(1.0), killed.format(2.5)]


@pytest.mark.parametrize("how", ["rank 0", "host"])
def test_without_rank_0_or_the_host_of_the_lost_rank_the_attempt_ends(job, how):
    if how == "rank 0":
        job.exit(-9, 2).exit(-9, 0)
    else:
        job.handle(AgentLost(AgentId(2), "its host is gone"))
    job.wait(1)
    assert job.outcome.end.reason == "failed" and 2 in job.verdict.culprits
    assert not sent(job, StartAgain, 2) or how == "rank 0"


def test_a_rank_that_is_not_back_when_the_others_end_is_killed_and_does_not_count(job):
    job.exit(-9, 2)
    start_again(job, 2)
    job.done(0, 1, 3)
    assert job.kills() and job.kills()[-1][1] == (2,) and set(job.ranks_sent(Exit)) == {1, 3}
    job.wait(0.1).exit(0, 1, 3)
    job.exit(0, 0)
    assert job.outcome.end.reason == "ok" and job.outcome.lost == (2,) and job.outcome.workers[2].status == -9
    assert any("did not come back" in line for line in job.verdict.details)


def test_a_process_that_appears_after_the_others_have_ended_is_killed(job):
    job.exit(-9, 2).done(0, 1, 3).handle(WorkerSpawned(2, 2002))
    assert job.kills() == [(0, (2,))]


def test_a_signal_ends_a_rank_that_is_on_its_way_back(job):
    job.exit(-9, 2).handle(WorkerSpawned(2, 2002)).listen(0, 1, 3).interrupt(signal.SIGTERM)
    job.handle(job.hello(2))
    assert (2,) in [ranks for _, ranks in job.kills()] and len(sent(job, Join, 2)) == 1


def test_a_rank_that_fails_on_its_way_back_once_rank_0_has_ended_is_said_to_be_lost_once_more_and_not_awaited(job):
    job.exit(-9, 2)
    start_again(job, 2)
    job.done(0).exit(-9, 2)
    assert len(sent(job, StartAgain, 2)) == 1 and job.lines == [
        "rank 2 is lost, (0, 1, 3) go on",
        "rank 2 is lost, (1, 3) go on",
    ]
    asks(job, 1, 3)
    assert answer(job) == ((1, 3), {1: 1, 3: 1})
    job.done(1, 3).exit(0, 1, 3)
    job.exit(0, 0)
    assert job.outcome.end.reason == "ok" and job.outcome.lost == (2,)


def test_a_rank_that_ends_well_before_it_is_back_is_not_awaited(job):
    job.exit(-9, 2)
    start_again(job, 2)
    job.done(2).exit(0, 2)
    assert not job.head._returns.is_any_on_its_way(but=())
    job.done(0, 1, 3).exit(0, 1, 3)
    job.exit(0, 0)
    assert job.outcome.end.reason == "ok"


def test_two_ranks_that_die_at_once_both_come_back(job):
    job.handle(WorkerExited(1, -9), WorkerExited(2, -9))
    start_again(job, 1)
    asks(job, 1, 0, 3)
    assert answer(job) == ((0, 1, 3), {0: 1, 1: 2, 3: 1})
    start_again(job, 2)
    asks(job, 2, 0, 1, 3)
    assert answer(job) == (ALL, {0: 1, 1: 2, 2: 2, 3: 1})


def test_on_cpu_two_ranks_have_one_return_since_they_have_two_orders(simulate):
    job = simulate(2, keep_survivors=True, returns=5, local_devices=2).run().exit(-9, 1)
    start_again(job, 1)
    asks(job, 1, 0, about=(0, 1))
    assert answer(job)[1] == {0: 1, 1: 2} and last_answer(job).order == (1, 0)
    job.exit(-9, 1).wait(1)
    why = "on CPU, ranks 0-1 have been connected in every order, so that no rank can come back"
    assert job.outcome.end.reason == "failed" and job.lines[-1] == f"rank 1 failed; {why}; stopping 1 other"


@pytest.mark.parametrize("then", ["it is back", "the job is stopped", "it cannot be started"])
def test_ranks_that_cannot_be_connected_again_wait_in_live_devices_until_another_is_back(simulate, then):
    job = simulate(3, keep_survivors=True, returns=9).run()
    everybody = (0, 1, 2)
    for _ in range(2):  # ranks 0 and 1 get both their orders, each of which the death of rank 1 breaks
        job.exit(-9, 2)
        asks(job, 0, 1, about=everybody)
        assert sorted(answer(job)[0]) == [0, 1]
        job.exit(-9, 1)
        start_again(job, 1)
        start_again(job, 2)
        asks(job, 1, 2, 0, about=everybody)
        assert sorted(answer(job)[0]) == [0, 1, 2]
    job.exit(-9, 2)
    before = len(job.sent)
    asks(job, 0, 1, about=everybody)
    assert not [1 for _, _, message in job.sent[before:] if isinstance(message, LiveRanks)]
    if then != "it is back":
        if then == "the job is stopped":
            job.handle(*(StopPolled(rank) for rank in (0, 1))).interrupt(signal.SIGTERM)
            asks(job, 0, about=everybody)
        else:
            job.handle(StartFailed("no memory", rank=2))
        assert answer(job) == ((0, 1), {0: 1, 1: 3})
        return
    start_again(job, 2)
    asks(job, 2, about=everybody)
    assert answer(job) == (everybody, {0: 1, 1: 3, 2: 4})


def last_answer(job):
    return [message for _, _, message in job.sent if isinstance(message, LiveRanks)][-1]


def test_a_rank_that_comes_back_counts_its_calls_and_polls_on_from_the_others(job):
    job.exit(-9, 2)
    start_again(job, 2)
    there = {"0-3": 217, "0-1,3": 12}
    job.handle(LiveRanksAsked(2, ALL, 1), *(LiveRanksAsked(rank, ALL, 9, there, 40) for rank in (0, 1, 3)))
    questions = {0: 9, 1: 9, 2: 1, 3: 9}
    assert last_answer(job) == LiveRanks({0: 1, 1: 1, 2: 2, 3: 1}, (1, 2, 3, 0), questions, {"0-3": 217}, 40)
    job.handle(*(LiveRanksAsked(rank, ALL, 10, {"0-3": 218}, 41) for rank in ALL))
    assert last_answer(job).calls == {}, "they count alike"


def test_no_rank_is_taken_back_once_the_job_is_asked_to_stop(job):
    job.handle(*(StopPolled(rank) for rank in ALL)).exit(-9, 2)
    start_again(job, 2)
    job.interrupt(signal.SIGTERM)
    asks(job, 2, 0, 1, 3)
    assert answer(job) == ((0, 1, 3), {0: 1, 1: 1, 3: 1}), "which has another number of polls"


def test_its_flight_recorder_begins_a_group_with_the_calls_of_the_process_before(tmp_path):
    with (tmp_path / "flight").open("w+b") as file:
        file.truncate(flight_file.TEXT_OFFSET)
        recorder, reader = FlightRecorder(file.fileno(), 2, level=flight_file.EVERY_CALL), FlightReader(file.fileno())
        recorder.count_on({"0-3": 217})
        assert reader.brief().call_counts == {"0-3": 217}
        about = {"name": "jit(step)", "key": "1", "code": "2", "text": ""}
        program = recorder.add_program(recorder.add_group("0-3"), about)
        recorder.record(program, 0)
        recorder.count_on({"0-3": 5})
        assert reader.brief().call_counts == {"0-3": 218} == recorder.call_counts()
        assert [call.number for call in reader.brief().calls] == [218]
