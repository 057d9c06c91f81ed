"""The files of a run directory: what events.jsonl keeps, and how a job is explained from them, whole or damaged."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrun.analysis.verdict import verdict as verdict_file
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.errors import UsageError
from jaxrun.frontends.top.feed import JobFiles, last_line_of
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentSignalled,
    FaultNotInjected,
    InjectFault,
    StartFailed,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.requests import OverviewRequest, StacksRequest
from jaxrun.protocol.snapshot_messages import RankDetail, RankQuery, RankReply
from jaxrun.protocol.worker_messages import (
    ChildForked,
    CoordinatorReady,
    DeviceReport,
    Done,
    Exit,
    Failed,
    Hello,
    ThreadFailed,
)
from jaxrun.records.event_log import event_log
from jaxrun.records.event_log.actions import (
    PrintLine,
    Send,
    SignalRanks,
)
from jaxrun.records.event_log.events import (
    AgentLost,
    FaultRequested,
    LauncherSignalled,
    ParentExited,
    Requested,
    SignalRequested,
    Tick,
)
from jaxrun.records.history import timeline
from jaxrun.records.history.explain import explain_run

VERDICT = Verdict(
    "failed", 1, {0: "h0", 1: "h1"}, (1,), headline="rank 1 of 2 on h1 raised ValueError.", victims={0: "was stopped"}
)


def line(event: str, time: float, rank: int | None = None, **more: object) -> str:
    return json.dumps({"time": 1000 + time, "event": event} | ({} if rank is None else {"rank": rank}) | more)


def job(size: int, *, slow: int | None = None, hosts: int = 1) -> list[str]:
    """The events of a job in which every step takes 0.1 s, and one rank imports 2 s longer."""
    lines = [line("spawned", 0.01 * rank, rank, pid=rank) for rank in range(size)]
    for rank in range(size):
        late = 2.0 if rank == slow else 0.0
        lines.append(line("hello", 0.1 + late, rank, host=f"h{rank % hosts}", pid=rank))
    end = 2.2 if slow is not None else 0.2
    lines += [line("proof", end + 0.1, rank, at=1000 + end) for rank in range(size)]
    lines += [line("first_output", end + 0.2, 0), line("stop", end + 0.3, ranks=[0], signal=9)]
    return lines + [line("exit", end + 0.4, rank, status=-9 if rank else 0) for rank in range(size)]


def run_dir(path: Path, lines: list[str], verdict: Verdict | None = VERDICT) -> Path:
    path.mkdir(parents=True)
    (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    if verdict is not None:
        (path / "verdict.json").write_text(verdict_file.to_json(verdict))
    return path


def test_the_verdict_is_printed_again_with_a_timeline_of_each_rank(tmp_path: Path) -> None:
    path = run_dir(tmp_path / "run", job(2, hosts=2))
    assert explain_run(path).splitlines() == [
        "jaxrun: rank 1 of 2 on h1 raised ValueError.",
        "1 other was stopped; it had no fault of its own.",
        f"logs: {path}/rank-0001.err",
        f"again: jaxrun explain {path}",
        "exit 1",
        "",
        "start-up, in seconds since the job was started:",
        "  rank  host  spawned  imported  joined  proved  first output  ended",
        "     0    h0     0.00      0.10    0.20    0.30          0.40   0.60",
        "     1    h1     0.01      0.10    0.20    0.30             -   0.60",
    ]


def test_the_slow_rank_is_marked_in_the_step_that_it_held_up() -> None:
    text = timeline.format_table(timeline.parse_events(job(4, slow=2)))
    row = next(line for line in text.splitlines() if line.split()[0] == "2")
    assert row.split() == ["2", "0.02", "*2.10", "2.20", "2.30", "-", "2.60"]
    assert text.count("*") == 2
    assert text.splitlines()[-1] == "* slowest: rank 2, imported 2.00 s after the median"


def test_a_large_job_is_summarised_by_step() -> None:
    text = timeline.format_table(timeline.parse_events(job(40, slow=33, hosts=4)))
    lines = text.splitlines()
    assert len(lines) == 9
    assert lines[1].split() == ["step", "ranks", "first", "median", "last", "slowest", "ranks"]
    assert lines[3].split() == [
        "imported",
        "40",
        "0.10",
        "0.10",
        "2.10",
        "33",
        "(2.10),",
        "0",
        "(0.10),",
        "1",
        "(0.10)",
    ]
    assert lines[6].split()[:2] == ["first", "output"]
    assert lines[-1] == "* slowest: rank 33 (h1), imported 2.00 s after the median"


def test_a_job_without_a_verdict_shows_how_far_it_had_come(tmp_path: Path) -> None:
    late = {"place": "", "number": 60, "calls": 60, "last": 0.9, "late_s": 0.02, "share": 0.3, "net_share": 0.3}
    straggler = line("straggler", 0.1, ranks=[1], group="0-2", is_proven=True, frame="data.py:10 load", **late)
    lines = [*job(3)[:5], straggler, line("exit", 0.15, 2, status=-11)]
    text = explain_run(run_dir(tmp_path / "run", lines, verdict=None))
    assert (
        f"no verdict in {tmp_path / 'run'}: jaxrun is still running, was killed, or could not write (a full disk)"
        in text
    )
    assert "of 3 ranks: 3 spawned, 2 imported, 1 ended" in text
    assert "ended badly: rank 2: status -11" in text
    assert "last event: exit of rank 2 after 0.15 s" in text
    assert "came last to 90 % of calls, by 20 ms on average: the others waited 30 % of the time; it was in" in text


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = job(2)
    damaged = [*lines, lines[0][:20], "\x00\x00", "[1]", '{"event": "hello"}', '{"event": "x", "time": {}}']
    text = explain_run(run_dir(tmp_path / "run", damaged))
    assert text.endswith("(left out: 5 unreadable lines of events.jsonl)")
    assert timeline.format_table(timeline.parse_events(damaged)) == timeline.format_table(timeline.parse_events(lines))


def test_a_damaged_verdict_is_reported_as_damaged(tmp_path: Path) -> None:
    path = run_dir(tmp_path / "run", job(2))
    (path / "verdict.json").write_text(verdict_file.to_json(VERDICT)[:40])
    assert f"the verdict in {path / 'verdict.json'} cannot be read" in explain_run(path)


def test_a_job_that_started_nothing_is_explained_too(tmp_path: Path) -> None:
    assert "no rank was started" in explain_run(run_dir(tmp_path / "run", [], verdict=None))


def test_the_latest_of_several_jobs_is_explained(tmp_path: Path) -> None:
    run_dir(tmp_path / "1120-0900-a", job(1))
    newest = run_dir(tmp_path / "1120-1000-b", job(1))
    assert f"explain {newest}" in explain_run(tmp_path)
    (tmp_path / "latest").symlink_to("1120-0900-a")
    assert f"explain {tmp_path / '1120-0900-a'}" in explain_run(tmp_path)


@pytest.mark.parametrize("name", ["", "nothing", "file"])
def test_what_is_no_run_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Give the run directory of a job"):
        explain_run(tmp_path / name)


def test_of_several_attempts_the_last_is_explained_and_the_others_are_named(tmp_path: Path) -> None:
    log = "attempt-2/rank-0000.err"
    lines = [
        line("started", 0.0),
        line("spawned", 0.1, 0, pid=1),
        line("attempt_ended", 1.0, attempt=1, headline="rank 1 of 2 was killed.", log="rank-0001.err"),
        line("attempt_started", 1.0, attempt=2, reason="rank 1 of 2 was killed."),
        line("spawned", 1.2, 0, attempt=2, pid=2),
        line("attempt_ended", 2.0, attempt=2, headline="rank 0 of 2 raised ValueError.", log=log),
        line("attempt_started", 2.0, attempt=3, reason="rank 0 of 2 raised ValueError."),
        line("spawned", 2.3, 0, attempt=3, pid=3),
    ]
    text = explain_run(run_dir(tmp_path / "run", lines, verdict=None))
    assert text.splitlines()[:3] == [
        "earlier attempts:",
        "attempt 1: rank 1 of 2 was killed.   rank-0001.err",
        f"attempt 2: rank 0 of 2 raised ValueError.   {log}",
    ]
    assert "start-up, in seconds since attempt 3 was started:" in text and " 0.30 " in text


def test_a_verdict_keeps_those_of_earlier_attempts() -> None:
    earlier = replace(VERDICT, headline="the first")
    kept = replace(VERDICT, attempt=2, before=4.5, earlier=(earlier,), left_out=("h2",), no_restart="enough", run=1.0)
    assert verdict_file.from_json(verdict_file.to_json(kept)) == kept
    assert kept.log == "attempt-2/rank-0001.err" and kept.seconds == 5.5


# ---- events.jsonl

KEPT = {
    "spawned": (WorkerSpawned(1, 77), ("spawned", 1, {"pid": 77})),
    "hello": (
        Hello(1, "h1", 77, 2.5, 1.5, {"jax": "0.10.2"}, "ab", {"SECRET": "x"}),
        ("hello", 1, {"host": "h1", "pid": 77, "started": 1.5, "sent": 2.5, "versions": {"jax": "0.10.2"}}),
    ),
    "proof": (
        DeviceReport(1, 1, 2, 8, 16, ("H200",), "gpu", "nonce", 3.5, 4.5),
        ("proof", 1, {"at": 3.5, "local_devices": 8, "platform": "gpu", "device_kinds": ["H200"]}),
    ),
    "a thread": (
        ThreadFailed(1, 5.0, "Loader", "OSError", "Traceback"),
        ("thread_failed", 1, {"thread": "Loader", "error": "OSError"}),
    ),
    "a fork": (ChildForked(1, 5.0, "loader.py:12 pool"), ("forked", 1, {"at": "loader.py:12 pool"})),
    "failed": (
        Failed(1, 5.0, "program", 3, "SystemExit", "bye", ""),
        ("failed", 1, {"stage": "program", "status": 3, "error": "SystemExit", "sent": 5.0, "message": "bye"}),
    ),
    "done": (Done(1, 6.0), ("done", 1, {"sent": 6.0})),
    "exit": (WorkerExited(1, -9), ("exit", 1, {"status": -9})),
    "signal": (LauncherSignalled(signal.SIGTERM), ("signal", None, {"signal": 15})),
    "an agent": (AgentConnected(1, "h2"), ("connected", 1, {"host": "h2"})),
    "signal to an agent": (AgentSignalled(1, 15), ("agent_signalled", 1, {"signal": 15})),
    "lost": (AgentLost(1, "no answer"), ("lost", 1, {"text": "no answer"})),
    "a signal that was asked for": (SignalRequested(12), ("signal_asked", None, {"signal": 12})),
    "a fault that was asked for": (
        FaultRequested("pause", (0, 2)),
        ("fault_asked", None, {"fault": "pause", "ranks": [0, 2]}),
    ),
    "no such fault": (FaultNotInjected(1, "pause", "no"), ("spared", 1, {"fault": "pause", "text": "no"})),
    "hung up": (ParentExited("its gang"), ("hung_up", None, {"by": "its gang"})),
    "a request": (Requested("1", StacksRequest()), ("requested", None, {"request": "StacksRequest"})),
    "unavailable": (StartFailed("x"), ("unavailable", None, {"text": "x"})),
}


@pytest.mark.parametrize(("event", "entry"), KEPT.values(), ids=KEPT)
def test_an_event_is_kept_in_a_form_that_json_takes(event, entry):
    assert event_log.event_entry(event) == entry
    assert json.loads(json.dumps(entry[2])) == entry[2]


NOT_KEPT = [
    Tick(),
    RankReply(0, 7),
    CoordinatorReady(0, "h:1"),
    Requested("1", OverviewRequest()),  # who only looks leaves no trace
]


@pytest.mark.parametrize("event", NOT_KEPT)
def test_events_that_nobody_reads_again_are_not_kept(event: object) -> None:
    assert event_log.event_entry(event) is None


def test_of_the_actions_only_signals_and_faults_are_kept():
    assert event_log.action_entry(Send((0, 2), InjectFault("pause"))) == (
        "chaos",
        None,
        {"fault": "pause", "ranks": [0, 2]},
    )
    assert event_log.action_entry(SignalRanks((0, 2), signal.SIGKILL)) == ("stop", None, {"signal": 9, "ranks": [0, 2]})
    for action in (PrintLine("x"), Send((0,), Exit()), Send((0,), RankQuery(7, RankDetail.STACKS))):
        assert event_log.action_entry(action) is None


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
