"""`jaxrun list` and `jaxrun clean`: what became of the jobs of a directory, and which run directories go."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from jaxrun.cli.main import main
from jaxrun.rundir.jobs import clean, latest_job, list_jobs
from jaxrun.verdict.verdict import Verdict, to_json

NOW = time.time()
HERE = os.uname().nodename


@pytest.fixture
def collection(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "jaxrun-runs"
    path.mkdir()
    return path


@pytest.fixture
def job(collection):
    """job(NAME, AGE, …): a run directory as a job leaves it that started AGE seconds ago."""

    def make(name, age, *, outcome="ok", code=0, host=HERE, pid=1):
        path = collection / name
        path.mkdir()
        (path / "events.jsonl").write_text("{}\n")
        launcher = {"launcher": {"host": host, "pid": pid}} if host else {}
        (path / "job.json").write_text(json.dumps({"program": ["train.py", "a"], "processes": 2, **launcher}))
        if outcome:
            times = {"startup": 0.5, "run": 1.5, "stopping": None}
            (path / "verdict.json").write_text(to_json(Verdict(outcome, code, {0: "h1", 1: "h1"}, **times)))
        for file in path.iterdir():
            os.utime(file, (NOW - age, NOW - age))
        return path

    return make


def test_each_job_is_listed_with_what_became_of_it(job, capsys):
    job("b", 300)
    job("a", 200, outcome="failed", code=7)
    job("killed", 100, outcome="")
    job("far", 50, outcome="", host="h9")
    with (job("now", 10, outcome="", pid=os.getpid()) / "events.jsonl").open("a"):
        assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "job",
        "run",
        "directory",
        "started",
        "took",
        "processes",
        "how",
        "it",
        "went",
        "program",
    ]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["5", "b"],
        ["4", "a"],
        ["3", "killed"],
        ["2", "far"],
        ["1", "now"],
    ]
    states = ("done", "failed, exit 7", "killed with its launcher", "running, or killed, on h9", "running")
    columns = [re.split(r"  +", line)[-3:-1] for line in lines[1:]]
    assert columns == [["2", state] for state in states]
    assert "2.0 s" in lines[1] and lines[1].endswith("train.py a")


def test_a_number_stands_for_the_job_that_has_it_in_the_list(job, collection, capsys, monkeypatch):
    monkeypatch.chdir(collection.parent)
    job("old", 300)
    job("new", 100, outcome="failed", code=7)
    shown = Path("jaxrun-runs")
    assert latest_job(1) == shown / "new" and latest_job(2) == shown / "old"
    assert main(["top", "2"]) == 2 and f"the job of {shown / 'old'} is over" in capsys.readouterr().err
    assert main(["explain", "3"]) == 2 and "there is no job 3" in capsys.readouterr().err
    (collection.parent / "3").mkdir()
    assert latest_job(3) is None


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
    left = {path.name for path in collection.iterdir()}
    assert left == {"done-1", "done-2", "far", "starting", "now", "mine", "latest"}


def test_a_link_to_the_latest_does_not_outlive_it(job, collection):
    job("only", 10)
    (collection / "latest").symlink_to("only")
    assert main(["clean", "--keep", "0"]) == 0
    assert list(collection.iterdir()) == []


def test_what_cannot_be_deleted_is_told_and_the_others_go(job, collection, monkeypatch):
    really = os.rmdir

    def refuse(name, **where):
        if name == "stays":
            raise PermissionError(13, "Permission denied", name)
        really(name, **where)

    monkeypatch.setattr(os, "rmdir", refuse)
    job("stays", 20)
    job("goes", 10)
    lines, failed = clean(*list_jobs(collection), 0, dry_run=False)
    assert failed == 1 and f"cannot delete {collection / 'stays'}: Permission denied" in lines
    assert [path.name for path in collection.iterdir()] == ["stays"]


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
        (("clean",), "say how many of the newest run directories to keep: jaxrun clean --keep 20"),
        (("clean", "--keep", "-1"), "jaxrun: --keep: -1 is not in the range x>=0"),
        (("list", "nowhere"), "directory 'nowhere' does not exist"),
    ],
)
def test_bad_input_is_one_message(collection, capsys, words, message):
    assert main(words) == 2
    assert message in capsys.readouterr().err
