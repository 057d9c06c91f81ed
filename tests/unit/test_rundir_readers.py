"""What reads run directories, of jaxrun list and clean too: also those that somebody else has filled."""

import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from chrome_format import check_trace
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from jaxrun.analysis.verdict.goodput_text import Goodput
from jaxrun.analysis.verdict.verdict import Verdict, to_json
from jaxrun.cli.click_options import RunDirectory
from jaxrun.cli.main import main
from jaxrun.errors import UsageError
from jaxrun.files.own_files import open_own_directory
from jaxrun.frontends.job_page.page import write_page
from jaxrun.job_client import running_job
from jaxrun.job_client.running_job import find_running_job
from jaxrun.protocol.agent_messages import WorkerSpawned
from jaxrun.protocol.worker_messages import WorkerStage
from jaxrun.records.event_log.event_log import LOGGED_TYPES, LoggedEvent, format_line
from jaxrun.records.history.explain import explain_run, write_trace
from jaxrun.records.rundir import job_numbers, jobs, recorded_files
from jaxrun.records.rundir.jobs import clean, find_job, format_cleaned, format_jobs, list_jobs, read_job
from jaxrun.records.rundir.recorded_files import read_verdict
from jaxrun.terminal import TerminalFormat, without_controls

HERE = os.uname().nodename


