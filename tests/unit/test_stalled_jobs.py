"""The head of a job that stalls, or whose ranks wait for one that has finished: it tells, and stops the job.

What counts as a stall is in test_stall_detector.py.
"""

import signal
from pathlib import Path

import pytest
import ras_answers
from calls_by_hand import flight_after
from msgspec.structs import replace
from ras_answers import communicator, json_answer
from simulation import IN_JAX, IN_QUEUE

from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.nccl_ras import parse_answer
from jaxrun.analysis.diagnosis.wait_graph import find_wait_graph
from jaxrun.analysis.verdict.decide import leave_out_told
from jaxrun.analysis.verdict.stack_text import describe_stacks, format_stall_notice
from jaxrun.analysis.verdict.verdict_text import format_report
from jaxrun.cli.make_job import make_job
from jaxrun.controller.head.stall_detector import EarlyExitDetector
from jaxrun.job_events.events import Requested
from jaxrun.protocol.error_chain import BackgroundSave, ChainedError
from jaxrun.protocol.flight import TimeTotals
from jaxrun.protocol.job_messages import OverviewRequest, StacksRequest
from jaxrun.protocol.query_messages import RankReply
from jaxrun.protocol.worker_messages import ThreadFailed

SILENT = {"stall": 60.0}
PROMPT_IN_JAX = IN_JAX.replace("_src/array.py", "_src/debugger/core.py").replace("_value", "get_next_input")
FULL_DISK = ChainedError("OSError", "disk full", (("/job/data.py", 9, "load"),))
IN_LOCK = IN_JAX.replace("site-packages/jax/_src/array.py", "threading.py").replace("_value", "wait")


def test_without_progress_the_job_is_warned_once_and_stopped(simulate):
    job = simulate(3, **SILENT).run()
    job.wait(59)
    assert job.outcome is None and len(job.printed) == 1
    at, text = job.printed[0]
    assert 30 <= at <= 46 and text.startswith("no progress for ") and "after 60 s of it" in text
    job.wait(20)
    assert job.outcome.end.reason == "stall" and set(job.outcome.end.stacks.dumps) == {0, 1, 2}
    assert 60 <= job.outcome.decided_at <= 62 and job.kills() != []
    assert job.verdict.exit_code == 124 and job.verdict.outcome == "stall" and "no progress" in job.verdict.headline
    assert any("3 ranks" in line for line in job.verdict.details)


def test_without_either_option_nothing_is_checked(simulate):
    job = simulate(3).run().wait(10_000)
    assert job.outcome is None and job.head.deadline() is None


def test_a_little_cpu_time_of_waiting_threads_does_not_count_as_progress(simulate):
    job = simulate(3, **SILENT).run()
    job.cpu = lambda now: 0.01 * now
    assert job.wait(80).outcome.end.reason == "stall"


def test_a_job_that_was_silent_for_long_and_goes_on_may_be_silent_again(simulate):
    job = simulate(3, **SILENT).run()
    job.written = lambda now: int(now > 50)
    job.wait(100)
    assert job.outcome is None and len(job.printed) == 2
    assert 105 < job.wait(100).outcome.decided_at < 140


def test_a_rank_that_ends_is_progress(simulate):
    job = simulate(3, **SILENT).run()
    job.wait(50)
    job.done(2)
    job.exit(0, 2).wait(50)
    assert job.outcome is None


def test_ranks_that_wait_are_reported_and_the_job_continues(simulate):
    job = simulate(3, stall_notice=30.0).run()
    job.stacks = {0: IN_JAX, 1: IN_JAX, 2: IN_LOCK}
    job.wait(100)
    assert [round(at, -1) for at, _ in job.printed] == [30, 60] and job.outcome is None
    assert job.lines[0] == (
        "no progress for 30 s: rank 2 waits for a lock or another of its threads (threading.wait) at "
        "train.py:2 <module>, and ranks 0-1 wait for it in JAX (train.py:2 <module>) · more: Ctrl-\\ (SIGQUIT)"
    )
    assert job.lines[1] == "no progress for 60 s, as before · more: Ctrl-\\ (SIGQUIT)"
    assert job.done(0, 1, 2).exit(0, 0, 1, 2).outcome.end.reason == "ok"


