"""The run directory is made once, is never shared, and never costs the job."""

import errno
import json
import os
import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from jaxrun.analysis.verdict.verdict import Verdict, to_json
from jaxrun.errors import UsageError
from jaxrun.job_events.events import ParentExited
from jaxrun.protocol.agent_messages import AgentConnected
from jaxrun.protocol.worker_messages import Done
from jaxrun.records.event_log.event_log import LoggedEvent
from jaxrun.records.rundir.jobs import clean, read_job
from jaxrun.records.rundir.recorded_files import continue_job, find_requeued, find_run_dir, is_run_dir
from jaxrun.records.rundir.rundir import RunDir, create, to_file_name

NOW = datetime(2026, 11, 20, 21, 42)
STRANGER = 65534


def events(path):
    """All lines but the first, which says the format."""
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()][1:]


@pytest.fixture
def directory(tmp_path):
    """The run directory `run`, in the process that runs the job."""
    made = create(tmp_path / "run", base=tmp_path, name="", now=NOW)
    yield made
    made.close()


def made(tmp_path, request=None, name="train"):
    directory = create(request, base=tmp_path, name=name, now=NOW)
    directory.close()
    return directory.path


def refusal(tmp_path, request=None):
    with pytest.raises(UsageError) as caught:
        create(request, base=tmp_path, name="train", now=NOW)
    return str(caught.value)


def refused_link(tmp_path):
    with pytest.raises(UsageError, match="is not yours to clean"):
        clean(tmp_path / "jaxrun-runs", [], 0, dry_run=False)
    return refusal(tmp_path)


def test_the_default_has_a_sortable_name_and_is_the_latest(tmp_path):
    first = made(tmp_path)
    assert first == tmp_path / "jaxrun-runs" / "1120-2142-train"
    assert (tmp_path / "jaxrun-runs" / "latest").readlink() == Path("1120-2142-train")
    assert made(tmp_path).name == "1120-2142-train-2"
    assert made(tmp_path).name == "1120-2142-train-3"
    assert os.path.samefile(tmp_path / "jaxrun-runs" / "latest", tmp_path / "jaxrun-runs" / "1120-2142-train-3")
    hidden = sorted(path.name for path in first.parent.iterdir() if path.name.startswith("."))
    assert hidden == [".gitignore", ".numbers"]


def test_what_is_there_already_in_place_of_the_link_and_of_gits_list_stays(tmp_path):
    """`.gitignore` keeps run directories out of commits."""
    collection = tmp_path / "jaxrun-runs"
    (collection / "latest").mkdir(parents=True)
    made(tmp_path)
    assert (collection / ".gitignore").read_text() == "*\n"
    assert sorted(path.name for path in collection.iterdir()) == [".gitignore", ".numbers", "1120-2142-train", "latest"]
    (collection / ".gitignore").write_text("!mine\n")
    made(tmp_path)
    assert (collection / "latest").is_dir() and (collection / ".gitignore").read_text() == "!mine\n"


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("my program's", "my-program-s"),
        ("../../etc", "etc"),
        ("größe.v2", "größe.v2"),
        ("", "job"),
        ("x" * 300, "x" * 60),
    ],
)
def test_any_program_name_becomes_part_of_a_file_name(tmp_path, name, safe):
    assert to_file_name(name) == safe
    assert made(tmp_path, name=name).name == f"1120-2142-{safe}"


def test_a_directory_of_the_users_is_made_or_taken_if_it_is_empty(tmp_path):
    assert made(tmp_path, tmp_path / "a" / "b") == tmp_path / "a" / "b"
    (tmp_path / "empty").mkdir()
    assert made(tmp_path, tmp_path / "empty") == tmp_path / "empty"
    assert not (tmp_path / "jaxrun-runs").exists() and not list((tmp_path / "empty").glob(".*"))


def test_anything_else_in_place_of_the_directory_is_refused_and_left_alone(tmp_path):
    taken = made(tmp_path, tmp_path / "taken")
    assert refusal(tmp_path, taken).endswith(
        f"it holds another job (see it with: jaxrun explain {taken}). Name a new or an empty directory."
    )
    (tmp_path / "full").mkdir()
    for name in "abcde":
        (tmp_path / "full" / name).write_text("")
    assert "it holds a, b, c and 2 more. Name a new" in refusal(tmp_path, tmp_path / "full")
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == list("abcde")
    with pytest.raises(FileExistsError):
        RunDir(taken)
    file = tmp_path / "full" / "a"
    assert "is a file, not a directory" in refusal(tmp_path, file)
    assert "--no-run-dir" in refusal(tmp_path, file / "below")
    (tmp_path / "jaxrun-runs").write_text("")
    assert "--no-run-dir" in refusal(tmp_path)


