"""Run directories that somebody else has filled: to read them neither hangs, nor fails, nor steers the terminal."""

import json
import os
import tempfile
from dataclasses import fields
from pathlib import Path

import pytest
from chrome_format import check_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.errors import UsageError
from jaxrun.rundir.explain import explain_run
from jaxrun.rundir.jobs import format_jobs, list_jobs
from jaxrun.rundir.requeued import read_verdict
from jaxrun.rundir.running_job import find_running_job
from jaxrun.terminal import TerminalFormat, without_controls
from jaxrun.trace.write import write_trace
from jaxrun.verdict.verdict import Verdict, to_json

FILES = {
    "verdict.json": to_json(Verdict("ok", 0, {0: "h1"})),
    "events.jsonl": json.dumps({"time": 1.0, "event": "spawned", "rank": 0}),
    "job.json": json.dumps({"launcher": {"host": os.uname().nodename, "pid": 1}, "program": ["train.py"]}),
    "rank-0000.flight": "",
}


def fill(path: Path, files: dict[str, str]) -> Path:
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def read_all(run_dir: Path) -> list[str]:
    """What each reader makes of it, refusals too."""
    said = [str(read_verdict(run_dir))]
    for read in (
        lambda: explain_run(run_dir),
        lambda: format_jobs(list_jobs(run_dir.parent)[1]),
        lambda: str(find_running_job(run_dir, "jaxrun stacks")),
        lambda: "\n".join(write_trace(run_dir, run_dir.parent / "t.json", run_dir.parent / "p.html")),
    ):
        try:
            said.append(read())
        except UsageError as error:
            said.append(str(error))
    return said


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FILES)
def test_a_fifo_in_place_of_a_file_keeps_nobody_waiting(tmp_path, name):
    run_dir = fill(tmp_path / "run", {other: text for other, text in FILES.items() if other != name})
    os.mkfifo(run_dir / name)
    _, explained, listed, *_ = read_all(run_dir)
    if name in ("verdict.json", "events.jsonl"):
        assert explained == f"cannot read {run_dir / name}: it is no regular file."
    assert "run" in listed.splitlines()[1]


NUMBERS = st.sampled_from([0, 1, 2.5, -9, 10**400, 1e308, float("inf"), float("nan")])
TEXTS = st.sampled_from(["", "a", "0", "\ud800", "\x1b]0;title\x07", "\x1b[2J", "x" * 300])
ODD = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
NAMES = st.dictionaries(st.sampled_from(["0", "1", "5"]), TEXTS, max_size=2)
OF_TYPE = {
    "str": TEXTS,
    "int": st.integers(-9, 300),
    "float": st.floats(0, 1e9),
    "float | None": st.none() | st.floats(0, 1e9),
    "tuple[int, ...]": st.lists(st.integers(0, 5), max_size=2),
    "tuple[str, ...]": st.lists(TEXTS, max_size=2),
    "Mapping[int, str]": NAMES,
    "tuple[Verdict, ...]": st.just([]),
}
PLAUSIBLE = st.fixed_dictionaries({field.name: OF_TYPE[str(field.type)] for field in fields(Verdict)})
OUTCOMES = st.sampled_from(["ok", "failed", "timeout", "early-exit", "no outcome"])
VERDICTS = st.builds(
    lambda content, outcome, odd: {**content, "format": 1, "outcome": outcome, **odd},
    PLAUSIBLE,
    OUTCOMES,
    st.dictionaries(st.sampled_from([field.name for field in fields(Verdict)]), ODD, max_size=1),
)
KNOWN_EVENTS = (
    "started", "spawned", "hello", "proof", "failed", "exit", "lost", "clock", "profiled", "stop", "signal", "chaos",
    "attempt_started", "attempt_ended",
)  # fmt: skip
KNOWN_FIELDS = (
    "rank", "at", "host", "status", "attempt", "log", "headline", "pid", "started", "sent", "offset", "output",
    "signal", "ranks", "error", "message", "fault", "file", "text",
)  # fmt: skip
EVENTS = st.fixed_dictionaries(
    {"event": st.sampled_from(list(KNOWN_EVENTS)),
     "time": NUMBERS},
    optional=dict.fromkeys(KNOWN_FIELDS, NUMBERS | ODD),
)  # fmt: skip
LAUNCHERS = st.fixed_dictionaries({"host": st.just(os.uname().nodename) | ODD, "pid": st.just(1) | ODD})
JOBS = st.fixed_dictionaries({}, optional={"launcher": LAUNCHERS | ODD, "program": ODD, "processes": ODD})


@settings(max_examples=60)
@given(st.none() | VERDICTS | VERDICTS | ODD, st.lists(EVENTS | ODD, max_size=6), JOBS | ODD)
def test_whatever_the_files_say_they_are_read_and_shown(verdict, events, job):
    with tempfile.TemporaryDirectory() as name:
        files = {"job.json": json.dumps(job), "events.jsonl": "\n".join(map(json.dumps, events))}
        run_dir = fill(Path(name) / "run", files | ({"verdict.json": json.dumps(verdict)} if verdict else {}))
        for text in read_all(run_dir):
            assert "\x07" not in os.fsencode(without_controls(text)).decode(errors="replace")
        if (run_dir.parent / "t.json").exists():
            check_trace(json.loads((run_dir.parent / "t.json").read_text()))


def test_json_that_is_nested_deep_is_damaged_and_nothing_worse(tmp_path):
    deep = "[" * 200_000
    run_dir = fill(tmp_path / "run", {**FILES, "verdict.json": deep, "job.json": deep, "events.jsonl": deep})
    _, explained, listed, *_ = read_all(run_dir)
    assert "cannot be read: it is nested too deep" in explained and "1 unreadable line" in explained
    assert "run" in listed.splitlines()[1]


def test_colours_and_names_are_shown_and_nothing_that_steers_a_terminal():
    red = TerminalFormat(80, True).red("failed")
    assert without_controls(f"{red}\ta\n\udcff") == f"{red}\ta\n\udcff"
    assert without_controls("\x1b]0;x\x07\x1b[2J\r\x9b1A\ud800") == "\ufffd]0;x\ufffd\ufffd[2J\ufffd\ufffd1A\ufffd"
