"""The files of a run directory: what events.jsonl keeps, and how a job is explained from them, whole or damaged."""

import os
import signal
import weakref

import pytest
from msgspec.structs import replace

from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.analysis.verdict import verdict as verdict_file
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.errors import UsageError
from jaxrun.frontends.top import feed
from jaxrun.frontends.top.feed import last_line_of
from jaxrun.job_events.actions import (
    PrintLine,
    RecordClock,
    RecordLoss,
    RecordReplacement,
    RecordReturn,
    RecordTime,
    Send,
    SignalRanks,
)
from jaxrun.job_events.events import (
    AgentLost,
    AttemptEnded,
    AttemptStarted,
    FaultRequested,
    ParentExited,
    Requested,
    Tick,
)
from jaxrun.protocol.agent_messages import FirstOutput, InjectFault, WorkerExited, WorkerSpawned
from jaxrun.protocol.job_messages import OverviewRequest, StacksRequest
from jaxrun.protocol.query_messages import RankDetail, RankQuery, RankReply
from jaxrun.protocol.stop_messages import CheckpointSaved
from jaxrun.protocol.worker_messages import CoordinatorReady, DeviceReport, Done, Exit, Failed, Hello, WorkerStage
from jaxrun.records.event_log import event_log
from jaxrun.records.event_log.event_log import LoggedEvent
from jaxrun.records.history.explain import explain_run, explain_runs, format_table
from jaxrun.records.history.job_log import rank_phases, read_attempts
from jaxrun.records.rundir.recorded_files import read_job_events

VERDICT = Verdict(
    "failed", 1, {0: "h0", 1: "h1"}, (1,), headline="rank 1 of 2 on h1 raised ValueError.", victims={0: "was stopped"}
)


def line(time, message, attempt=1, to=()):
    return event_log.format_line(LoggedEvent(1000 + time, message, attempt, to))


def job(size, *, slow=None, hosts=1):
    """The events of a job in which every step takes 0.1 s, and one rank imports 2 s longer."""
    lines = [line(0.01 * rank, WorkerSpawned(rank, rank)) for rank in range(size)]
    for rank in range(size):
        late = 2.0 if rank == slow else 0.0
        lines.append(line(0.1 + late, Hello(rank, f"h{rank % hosts}", rank, 1.0, 1000.0, {}, "", {})))
    end = 2.2 if slow is not None else 0.2
    report = DeviceReport(0, 0, size, 1, size, ("cpu",), "cpu", "", 1000 + end, 1000 + end)
    lines += [line(end + 0.1, replace(report, rank=rank)) for rank in range(size)]
    lines += [line(end + 0.2, FirstOutput(0)), line(end + 0.3, SignalRanks((0,), 9))]
    return lines + [line(end + 0.4, WorkerExited(rank, -9 if rank else 0)) for rank in range(size)]


def table(lines):
    (attempt,) = read_attempts(event_log.EventLog(lines))
    return format_table(attempt)


