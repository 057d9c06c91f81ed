"""`jaxrun logs` on the files of a run directory: what ranks have printed, and following them to the verdict."""

import json
import os

import pytest

from jaxrun.analysis.verdict.verdict import Verdict, to_json
from jaxrun.cli.main import main
from jaxrun.records.history import rank_output


@pytest.fixture
def job(tmp_path, monkeypatch):
    """job(PID): the run directory of a job whose launcher has this process id."""
    monkeypatch.chdir(tmp_path)

    def make(pid):
        path = tmp_path / "jaxrun-runs" / "run"
        path.mkdir(parents=True)
        (path / "events.jsonl").write_text("{}\n")
        launcher = {"host": os.uname().nodename, "pid": pid}
        (path / "job.json").write_text(json.dumps({"program": ["train.py"], "processes": 2, "launcher": launcher}))
        return path

    return make


def log(path, name, text):
    path.mkdir(exist_ok=True)
    (path / name).write_text(text)


def test_logs_print_what_ranks_have_printed_in_the_latest_attempt_or_another(job, capfdbinary):
    path = job(1)
    (path / "verdict.json").write_text(to_json(Verdict("ok", 0, {0: "h1", 1: "h1"})))
    log(path, "rank-0000.out", "first attempt\n")
    for rank in range(2):
        log(path / "attempt-2", f"rank-{rank:04d}.out", f"one {rank}\ntwo {rank}\nend {rank}\n")
        log(path / "attempt-2", f"rank-{rank:04d}.err", f"oops {rank}\n")

    def printed(*words):
        assert main(["logs", *words]) == 0
        return tuple(text.decode().splitlines() for text in capfdbinary.readouterr())

    out, err = printed()
    assert out == [f"[{rank}] {word} {rank}" for rank in range(2) for word in ("one", "two", "end")]
    assert err == ["[0] oops 0", "[1] oops 1"]
    assert printed("--rank", "1", "--tail", "2") == (["[1] two 1", "[1] end 1"], ["[1] oops 1"])
    assert printed("-n", "0") == ([], [])
    assert printed("--attempt", "1", str(path)) == (["[0] first attempt"], [])
    for words, why in (
        (("--attempt", "3"), "has no attempt 3; it has 2 attempts"),
        (("--rank", "5-6"), "whose logs are of ranks 0-1"),
        (("--rank", "x"), "is not a rank"),
    ):
        assert main(["logs", *words]) == 2 and why in capfdbinary.readouterr().err.decode()


def test_following_goes_on_to_the_next_attempt_and_ends_with_the_verdict(job, capfdbinary, monkeypatch):
    path = job(os.getpid())
    log(path, "rank-0000.out", "a\n")
    steps = iter(
        (
            lambda: log(path, "rank-0001.out", "late\n"),
            lambda: log(path / "attempt-2", "rank-0000.out", "b\n"),
            lambda: log(path / "attempt-2", "rank-0000.out", "b\nunfinished"),
            lambda: (path / "verdict.json").write_text(to_json(Verdict("failed", 7, {0: "h1"}))),
        )
    )
    monkeypatch.setattr(rank_output.time, "sleep", lambda seconds: next(steps)())
    assert main(["logs", "-f"]) == 0
    out, err = (text.decode().splitlines() for text in capfdbinary.readouterr())
    assert out == ["[0] a", "[1] late", "[0] b", "[0] unfinished"]
    assert err[0] == "jaxrun: attempt 2" and err[-1].endswith("exit 7")