def test_a_notice_tells_again_who_waits_for_whom_if_that_has_changed_or_there_was_progress(simulate):
    job = simulate(3, stall_notice=30.0).run()
    job.stacks = {0: IN_JAX, 1: IN_JAX, 2: IN_LOCK}
    job.wait(45)
    job.stacks = {0: IN_JAX, 1: IN_LOCK, 2: IN_JAX}
    job.wait(45)
    job.written = lambda now: 1
    job.wait(150)
    assert [line.partition(" waits")[0] for line in job.lines] == [
        "no progress for 30 s: rank 2",
        "no progress for 60 s: rank 1",
        f"no progress for {job.lines[2].split()[3]} s: rank 1",
    ]


def test_the_end_of_a_stalled_job_begins_with_who_waits_for_whom_and_says_it_once(simulate):
    job = simulate(3, stall=60.0, stall_notice=30.0).run()
    job.stacks = {0: IN_JAX, 1: IN_JAX, 2: IN_LOCK}
    job.wait(80)
    notice = (
        "rank 2 waits for a lock or another of its threads (threading.wait) at train.py:2 <module>, and ranks 0-1 "
        "wait for it in JAX (train.py:2 <module>)"
    )
    assert job.lines == [
        f"no progress for 30 s: {notice}; the job is stopped after 60 s of it (--stall-timeout) "
        "· more: Ctrl-\\ (SIGQUIT)"
    ]
    assert job.verdict.headline == f"no progress for as long as --stall-timeout allows: {notice}"
    ((advice, *places),) = (details.splitlines() for details in job.verdict.details)
    assert advice == "which thread holds it or must end, and what does that thread wait for?"
    assert places[0] == "3 ranks, 2 groups" and len(places) == 3
    shown = leave_out_told(job.verdict, job.outcome)
    assert shown == replace(
        job.verdict,
        headline="no progress for as long as --stall-timeout allows: rank 2 waits for a lock or another of its "
        "threads (threading.wait) at train.py:2 <module>; more above",
    )


def test_the_end_of_a_job_says_in_full_what_no_notice_has_told(simulate):
    job = simulate(3, stall=60.0, stall_notice=30.0).run()
    job.stacks = {0: IN_JAX, 1: IN_JAX, 2: IN_LOCK}
    job.wait(50).stacks = {0: IN_JAX, 1: IN_LOCK, 2: IN_JAX}
    job.wait(30)
    assert "rank 2 waits for a lock" in job.lines[0] and ": rank 1 waits for a lock" in job.verdict.headline
    assert leave_out_told(job.verdict, job.outcome) == job.verdict


@pytest.mark.parametrize(("options", "signum"), [({"job": 70.0}, 0), ({}, signal.SIGTERM)])
def test_the_end_by_a_time_limit_or_a_signal_does_not_repeat_what_a_notice_has_told(simulate, options, signum):
    job = simulate(3, stall_notice=30.0, **options).run()
    failed = ThreadFailed(2, 0.0, "save", "OSError", "", chain=(FULL_DISK,), save=BackgroundSave(1))
    job.stacks = {0: IN_JAX, 1: IN_JAX, 2: IN_LOCK}
    job.handle(failed).wait(40)
    job = job.interrupt(signum) if signum else job
    job.wait(40)
    told = "rank 2's background save of step 1 failed with OSError: disk full (data.py:9 load)"
    assert told in job.lines[0] and any(told in text for text in job.verdict.details)
    shown = format_report(leave_out_told(job.verdict, job.outcome), None)
    assert told not in " ".join(shown.split()) and " ".join(shown.split()).count("OSError: disk full") == 2
    assert "line 9, in load\nOSError: disk full" in shown  # as in the headline


def test_the_end_by_a_time_limit_names_what_a_notice_has_told_of_the_hang(simulate):
    job = simulate(3, stall_notice=30.0, job=70.0).run()
    job.stacks = {0: IN_JAX, 1: IN_JAX, 2: IN_LOCK}
    job.wait(80)
    assert job.verdict.headline == "not finished within the time limit."
    shown = leave_out_told(job.verdict, job.outcome)
    assert shown.headline == (
        "not finished within the time limit: rank 2 waits for a lock or another of its threads "
        "(threading.wait) at train.py:2 <module>; more above"
    )
    full, brief = (" ".join(" ".join(one.details).split()) for one in (job.verdict, shown))
    assert "and ranks 0-1 wait for it in JAX" in full and "wait for it" not in brief