@pytest.fixture
def collection(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "jaxrun-runs"
    path.mkdir()
    return path


def names(collection):
    """The run directories that are left; the directory of the jobs' numbers stays."""
    return {path.name for path in collection.iterdir()} - {job_numbers.NUMBERS_DIR}


def number_run_dir(collection, name):
    directory = os.open(collection, os.O_RDONLY)
    job_numbers.assign(directory, name)
    os.close(directory)


@pytest.fixture
def job(collection):
    """job(NAME, AGE, …): a run directory as a job leaves it that started AGE seconds ago."""

    def make(name, age, *, outcome="ok", code=0, host=HERE, pid=1, headline=""):
        path = collection / name
        path.mkdir()
        (path / "events.jsonl").write_text("{}\n")
        launcher = {"launcher": {"host": host, "pid": pid}} if host else {}
        (path / "job.json").write_text(json.dumps({"program": ["train.py", "a"], "processes": 2, **launcher}))
        if outcome:
            times = {"startup": 0.5, "run": 1.5, "stopping": None}
            verdict = Verdict(outcome, code, {0: "h1", 1: "h1"}, headline=headline, **times)
            (path / "verdict.json").write_text(to_json(verdict))
        for file in path.iterdir():
            os.utime(file, (time.time() - age,) * 2)
        number_run_dir(collection, name)
        return path

    return make


def test_each_job_is_listed_with_how_it_ended(job, capsys):
    job("b", 300)
    job("a", 200, outcome="failed", code=7)
    job("killed", 100, outcome="")
    job("far", 50, outcome="", host="h9")
    with (job("now", 10, outcome="", pid=os.getpid()) / "events.jsonl").open("a"):
        assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "job run directory started took processes how it went program"
    assert [line.split()[:2] for line in lines[1:]] == [
        [str(number + 1), name] for number, name in enumerate(("b", "a", "killed", "far", "now"))
    ]
    states = ("done", "failed, exit 7", "killed with its launcher", "running, or killed, on h9", "running")
    columns = [re.split(r"  +", line)[-3:-1] for line in lines[1:]]
    assert columns == [["2", state] for state in states]
    assert "2.0 s" in lines[1] and lines[1].endswith("train.py a")
    for name, message in (("killed", "is gone, and left no verdict"), ("far", "the launcher of this job runs on h9")):
        assert main(["stacks", f"jaxrun-runs/{name}"]) == 2 and message in capsys.readouterr().err


def test_a_job_that_failed_is_listed_with_its_cause_as_far_as_there_is_room(job, capsys):
    cause = "rank 1 of 2 raised ValueError: bad\nrecord, and AssertionError while it handled that, 9.1 s into the run."
    path = job("broken", 10, outcome="failed", code=1, headline=cause)
    job("well", 5)
    assert main(["list"]) == 0
    heading, broken, well = capsys.readouterr().out.splitlines()
    assert heading.split()[-2:] == ["program", "why"] and well.endswith("train.py a")
    shown = " ".join(cause.split())[:79]
    assert broken.endswith(f"  failed, exit 1  train.py a  {shown}…")
    jobs = [read_job(path)]
    assert {len(line) for line in format_jobs(jobs, 120).splitlines()[1:]} == {120}
    assert format_jobs(jobs, 40).endswith("  rank 1 of 2 raised …") and format_jobs(jobs, 900).endswith("into the run.")


def line_with(lines, word):
    """The one line of them with this word."""
    (found,) = (line for line in lines if word in line)
    return found


def test_a_programs_name_adds_no_line_and_a_job_whose_disk_was_full_says_so(job, capsys):
    odd = job("odd\nname\x1b[31m", 10)
    (odd / "job.json").write_text(json.dumps({"program": ["a\nb\x1b[31m.py", "c"], "processes": 2}))
    path = job("full", 5, outcome="")
    (path / "incomplete").touch()
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "odd name" in line_with(lines, "a b.py c")
    assert "unknown: the disk was full, or not writable" in line_with(lines, "full")


def test_a_note_of_the_job_is_shown_by_list_and_explain(job, capsys):
    job("plain", 20)
    path = job("noted", 10)
    (path / "job.json").write_text(json.dumps({"program": ["train.py"], "processes": 2, "tag": "try\n7"}))
    assert main(["list"]) == 0
    heading, _, noted = capsys.readouterr().out.splitlines()
    assert heading.split()[-2:] == ["tag", "program"] and noted.split()[-3:] == ["try", "7", "train.py"]
    assert main(["explain", str(path)]) == 0
    assert capsys.readouterr().out.startswith("tag: try 7\n\n")


def test_a_number_stands_for_the_job_that_has_it_in_the_list(job, collection, capsys, monkeypatch):
    monkeypatch.chdir(collection.parent)
    job("old", 300)
    job("new", 100, outcome="failed", code=7)
    shown = Path("jaxrun-runs")
    assert find_job("1") == shown / "old" and find_job("2") == shown / "new"
    job("newest", 10)
    assert find_job("1") == shown / "old" and find_job("3") == find_job("newest") == shown / "newest"
    assert main(["top", "1"]) == 2 and f"the job of {shown / 'old'} is over" in capsys.readouterr().err
    for word in ("4", "newst"):
        assert main(["explain", word]) == 2 and f"there is no job {word} in jaxrun-runs" in capsys.readouterr().err
    (collection.parent / "4").mkdir()
    assert find_job("4") is None and find_job("jaxrun-runs/old") is None


def test_a_number_stays_with_its_job_and_no_later_job_gets_it(job, collection, capsys):
    for age, name in enumerate(("a", "b", "c")):
        job(name, 300 - age)
    assert main(["clean", "--keep", "0"]) == 0
    assert os.listdir(collection / job_numbers.NUMBERS_DIR) == ["3"]
    job("d", 10)
    assert job_numbers.read_numbers(collection) == {"c": 3, "d": 4}
    (collection / "of-an-older-jaxrun").mkdir()
    (collection / "of-an-older-jaxrun" / "job.json").write_text("{}")
    assert main(["status"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["4", "of-an-older-jaxrun"]


def test_a_shell_completes_the_jobs_by_number_and_name_the_newest_first(job):
    job("old", 300)
    job("new", 10, outcome="failed", code=7)
    given = RunDirectory(exists=True)
    context = click.Context(click.Command("jaxrun explain"))
    found = given.shell_complete(context, click.Argument(["run_dir"]), "")
    assert [item.value for item in found] == ["2", "new", "1", "old"]
    assert found[0].help == "train.py a: failed, exit 7"
    assert [item.value for item in given.shell_complete(context, click.Argument(["run_dir"]), "o")] == ["old"]


def test_the_newest_are_kept_and_those_that_may_run(job, collection, capsys):
    for age in range(1, 5):
        job(f"done-{age}", 1000 * age)
    job("killed", 9000, outcome="")
    job("far", 9000, outcome="", host="h9")
    job("starting", 10, outcome="", host="")
    (collection / "mine").mkdir()
    (collection / "mine" / "notes.txt").write_text("")
    (collection / "latest").symlink_to("done-1")
    with (job("now", 9000, outcome="", pid=os.getpid()) / "events.jsonl").open("a"):
        before = sorted(collection.iterdir())
        assert main(["clean", "--keep", "2", "--dry-run"]) == 0
        assert sorted(collection.iterdir()) == before
        said = capsys.readouterr().out
        assert "would delete jaxrun-runs/killed" in said and "would delete 3 of 8 run directories" in said
        assert main(["clean", "--keep", "2"]) == 0
    said = capsys.readouterr().out
    assert "deleted 3 of 8 run directories in jaxrun-runs (" in said
    assert "kept jaxrun-runs/now: running" in said and "kept jaxrun-runs/far: running, or killed, on h9" in said
    left = names(collection)
    assert left == {"done-1", "done-2", "far", "starting", "now", "mine", "latest"}


def test_a_link_to_the_latest_does_not_outlive_it(job, collection):
    job("only", 10)
    (collection / "latest").symlink_to("only")
    assert main(["clean", "--keep", "0"]) == 0 and names(collection) == set()


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("obstacle", ["another user's", "a folder of another user in it", "not writable"])
def test_nothing_is_deleted_where_not_all_can_be(job, collection, capsys, monkeypatch, dry_run, obstacle):
    for age, name in enumerate(("newest", "odd", "oldest")):
        job(name, 10 + age)
    folder = collection / "odd" / "attempt-0002"
    folder.mkdir()
    (folder / "rank-0000.out").write_text("")

    def refuse(name, directory):
        if name == "odd":
            raise PermissionError(1, "it belongs to ada")
        return open_own_directory(name, directory)

    if obstacle == "another user's":
        monkeypatch.setattr(jobs, "open_own_directory", refuse)
    elif obstacle == "not writable":
        monkeypatch.setattr(os, "access", lambda path, mode: not os.path.samefile(path, folder))
    else:
        monkeypatch.setattr(jobs, "is_trusted", lambda user: False)
    words = ["clean", "--keep", "0", *(["--dry-run"] if dry_run else [])]
    assert main(words) == 2 and names(collection) == {"newest", "odd", "oldest"}
    said = capsys.readouterr().err
    assert "nothing was deleted" in said and str(Path("jaxrun-runs", "odd")) in said


def test_what_launchers_still_write_to_is_kept_though_it_has_a_verdict(job, collection, capsys):
    with (job("delivers", 20, pid=os.getpid()) / "events.jsonl").open("a"):
        assert main(["clean", "--keep", "0"]) == 0 and names(collection) == {"delivers"}
    assert f"kept jaxrun-runs/delivers: done, and its launcher (process {os.getpid()})" in capsys.readouterr().out
    assert main(["clean", "--keep", "0"]) == 0 and names(collection) == set()


def test_a_directory_that_holds_no_run_directory_is_refused_and_nothing_else_is_removed(
    job, collection, capsys, monkeypatch
):
    removed = []
    monkeypatch.setattr("jaxrun.files.shared_memory.remove_abandoned", lambda **_: removed.append("snapshots"))
    path = job("one", 20)
    (collection.parent / "mine").mkdir()
    (collection.parent / "mine" / "notes.txt").write_text("")
    for words, message in ((path, "is one run directory"), (collection.parent / "mine", "holds no run directory")):
        assert main(["clean", "--keep", "0", str(words)]) == 2
        assert message in capsys.readouterr().err
    assert names(collection) == {"one"} and removed == []
    assert main(["clean", "--keep", "0"]) == 0 == main(["clean", "--keep", "0"])
    assert removed == ["snapshots"] * 2


def test_a_directory_that_cannot_be_deleted_is_reported_and_the_others_are_deleted(job, collection, monkeypatch):
    really = os.rmdir

    def refuse(name, **where):
        if name == "stays":
            raise PermissionError(13, "Permission denied", name)
        really(name, **where)

    monkeypatch.setattr(os, "rmdir", refuse)
    job("stays", 20)
    job("goes", 10)
    done = clean(*list_jobs(collection), 0, dry_run=False)
    assert done.failed == {collection / "stays": "Permission denied"} and done.deleted == (collection / "goes",)
    assert f"cannot delete {collection / 'stays'}: Permission denied" in format_cleaned(done)
    assert names(collection) == {"stays"}


@pytest.mark.parametrize("inside", ["", "jaxrun-runs", "jaxrun-runs/a"])
def test_the_collection_is_found_from_within(job, collection, monkeypatch, inside):
    job("a", 10)
    monkeypatch.chdir(collection.parent / inside)
    found, jobs = list_jobs(None)
    assert found.resolve() == collection and [one.path.name for one in jobs] == ["a"]
    found, jobs = list_jobs(collection.parent)
    assert found == collection and len(jobs) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("clean",), "--keep is missing; say how many of the newest run directories to keep: jaxrun clean --keep 20"),
        (("clean", "--keep", "-1"), "jaxrun: --keep: -1 is not in the range x>=0"),
        (("list", "nowhere"), "directory 'nowhere' does not exist"),
    ],
)
def test_bad_input_is_one_message(collection, capsys, words, message):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_job_that_ends_while_it_is_looked_for_is_called_over(job, monkeypatch):
    run_dir = job("ends", 1)
    (run_dir / "verdict.json").rename(run_dir / "later")

    def read_plan(path):
        (run_dir / "later").rename(run_dir / "verdict.json")
        return recorded_files.read_plan(path)

    monkeypatch.setattr(running_job, "read_plan", read_plan)
    with pytest.raises(UsageError, match=r"the job of .*/ends is over; how it went: jaxrun explain"):
        find_running_job(run_dir, "jaxrun stop")


