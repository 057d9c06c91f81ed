"""The head answers how far all ranks are; agents say how busy their GPUs are; logs say what ranks wrote last."""

import os

import pytest

from jaxrun.agent.gpu_watch import usage_of_ranks
from jaxrun.diagnosis.overview import Overview
from jaxrun.head.events import Requested
from jaxrun.protocol.flight import DispatchedCall, Flight
from jaxrun.protocol.flight_file import EVERY_CALL
from jaxrun.protocol.requests import AnswerState, OverviewRequest, StacksRequest
from jaxrun.protocol.snapshot_messages import SnapshotPurpose
from jaxrun.rundir.event_log import event_entry
from jaxrun.top.job_files import JobFiles, last_line_of


def overview(job):
    """What the last request was answered by."""
    _, answer = job.answered[-1]
    assert answer.state is AnswerState.DONE
    return Overview.from_content(answer.content)


def test_a_job_that_starts_is_answered_for_the_processes_that_there_are(simulate):
    job = simulate(3)
    job.spawn(0, 1)
    job.handle(Requested("1", OverviewRequest())).wait(0.2)
    assert job.snapshots[-1][1:] == (SnapshotPurpose.OVERVIEW, (0, 1))
    assert (overview(job).phase, overview(job).live, overview(job).ends) == ("starting", (0, 1), {})


def test_all_that_ask_get_the_answer_and_ranks_that_have_ended_say_how(simulate):
    job = simulate(3).run()
    job.flights = {rank: Flight(EVERY_CALL, call_counts={"0-2": 5}) for rank in range(3)}
    job.done(1)
    job.handle(Requested("1", OverviewRequest()), Requested("2", OverviewRequest())).wait(0.2)
    assert [number for number, _ in job.answered] == ["1", "2"]
    assert overview(job).phase == "running" and overview(job).ends == {1: "finished"}
    assert overview(job).flights[2].call_counts == {"0-2": 5}
    job.handle(job.failure(2)).handle(Requested("3", OverviewRequest())).wait(0.2)
    assert overview(job).ends[2] == "raised ValueError" and overview(job).phase != "running"


def test_how_many_calls_a_step_has_is_known_from_recorders_that_were_read_for_another_reason(simulate):
    job = simulate(2, lockstep="record").run()
    calls = tuple(DispatchedCall(n / 10, "0-1", n, n, n % 2, n % 2) for n in range(1, 13))
    job.flights = dict.fromkeys(range(2), Flight(EVERY_CALL, calls=calls, call_counts={"0-1": 12}))
    job.wait(5.0)
    job.handle(Requested("1", OverviewRequest())).wait(0.2)
    assert overview(job).calls_per_step == 2


def test_who_only_looks_leaves_no_trace_in_the_event_log():
    assert event_entry(Requested("1", OverviewRequest())) is None
    assert event_entry(Requested("1", StacksRequest())) is not None


@pytest.mark.parametrize(
    ("visible", "usage"),
    [
        (None, {0: (97.0, 2**30), 1: (3.0, 2**20), 2: (50.0, 2**30 + 2**20)}),
        ("1", {0: (3.0, 2**20), 1: (-1.0, -1), 2: (3.0, 2**20)}),
        ("GPU-cc", {0: (-1.0, 2**21), 1: (-1.0, -1), 2: (-1.0, 2**21)}),
    ],
)
def test_each_rank_has_the_figures_of_its_own_gpus(visible, usage):
    text = "GPU-aa, 97, 1024\nGPU-bb, 3, 1\nGPU-cc, [N/A], 2\n\nUnable to ask GPU 3\n"
    assert usage_of_ranks(text, visible, {0: (0,), 1: (1,), 2: (0, 1)}) == usage


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"step 1\nstep 2\n", "step 2"),
        (b"step 1\nloss", "loss"),
        (b"\x1b[32mstep 1\x1b[0m\n\n  \n", "step 1"),
        (b" 10%|#\r 20%|##\r", "20%|##"),
        (
            b"step 1\n[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n",
            "step 1",
        ),
        (b"bell\x07 \xff\tend\n", "bell\ufffd \ufffd end"),
        (b"", ""),
    ],
)
def test_the_last_line_is_that_which_a_terminal_would_show(data, line):
    assert last_line_of(data) == line


def test_the_newer_of_both_logs_has_the_last_line_and_each_attempt_its_own(tmp_path):
    files = JobFiles(tmp_path)
    assert (files.attempt(), files.started(), files.last_line(0, 1)) == (1, None, "")
    (tmp_path / "rank-0000.out").write_text("out\n")
    (tmp_path / "rank-0000.err").write_text(f"{'x' * 9000}\nerr\n")
    os.utime(tmp_path / "rank-0000.out", (1, 1))
    assert files.last_line(0, 1) == "err"
    (tmp_path / "attempt-2").mkdir()
    (tmp_path / "attempt-2" / "rank-0000.out").write_text("again\n")
    (tmp_path / "events.jsonl").write_text('{"time": 12.5, "event": "started"}\n')
    assert (files.attempt(), files.started(), files.last_line(0, 2)) == (2, 12.5, "again")
