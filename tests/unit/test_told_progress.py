"""How far the program says it has come."""

from jaxrun.analysis.lockstep.told_progress import find_told_step, format_told_step, seconds_left
from jaxrun.analysis.verdict.verdict_text import format_report
from jaxrun.protocol.flight import Flight, ToldStep


def test_the_rank_that_is_behind_counts_and_the_pace_gives_the_time_left():
    flights = {0: Flight(told_step=ToldStep(341, 1000, 270.5, 0, 100.0)), 1: Flight(), 2: Flight()}
    flights[1] = Flight(told_step=ToldStep(340, 1000, 270.0, 0, 100.0))
    told = find_told_step(flights)
    assert told == flights[1].told_step
    assert format_told_step(told) == "step 340 of 1,000 (34 %), 2 steps/s, 5 min 30 s left"
    assert seconds_left(told) == 330.0


def test_what_the_program_has_not_told_is_left_out():
    assert find_told_step({0: Flight()}) is None
    assert format_told_step(ToldStep(7, 0, 100.0, 7, 100.0)) == "step 7"
    assert seconds_left(ToldStep(7, 9, 100.0, 7, 100.0)) is None


def test_the_verdict_and_a_pods_last_message_say_how_far_the_program_has_come(simulate):
    job = simulate(2, lockstep="record").run()
    job.flights = dict.fromkeys(range(2), Flight(told_step=ToldStep(340, 1000, 270.0, 0, 100.0)))
    job.wait(10)
    job.handle(job.failure(1)).wait(60)
    assert job.verdict.reached == "reached step 340 of 1,000 (34 %)"
    assert "reached step 340 of 1,000 (34 %)." in format_report(job.verdict, None).splitlines()
    assert job.head.told_step == ToldStep(340, 1000, 270.0, 0, 100.0)