def test_events_are_on_disk_at_once_one_per_line(directory, tmp_path):
    directory.record(LoggedEvent(12.3456789, AgentConnected(3, "h\n1")))
    directory.record(LoggedEvent(13.0, ParentExited("\udcff"), attempt=2))
    assert events(tmp_path / "run") == [
        {
            "time": 12.345679,
            "attempt": 1,
            "event": {"type": "AgentConnected", "agent": 3, "host": "h\n1", "record": None},
        },
        {"time": 13.0, "attempt": 2, "event": {"type": "ParentExited", "reason": "\udcff"}},
    ]
    directory.close()
    directory.record(LoggedEvent(14.0, Done(0, 14.0)))
    assert len(events(tmp_path / "run")) == 2


def test_files_are_replaced_whole(directory, tmp_path):
    directory.write_text("job.json", "one")
    directory.write_text("job.json", "two \udcff")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["events.jsonl", "job.json"]
    assert (tmp_path / "run" / "job.json").read_text() == "two \\udcff"


def test_a_directory_that_vanishes_is_reported_once_and_never_raised(directory, tmp_path):
    shutil.rmtree(tmp_path / "run")
    errors = []
    directory.write_text("job.json", "before anybody listens")
    directory.on_write_error(errors.append)
    directory.write_text("verdict.json", "after")
    assert directory.make_attempt_directory(2) is None
    assert errors == [
        f"cannot write to {tmp_path / 'run'}: No such file or directory; the job continues, its records are incomplete"
    ]


def test_records_that_could_not_be_written_leave_a_mark_without_content(directory, tmp_path):
    (tmp_path / "run" / "verdict.json").mkdir()  # in the way, as a full disk is
    directory.write_text("verdict.json", "{}")
    assert (tmp_path / "run" / "incomplete").read_bytes() == b""


def test_a_full_disk_is_reported_once_and_costs_no_later_event(directory, tmp_path, monkeypatch):
    room = [5, 0]  # bytes that the next writes find

    def write(descriptor, data, write=os.write):
        fits = room.pop(0) if room else len(data)
        if not fits:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:fits])

    errors = []
    directory.on_write_error(errors.append)
    monkeypatch.setattr(os, "write", write)
    for rank in range(4):
        directory.record(LoggedEvent(1.0, Done(rank, 1.0)))
    monkeypatch.undo()
    assert len(errors) == 1 and "No space left on device" in errors[0]
    _, _, *whole = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"]["rank"] for line in whole] == [2, 3]


def test_a_job_that_wants_no_directory_gets_one_that_does_nothing():
    directory = RunDir(None)
    directory.on_write_error(pytest.fail)
    directory.record(LoggedEvent(1.0, Done(0, 1.0)))
    directory.write_text("job.json", "x")
    directory.close()
    assert (directory.path, directory.make_attempt_directory(2)) == (None, None)


def test_the_path_that_is_shown_outlives_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    directory = create(None, base=tmp_path / "gone", name="train", now=NOW)
    assert directory.shown_path == Path("jaxrun-runs/1120-2142-train")
    shutil.rmtree(tmp_path / "gone")
    assert directory.shown_path == directory.path
    directory.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused_by_name(tmp_path):
    (tmp_path / "jaxrun-runs").mkdir()
    os.chown(tmp_path / "jaxrun-runs", STRANGER, STRANGER)
    said = r"jaxrun-runs: it belongs to \w+.*, who could change .* with --run-dir DIR"
    assert re.search(said, refusal(tmp_path))
    assert not list((tmp_path / "jaxrun-runs").iterdir())
    assert "it belongs to" in refusal(tmp_path, tmp_path / "jaxrun-runs")
    with pytest.raises(UsageError, match="is not yours to clean: it belongs to"):
        clean(tmp_path / "jaxrun-runs", [], 0, dry_run=False)


def test_a_link_of_ones_own_to_a_directory_of_ones_own_is_followed(tmp_path):
    """`ln -s /scratch/$USER/runs jaxrun-runs`, through further links as well."""
    (tmp_path / "scratch" / "me").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "scratch" / ".." / "scratch" / "me")
    (tmp_path / "jaxrun-runs").symlink_to("runs")
    run = made(tmp_path)
    assert run == tmp_path / "jaxrun-runs" / run.name and is_run_dir(tmp_path / "scratch" / "me" / run.name)
    assert find_run_dir(tmp_path / "jaxrun-runs") == run
    job = read_job(run)
    assert not clean(tmp_path / "jaxrun-runs", [replace(job, running=False)], 0, dry_run=False).failed
    assert not run.exists()