def test_whoever_looks_at_a_stalled_job_sees_what_the_notice_has_told_until_there_is_progress(simulate):
    job = simulate(3, stall_notice=30.0).run()
    job.stacks = {0: IN_JAX, 1: IN_JAX, 2: IN_LOCK}

    def stall():
        job.handle(Requested(f"{job.now}", OverviewRequest())).wait(1.0)
        return job.answered[-1][1].content.stall

    assert stall() == ""
    job.wait(40)
    assert stall().startswith("no progress for 4") and "rank 2 waits for a lock" in stall()
    job.flights = {rank: flight_after(3, "0-2", time=job.now) for rank in range(3)}
    assert stall() == ""


# ---- what NCCL's own service says

BEHIND = parse_answer(
    json_answer(
        communicator(
            *(ras_answers.rank(number, 7, f"10.0.0.{number}", AllReduce=12) for number in range(2)),
            ras_answers.rank(2, 7, "10.0.0.2", AllReduce=11),
        )
    )
)
IS_BEHIND = (
    "in NCCL's communicator 9f3c0d5511aa70e2 (3 ranks), rank 2 (h2) has launched 11 AllReduces, and 2 ranks 12: "
    "they wait for rank 2 (h2)"
)
SAME_PIDS = {rank: {"own_pid": 7, "addresses": (f"10.0.0.{rank}",)} for rank in range(3)}  # as in containers


@pytest.fixture
def on_gpus(simulate):
    """on_gpus(…) → a job on three hosts whose ranks all wait in the same call."""

    def start(**options):
        job = simulate(3, platform="gpu", hosts={rank: f"h{rank}" for rank in range(3)}, **options)
        job.join().handle(*(job.device_report(rank, platform="gpu") for rank in range(3)))
        job.stacks, job.identities = dict.fromkeys(range(3), IN_JAX), SAME_PIDS
        return job

    return start


def asked(job):
    """Which ranks were asked for what, of NCCL and of who they are."""
    return [(detail, ranks) for _, detail, ranks in job.queries if detail.startswith(("nccl", "identity"))]


def test_gpu_ranks_in_one_call_are_reported_if_nccl_knows_that_one_is_behind(on_gpus):
    job = on_gpus(stall_notice=30.0)
    job.nccl = BEHIND
    job.wait(100)
    ((at, text),) = job.printed
    assert 60 <= at < 65 and text == (
        f"no progress for 63 s: ranks 0-2 (h0, h1, h2) are at train.py:2 <module>, in JAX: _value; {IS_BEHIND} · more: "
        "Ctrl-\\ (SIGQUIT)"
    )
    assert asked(job) == [("nccl", (0,)), ("identity", (0, 1, 2))]


@pytest.mark.parametrize("says", [None, replace(BEHIND, differing=())], ids=["nothing", "no difference"])
def test_a_long_computation_of_gpus_is_not_reported_if_nccl_knows_of_no_difference(on_gpus, says):
    job = on_gpus(stall_notice=30.0)
    job.nccl = says
    job.wait(1000)
    assert job.printed == [] and asked(job) == [("nccl", (0,))] * 4


def test_nccl_is_not_asked_where_a_rank_is_elsewhere_or_behind_by_its_calls(on_gpus):
    job = on_gpus(stall_notice=30.0)
    job.stacks[2] = IN_LOCK
    assert len(job.wait(300).printed) > 1 and asked(job) == []


def test_the_end_of_a_stalled_job_says_what_nccl_says(on_gpus):
    job = on_gpus(stall=60.0)
    job.nccl = BEHIND
    job.wait(100)
    assert asked(job)[-2:] == [("nccl at the end", (0,)), ("identity", (0, 1, 2))]
    assert job.outcome.end.reason == "stall" and job.verdict.exit_code == 124
    half, (details,) = job.lines[0], job.verdict.details
    assert f"{IS_BEHIND}." in " ".join(details.split()) and f"; {IS_BEHIND}; " in half