def run_dir(path, lines, verdict=VERDICT):
    path.mkdir(parents=True)
    (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    if verdict is not None:
        (path / "verdict.json").write_text(verdict_file.to_json(verdict))
    return path


def test_the_verdict_is_printed_again_with_a_timeline_of_each_rank(tmp_path):
    path = run_dir(tmp_path / "run", job(2, hosts=2))
    assert explain_run(path).splitlines() == [
        "jaxrun: rank 1 of 2 on h1 raised ValueError.",
        "1 other was stopped; it had no fault of its own.",
        f"logs: {path}/rank-0001.err",
        f"details: jaxrun explain {path}",
        "exit 1",
        "",
        "start-up, in seconds since the job was started:",
        "  rank  host  spawned  imported  joined  proved  first output  ended",
        "     0    h0     0.00      0.10    0.20    0.30          0.40   0.60",
        "     1    h1     0.01      0.10    0.20    0.30             -   0.60",
    ]


def test_of_a_rank_that_came_back_the_table_has_its_first_start_and_its_last_end():
    lines = job(2)[:-2]
    lines.append(line(5.0, WorkerExited(1, -9)))
    lines.append(line(5.0, RecordLoss(1, 1, "rank 1 of 2 was killed by SIGKILL (9)", 1)))
    lines.append(line(5.1, WorkerSpawned(1, 7)))
    lines.append(line(5.2, Hello(1, "h0", 7, 1005.2, 1005.1, {}, "", {})))
    lines.append(line(5.5, DeviceReport(1, 1, 2, 1, 2, ("cpu",), "cpu", "", 1005.4, 1005.5)))
    lines.append(line(5.6, RecordReturn(1, 2, 0.6)))
    lines += [line(9.0, WorkerExited(rank, 0)) for rank in range(2)]
    (attempt,) = read_attempts(event_log.EventLog(lines))
    assert (attempt.ranks[1].joined, attempt.ranks[1].end, attempt.ranks[1].status) == (1000.2, 1009.0, 0)
    marks = [(mark.time, mark.name, mark.detail) for mark in attempt.ranks[1].marks]
    assert marks[-1] == (1005.6, "takes part again", "0.6 s after it was lost")
    assert not [row for row in format_table(attempt) if "slowest" in row]
    assert attempt.ranks[1].losses == 1
    spans = [(span.name, span.start, span.end) for span in rank_phases(attempt.ranks[1], attempt)][-3:]
    assert spans == [
        ("program", 1000.3, 1005.0),
        ("lost, and started again", 1005.0, 1005.6),
        ("program", 1005.6, 1009.0),
    ]


def test_times_of_a_lost_host_are_by_its_own_clock_and_those_of_the_spare_one_by_another():
    lines = [line(0.0, RecordClock(1, -7.0)), *job(2, hosts=2)[:-2]]
    lines.append(line(5.0, Failed(1, 1011.9, WorkerStage.PROGRAM, 1, "ValueError", "no", "")))
    lines.append(line(5.0, RecordLoss(1, 1, "rank 1 of 2 raised ValueError", 1)))
    lines.append(line(5.0, RecordReplacement("h1", "h2", {2: (1,)})))
    lines.append(line(5.1, RecordClock(1, 30.0)))
    lines.append(line(5.2, Hello(1, "h2", 7, 975.2, 975.1, {}, "", {})))
    lines.append(line(5.6, RecordReturn(1, 2, 0.6)))
    lines += [line(9.0, AgentLost(2, "its host is gone"))]
    (attempt,) = read_attempts(event_log.EventLog(lines))
    marks = [(round(mark.time, 3), mark.name) for mark in attempt.ranks[1].marks]
    assert marks == [(1004.9, "ValueError"), (1005.6, "takes part again"), (1009.0, "lost")]
    assert attempt.hosts[1] == "h2" and attempt.marks[-1].name == "h2 takes the place of h1"


def test_of_several_jobs_the_sum_of_their_time_is_shown(tmp_path):
    spent = [line(3600.0, RecordTime(1000.4, 4600.0, {"steps": 3000 * 10**6, "compiling": 599600000}, steps=70))]
    start = [line(0.0, AttemptStarted())]
    paths = [run_dir(tmp_path / name, start + job(2) + more) for name, more in (("a", spent), ("b", spent), ("c", []))]
    lines = explain_runs(paths).splitlines()
    assert lines[0].startswith(f"{paths[0]}: goodput 83.3 % of 1 h 0 min: 16.7 % compiling")
    assert lines[2:5] == [f"{paths[2]}: its steps are not known", "", "what the time of 2 jobs was worth, 140 steps:"]
    assert lines[5].split()[:6] == ["83.3", "%", "1", "h", "40", "min"]


def test_the_slow_rank_is_marked_in_the_step_that_it_held_up():
    text = table(job(4, slow=2))
    row = next(line for line in text.splitlines() if line.split()[0] == "2")
    assert row.split() == ["2", "0.02", "*2.10", "2.20", "2.30", "-", "2.60"]
    assert text.count("*") == 2
    assert text.splitlines()[-1] == "* slowest: rank 2, imported 2.00 s after the median"


def test_a_rank_that_writes_later_than_others_is_not_called_slow():
    lines = [*job(3), line(0.4, FirstOutput(1)), line(9.0, FirstOutput(2))]
    assert "9.00" in table(lines) and "slowest" not in table(lines)


def test_a_large_job_is_summarised_by_step():
    text = table(job(40, slow=33, hosts=4))
    lines = text.splitlines()
    assert len(lines) == 9
    assert " ".join(lines[1].split()) == "step ranks first median last slowest ranks"
    assert " ".join(lines[3].split()) == "imported 40 0.10 0.10 2.10 33 (2.10), 0 (0.10), 1 (0.10)"
    assert lines[6].split()[:2] == ["first", "output"]
    assert lines[-1] == "* slowest: rank 33 (h1), imported 2.00 s after the median"


def test_a_job_without_a_verdict_shows_how_far_it_had_come(tmp_path):
    straggler = Straggler((1,), "0-2", "", 60, 60, 0.9, 0.02, 0.3, 0.3, is_proven=True, frame="data.py:10 load")
    lines = [*job(3)[:5], line(0.1, straggler), line(0.15, WorkerExited(2, -11))]
    text = explain_run(run_dir(tmp_path / "run", lines, verdict=None))
    assert (
        f"no verdict in {tmp_path / 'run'}: jaxrun is still running, was killed, or could not write (a full disk)"
        in text
    )
    assert "of 3 ranks: 3 spawned, 2 imported, 1 ended" in text
    assert "ended badly: rank 2 crashed with SIGSEGV (11)" in text
    assert "last event: WorkerExited of rank 2 after 0.15 s" in text
    assert "came last to 90 % of calls, by 20 ms on average: the others waited 30 % of the time; it was in" in text


def test_damaged_lines_are_skipped_and_counted_and_a_damaged_verdict_is_reported(tmp_path):
    lines = job(2)
    damaged = [*lines, lines[0][:20], "\x00\x00", "[1]", '{"event": {"type": "Done"}}', lines[1].replace("rank", "r")]
    path = run_dir(tmp_path / "run", damaged)
    (path / "verdict.json").write_text(verdict_file.to_json(VERDICT)[:40])
    text = explain_run(path)
    assert text.endswith("(left out: 5 unreadable lines of events.jsonl)")
    assert table(damaged) == table(lines)
    assert f"the verdict in {path / 'verdict.json'} cannot be read" in text


def test_a_log_is_parsed_as_it_is_read_and_no_event_is_kept():
    taken = []
    lines = (taken.append(number) or line(1.0, CheckpointSaved(0, number)) for number in range(1000))
    events = iter(event_log.EventLog(lines))
    assert (next(events).message.step, len(taken)) == (0, 1)
    alive = weakref.WeakSet()

    def watched():
        for event in events:
            assert len(alive) < 5
            message = Kept(0, event.message.step)
            alive.add(message)
            yield replace(event, message=message)

    (attempt,) = read_attempts(watched(), marks_saves=True)
    assert len(attempt.ranks[0].marks) == 999 and len(alive) <= 2


def test_saved_steps_take_no_memory_where_they_are_not_shown():
    lines = [line(float(number), CheckpointSaved(0, number)) for number in range(100)]
    (attempt,) = read_attempts(event_log.EventLog(lines))
    assert (attempt.saved_at, attempt.ranks[0].marks) == (1099.0, [])


class Kept(CheckpointSaved, frozen=True, weakref=True):
    """One to which there may be weak references."""


def test_a_log_of_another_format_is_refused(tmp_path):
    path = run_dir(tmp_path / "run", ['{"format": 4}', *job(1)])
    with pytest.raises(UsageError, match=r"events.jsonl: it is of format 4, and this jaxrun reads format 3\."):
        explain_run(path)


def test_a_log_of_the_format_before_is_read(tmp_path):
    old = r'{"time": 1.0, "attempt": 1, "event": {"type": "ParentExited", "reason": "\udcff"}}'
    path = run_dir(tmp_path / "run", ['{"format": 2}', old])
    (event,) = read_job_events(path)
    assert event.message == ParentExited("\udcff")


def test_a_job_that_started_nothing_is_explained_too(tmp_path):
    assert "no rank was started" in explain_run(run_dir(tmp_path / "run", [], verdict=None))


def test_the_latest_of_several_jobs_is_explained(tmp_path):
    run_dir(tmp_path / "1120-0900-a", job(1))
    newest = run_dir(tmp_path / "1120-1000-b", job(1))
    assert f"explain {newest}" in explain_run(tmp_path)
    (tmp_path / "latest").symlink_to("1120-0900-a")
    assert f"explain {tmp_path / '1120-0900-a'}" in explain_run(tmp_path)


@pytest.mark.parametrize("name", ["", "nothing", "file"])
def test_a_directory_that_is_not_a_run_directory_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Give the run directory of a job"):
        explain_run(tmp_path / name)


def test_of_several_attempts_the_last_is_explained_and_the_others_are_named(tmp_path):
    log = "attempt-2/rank-0000.err"
    killed, raised = "rank 1 of 2 was killed.", "rank 0 of 2 raised ValueError."
    stuck = "2 ranks, 2 groups\n  1 rank  1  train.py:9 load", "rank 1 sleeps at train.py:9 load"
    lines = [
        line(0.0, AttemptStarted()),
        line(0.1, WorkerSpawned(0, 1)),
        line(1.0, AttemptEnded("killed", 137, killed, "rank-0001.err", "", stuck)),
        line(1.0, AttemptStarted(reason=killed), 2),
        line(1.2, WorkerSpawned(0, 2), 2),
        line(2.0, AttemptEnded("failed", 1, raised, log), 2),
        line(2.0, AttemptStarted(reason=raised), 3),
        line(2.3, WorkerSpawned(0, 3), 3),
    ]
    text = explain_run(run_dir(tmp_path / "run", lines, verdict=None))
    assert text.splitlines()[:6] == [
        "earlier attempts:",
        "attempt 1: rank 1 of 2 was killed.   rank-0001.err",
        "  2 ranks, 2 groups",
        "    1 rank  1  train.py:9 load",
        "  rank 1 sleeps at train.py:9 load",
        f"attempt 2: rank 0 of 2 raised ValueError.   {log}",
    ]
    assert "start-up, in seconds since attempt 3 was started:" in text and " 0.30 " in text


def test_a_verdict_keeps_the_verdicts_of_earlier_attempts():
    earlier = replace(VERDICT, headline="the first")
    kept = replace(VERDICT, attempt=2, before=4.5, earlier=(earlier,), left_out=("h2",), no_restart="enough", run=1.0)
    assert verdict_file.from_json(verdict_file.to_json(kept)) == kept
    assert kept.log == "attempt-2/rank-0001.err" and kept.seconds == 5.5


# ---- events.jsonl


def test_what_is_logged_comes_back_as_it_was():
    for message in (
        WorkerExited(1, -9, out_of_memory="61.2 GiB of 64"),
        Failed(1, 5.0, WorkerStage.PROGRAM, 3, "SystemExit", "bye\n\u2028", "", ("note",)),
        FaultRequested("pause", (0, 2)),
        AttemptEnded("failed", 1, "rank 1 failed", "rank-0001.err"),
        AttemptEnded("stall", 124, "no progress", "", "the ranks disagree", ("rank 1 sleeps",)),
    ):
        event = LoggedEvent(12.5, message, 3, (0, 2))
        text = event_log.format_line(event)
        assert event_log.parse_line(text) == event and "\n" not in text


def test_secrets_and_what_the_logs_of_ranks_hold_are_left_out():
    hello = Hello(1, "h1", 77, 2.5, 1.5, {"jax": "0.10.2"}, "ab", {"SECRET": "x"})
    assert event_log.parse_line(line(0.0, hello)).message == replace(hello, environment={})
    failed = Failed(1, 5.0, WorkerStage.PROGRAM, 3, "ValueError", "bad", "Traceback ...")
    assert event_log.parse_line(line(0.0, failed)).message == replace(failed, traceback="")


@pytest.mark.parametrize(
    ("thing", "logged"),
    [
        (Done(1, 6.0), (Done(1, 6.0), ())),
        (Requested("1", StacksRequest()), (StacksRequest(), ())),
        (Requested("1", OverviewRequest()), None),  # who only looks leaves no trace
        (Tick(), None),
        (RankReply(0, 7), None),
        (CoordinatorReady(0, "h:1"), None),
        (Send((0, 2), InjectFault("pause")), (InjectFault("pause"), (0, 2))),
        (Send((0,), Exit()), None),
        (SignalRanks((0, 2), signal.SIGKILL), (SignalRanks((0, 2), signal.SIGKILL), ())),
        (PrintLine("x"), None),
        (Send((0,), RankQuery(7, RankDetail.STACKS)), None),
    ],
)
def test_only_events_and_actions_with_a_reader_are_logged(thing, logged):
    assert event_log.find_message(thing) == logged


# ---- logs


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
    assert (feed.latest_attempt(tmp_path), feed.read_start(tmp_path), feed.last_line(tmp_path, 0)) == (1, None, "")
    (tmp_path / "rank-0000.out").write_text("out\n")
    (tmp_path / "rank-0000.err").write_text(f"{'x' * 9000}\nerr\n")
    os.utime(tmp_path / "rank-0000.out", (1, 1))
    assert feed.last_line(tmp_path, 0) == "err"
    (tmp_path / "attempt-2").mkdir()
    (tmp_path / "attempt-2" / "rank-0000.out").write_text("again\n")
    (tmp_path / "events.jsonl").write_text(f"{event_log.format_header()}\n{line(-987.5, AttemptStarted())}\n")
    assert (feed.latest_attempt(tmp_path), feed.read_start(tmp_path)) == (2, 12.5)
    assert feed.last_line(tmp_path / "attempt-2", 0) == "again"