def test_a_link_is_not_followed_where_everybody_can_replace_it_or_where_it_leads_nowhere(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "jaxrun-runs").symlink_to("runs")
    tmp_path.chmod(0o777)
    assert "it is a symbolic link that everybody can replace. Name another with --run-dir DIR" in refused_link(tmp_path)
    tmp_path.chmod(0o1777)
    made(tmp_path)
    for target, why in (("jaxrun-runs", "too many symbolic links"), ("none", "No such file"), ("file", "Not a dir")):
        (tmp_path / "file").touch()
        (tmp_path / "jaxrun-runs").unlink()
        (tmp_path / "jaxrun-runs").symlink_to(target)
        assert why in refused_link(tmp_path)
    (tmp_path / "link").symlink_to("runs")  # which somebody has named: they can as well name what it leads to
    assert "it is a symbolic link" in refusal(tmp_path, tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
@pytest.mark.parametrize("given", ["jaxrun-runs", "between", "runs"])
def test_no_link_of_another_user_is_followed_nor_one_to_their_directory(tmp_path, given):
    (tmp_path / "runs").mkdir()
    (tmp_path / "between").symlink_to("runs")
    (tmp_path / "jaxrun-runs").symlink_to("between")
    os.chown(tmp_path / given, STRANGER, STRANGER, follow_symlinks=False)
    why = "leads to a directory of" if given == "runs" else "leads through a symbolic link of"
    assert why in refused_link(tmp_path)
    assert ("root_squash" in refused_link(tmp_path)) == (given == "runs")
    assert not list((tmp_path / "runs").iterdir())


def test_records_stay_in_the_directory_that_was_made_wherever_its_path_leads(tmp_path):
    directory = create(None, base=tmp_path, name="train", now=NOW)
    (tmp_path / "jaxrun-runs").rename(tmp_path / "moved")
    (tmp_path / "elsewhere" / directory.path.name).mkdir(parents=True)
    (tmp_path / "jaxrun-runs").symlink_to("elsewhere")
    directory.write_text("job.json", "x")
    directory.close()
    assert (tmp_path / "moved" / directory.path.name / "job.json").read_text() == "x"
    assert not list(directory.path.iterdir())


def test_a_reader_follows_a_latest_of_the_directorys_owner_only(tmp_path):
    run = made(tmp_path)
    latest = run.parent / "latest"
    assert find_run_dir(run.parent) == find_run_dir(latest).resolve() == run
    if os.geteuid() == 0:
        os.chown(latest, STRANGER, STRANGER, follow_symlinks=False)
        for path in (run.parent, latest):
            with pytest.raises(UsageError, match=r"latest belongs to .*; name the run directory itself"):
                find_run_dir(path)


def test_each_attempt_but_the_first_has_a_directory_of_its_own_for_its_logs(directory, tmp_path):
    assert directory.make_attempt_directory(1) == tmp_path / "run"
    assert directory.make_attempt_directory(2) == directory.make_attempt_directory(2) == tmp_path / "run" / "attempt-2"
    assert (tmp_path / "run" / "attempt-2").is_dir()


def test_a_job_continues_in_its_directory_unless_it_runs_or_has_ended_well(tmp_path, directory):
    run = tmp_path / "run"
    directory.write_text("job.json", json.dumps({"requeue_id": "token 1"}))
    assert find_requeued(run, tmp_path, "token 1", ()) == run and find_requeued(run, tmp_path, "token 2", ()) is None
    assert directory.claim()
    refused = []
    later, attempt, earlier = continue_job(run, claim=lambda one: refused.append(not one.claim()))
    later.close()
    assert refused == [True] and (attempt, earlier) == (2, ())
    directory.close()
    later, *_ = continue_job(run, claim=RunDir.claim)
    with_it, *_ = continue_job(run, claim=lambda one: refused.append(not one.claim()))
    assert refused == [True, True]  # the one that continues has it, too
    with_it.close()
    later.close()
    for exit_code, wanted in ((1, run), (0, None)):
        verdict = Verdict("ok" if exit_code == 0 else "failed", exit_code, {}, headline="", startup=0.0, run=0.0)
        (run / "verdict.json").write_text(to_json(verdict))
        assert find_requeued(run, tmp_path, "token 1", ()) == wanted
    later, _, earlier = continue_job(run)
    later.close()
    assert earlier == (verdict,)


def test_each_command_of_a_requeued_batch_script_continues_in_the_directory_of_its_own_program(tmp_path):
    def leave(minute, exit_code, *program):
        made = create(None, base=tmp_path, name=program[0], now=datetime(2026, 11, 20, 21, minute))
        made.write_text("job.json", json.dumps({"requeue_id": "slurm c 7", "program": program}))
        outcome = "failed" if exit_code else "ok"
        made.write_text("verdict.json", to_json(Verdict(outcome, exit_code, {}, headline="", startup=0.0, run=0.0)))
        made.close()
        return made.path

    def found(*program):
        return find_requeued(None, tmp_path, "slurm c 7", program)

    leave(1, 75, "train.py")
    leave(2, 0, "prepare.py")
    train = leave(3, 75, "train.py")
    assert found("prepare.py") is None and found("train.py") == train
    leave(4, 0, "prepare.py")
    assert found("train.py") == train
    leave(5, 1, "evaluate.py", "--all")
    assert found("train.py") == found("train.py", "--from=40") == train  # arguments may change from start to start
    other = leave(6, 75, "train.py", "--small")
    assert found("train.py") == train and found("train.py", "--small") == other and found("test.py") is None