def test_a_rank_that_crashes_because_nccl_was_asked_at_the_end_is_not_to_blame(on_gpus):
    job = on_gpus(stall=60.0)
    job.stuck_for_nccl = True
    job.wait(62)
    assert asked(job)[-1] == ("nccl at the end", (0,)) and job.kills() == []
    job.exit(-11, 1).wait(100)
    assert job.outcome.end.reason == "stall" and job.verdict.exit_code == 124
    assert job.kills()[0][1] == (0, 2)


def test_an_agent_that_never_answers_for_nccl_delays_the_end_for_seconds(on_gpus):
    job = on_gpus(stall=60.0)
    job.stuck_for_nccl = True
    job.wait(100)
    (killed,) = job.kills()
    assert job.outcome.end.reason == "stall" and 60_000 < killed[0] < 70_000


def test_jaxrun_stacks_says_what_nccl_says(on_gpus):
    job = on_gpus()
    job.nccl = BEHIND
    job.handle(Requested("a", StacksRequest())).wait(1)
    ((_, answer),) = job.answered
    assert f"{IS_BEHIND}." in " ".join(describe_stacks(answer.content).split())


# ---- the options


def test_where_ci_is_set_the_limit_is_on_and_0_turns_it_off():
    given = {"program": ("train.py",)}
    assert make_job(given, {"CI": "true"}).stall_timeout == 300.0
    assert make_job({**given, "stall_timeout": 0.0}, {"CI": "true"}).stall_timeout == 0.0
    assert make_job(given, {"CI": "false"}).stall_timeout is None and make_job(given, {}).stall_timeout is None


def test_a_notice_without_an_explanation_says_where_the_ranks_are():
    waits = {0: "futex_do_wait", 1: "futex_do_wait", 2: ""}
    stacks = JobStacks(0.0, dict.fromkeys(range(3), "h1"), {0: IN_JAX, 1: IN_JAX, 2: ""}, waits)
    assert format_stall_notice(stacks, 31.4, Path("runs/3")) == (
        "no progress for 31 s: ranks 0-1 are at train.py:2 <module>, in JAX: _value; "
        "rank 2 gives no answer: it blocks signals, or is about to end · more: jaxrun stacks runs/3"
    )


# ---- ranks that wait for one that has finished


def test_a_rank_may_end_early_while_the_others_work(simulate):
    job = simulate(3).run()
    job.stacks = {1: IN_QUEUE, 2: IN_JAX}
    job.done(0).wait(600)
    assert job.outcome is None and not job.printed


@pytest.mark.parametrize("leaves", [lambda job: job.done(0), lambda job: job.exit(0, 0)], ids=["done", "exit"])
def test_others_that_wait_in_jax_for_a_rank_that_has_ended_are_stuck(simulate, leaves):
    job = simulate(3).run().wait(5)
    job.stacks = {1: IN_JAX, 2: IN_JAX}
    leaves(job).wait(60)
    assert job.outcome.end.reason == "early-exit" and job.outcome.end.stacks.dumps == {1: IN_JAX, 2: IN_JAX}
    live = (1, 2) if job.outcome.workers[0].status == 0 else (0, 1, 2)
    assert job.kills() == [(17_200, live)]  # 10 s after it ended, and 2 s later, each with 0.1 s for the answers


def test_ranks_that_finish_after_a_first_look_are_not_stuck(simulate):
    job = simulate(3).run()
    job.stacks = {1: IN_JAX, 2: IN_JAX}
    job.done(0).wait(11)
    job.done(1, 2).exit(0, 1, 2).exit(0, 0)
    assert job.outcome.end.reason == "ok"