# ---- run directories that somebody else has filled: to read them neither hangs, nor fails, nor steers the terminal

FILES = {
    "verdict.json": to_json(Verdict("ok", 0, {0: "h1"})),
    "events.jsonl": format_line(LoggedEvent(1.0, WorkerSpawned(0, 7))),
    "job.json": json.dumps({"launcher": {"host": os.uname().nodename, "pid": 1}, "program": ["train.py"]}),
    "rank-0000.flight": "",
}


def fill(path, files):
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def read_all(run_dir):
    """What each reader makes of it, refusals too."""
    said = [str(read_verdict(run_dir))]
    for read in (
        lambda: explain_run(run_dir),
        lambda: format_jobs(list_jobs(run_dir.parent)[1]),
        lambda: str(find_running_job(run_dir, "jaxrun stacks")),
        lambda: write_trace(run_dir, run_dir.parent / "t.json"),
        lambda: write_page(run_dir, run_dir.parent / "p.html"),
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
        assert explained == f"cannot read {run_dir / name}: it is not a regular file."
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
    str: TEXTS,
    int: st.integers(-9, 300),
    float: st.floats(0, 1e9),
    float | None: st.none() | st.floats(0, 1e9),
    tuple[int, ...]: st.lists(st.integers(0, 5), max_size=2),
    tuple[str, ...]: st.lists(TEXTS, max_size=2),
    Mapping[int, str]: NAMES,
    tuple[Verdict, ...]: st.just([]),
    Goodput | None: st.none()
    | st.fixed_dictionaries({"total_us": st.integers(0, 10**9), "parts_us": st.just({"steps": 5})}),
}
PLAUSIBLE = st.fixed_dictionaries({field.name: OF_TYPE[field.type] for field in fields(Verdict)})
OUTCOMES = st.sampled_from(["ok", "failed", "timeout", "early-exit", "no outcome"])
VERDICTS = st.builds(
    lambda content, outcome, odd: {**content, "format": 1, "outcome": outcome, **odd},
    PLAUSIBLE,
    OUTCOMES,
    st.dictionaries(st.sampled_from([field.name for field in fields(Verdict)]), ODD, max_size=1),
)
FIELDS = OF_TYPE | {
    bool: st.booleans(),
    float: NUMBERS | st.floats(0, 1e9),
    tuple[tuple[float, ...], ...]: st.just([[1.0, 2.0, 30]]) | st.just([[1.0]]),
    WorkerStage: st.just("program"),
}