STUCK, MIXED = {1: IN_JAX, 2: IN_JAX}, {1: IN_JAX, 2: IN_QUEUE}
AT_PROMPT = {1: IN_JAX, 2: PROMPT_IN_JAX}
IDLE, BUSY = {1: 4.0, 2: 5.0}, {1: 6.0, 2: 7.0}
ASLEEP, RUNNING = {1: "futex_wait_queue", 2: "futex_wait_queue"}, {1: "futex_wait_queue", 2: ""}
# Successive readings (time, stacks, CPU seconds), what the kernel says, and whether each shows that ranks are stuck;
# rank 0 has finished at 0.
CHECKS = {
    "two idle readings in JAX are needed": (((10, STUCK, IDLE), (12, STUCK, IDLE)), ASLEEP, [False, True]),
    "a rank computes": (((10, STUCK, IDLE), (12, STUCK, {1: 4.0, 2: 5.5})), ASLEEP, [False, False]),
    "a little CPU time is no work": (((10, STUCK, IDLE), (12, STUCK, {1: 4.09, 2: 5.0})), ASLEEP, [False, True]),
    "one outside of JAX may still come": (
        ((10, STUCK, IDLE), (12, MIXED, IDLE), (22, STUCK, IDLE), (24, STUCK, IDLE)),
        ASLEEP,
        [False, False, False, True],
    ),
    "one does not answer": (((10, {1: IN_JAX, 2: ""}, IDLE), (12, {1: IN_JAX, 2: ""}, IDLE)), ASLEEP, [False] * 2),
    "none answers": (((10, {}, {}), (12, {}, {})), ASLEEP, [False] * 2),
    "one is not asleep to the kernel": (((10, STUCK, IDLE), (12, STUCK, IDLE)), RUNNING, [False] * 2),
}


def check(detector, now, dumps, cpu, waits=ASLEEP, left_behind=False):
    replies = {
        rank: RankReply(rank, 1, stacks=dump, kernel_wait=waits[rank], cpu_seconds=cpu[rank])
        for rank, dump in dumps.items()
    }
    flights = {rank: flight_after(2 if left_behind else 1) for rank in dumps} | {0: flight_after(1)}
    return detector.check(replies, find_wait_graph(flights, dumps, waits, finished=(0,)), now)


@pytest.mark.parametrize(("readings", "waits", "stuck"), CHECKS.values(), ids=CHECKS)
def test_ranks_are_stuck_if_all_sleep_in_jax_without_cpu_time(readings, waits, stuck):
    detector = EarlyExitDetector(0.0, has_calls=False)
    assert [check(detector, *reading, waits) for reading in readings] == stuck


def test_the_second_check_comes_soon_only_if_the_first_was_suspicious():
    detector = EarlyExitDetector(0.0, has_calls=False)
    assert detector.next_check_s == 10.0
    check(detector, 10.0, {1: IN_JAX}, {1: 1.0})
    assert detector.next_check_s == 2.0
    check(detector, 12.0, {1: IN_QUEUE}, {1: 1.0})
    assert detector.next_check_s == 10.0


@pytest.mark.parametrize(("stacks", "is_stuck"), [(STUCK, True), (MIXED, False), (AT_PROMPT, False)])
def test_ranks_that_went_on_without_a_finished_rank_are_stuck_soon_even_if_they_poll(stacks, is_stuck):
    detector = EarlyExitDetector(0.0, has_calls=True)
    assert detector.next_check_s == 1.0
    busy = {"waits": {1: "", 2: ""}, "left_behind": True}
    assert not check(detector, 1.0, stacks, IDLE, **busy)
    assert check(detector, 3.0, stacks, BUSY, **busy) is is_stuck


def test_ranks_that_may_only_be_late_are_checked_after_ten_seconds():
    detector = EarlyExitDetector(100.0, has_calls=True)
    assert not check(detector, 101.0, STUCK, IDLE) and detector.next_check_s == 9.0
    assert not check(detector, 110.0, STUCK, IDLE) and detector.next_check_s == 2.0
    assert check(detector, 112.0, STUCK, IDLE)


def test_a_learned_limit_is_a_multiple_of_the_longest_time_between_calls_and_the_end_says_so(simulate):
    job = simulate(3, lockstep="record", stall=None, learns_stall=60.0).run()
    job.stacks = dict.fromkeys(range(3), IN_JAX)
    found = flight_after(30, "0-2")
    job.flights = {rank: replace(found, totals=TimeTotals(longest=21.0)) for rank in range(3)}
    job.wait(100)
    assert job.outcome is None
    job.wait(60)
    text = "no rank has made a call for "
    assert job.verdict.outcome == "stall" and job.verdict.headline.startswith(text)
    assert job.verdict.headline.endswith("the longest before was 21.0 s.")


def test_no_limit_is_learned_from_few_calls(simulate):
    job = simulate(3, lockstep="record", stall=None, learns_stall=60.0).run()
    job.stacks = dict.fromkeys(range(3), IN_JAX)
    job.flights = dict.fromkeys(range(3), flight_after(10, "0-2"))
    assert job.wait(1000).outcome is None