def logged(kind):
    """Lines of the log with messages of this type, in which one field may be anything."""
    content = {field.name: FIELDS.get(field.type, st.just({})) for field in fields(kind)}
    odd = st.dictionaries(st.sampled_from(["rank", *content]), ODD, max_size=1)
    event = st.builds(lambda values, odd: {"type": kind.__name__, **values, **odd}, st.fixed_dictionaries(content), odd)
    more = {"to": st.lists(st.integers(0, 5), max_size=2) | ODD}
    attempt = st.integers(1, 3) | ODD
    return st.fixed_dictionaries({"event": event, "time": NUMBERS, "attempt": attempt}, optional=more)


EVENTS = st.sampled_from(sorted(LOGGED_TYPES)).flatmap(lambda name: logged(LOGGED_TYPES[name]))
LAUNCHERS = st.fixed_dictionaries({"host": st.just(os.uname().nodename) | ODD, "pid": st.just(1) | ODD})
JOBS = st.fixed_dictionaries({}, optional={"launcher": LAUNCHERS | ODD, "program": ODD, "processes": ODD})


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
    assert without_controls(f"{red}\n\ta\n\udcff") == f"{red}\n\ta\n\udcff"
    assert without_controls("\x1b[35mother\x1b[0m \x1b[1;31mred\x1b[0m") == "other red"
    assert without_controls(TerminalFormat(80, True).dim("a \x1b[31mb")) == "\x1b[2ma b\x1b[0m"
    assert without_controls("\x1b]0;x\x07\x1b[2J\r\x9b1A\ud800") == "\ufffd]0;x\ufffd\ufffd[2J\ufffd\ufffd1A\ufffd"
