"""Asking a running job: the files by which it is asked, and answers; and when `jaxrun profile` asks again."""

import os

import pytest

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.protocol.requests import REQUESTS_DIR, Answer, AnswerState, StacksRequest
from jaxrun.records.rundir import request_files, running_job
from jaxrun.records.rundir.running_job import RequestRefused, RunningJob


@pytest.fixture
def run_dir(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_requests_are_taken_once_and_in_their_order(run_dir):
    assert request_files.take_requests(run_dir) == []
    request_files.write_request(run_dir, "2", StacksRequest(native=True))
    request_files.write_request(run_dir, "1", StacksRequest())
    assert request_files.take_requests(run_dir) == [("1", StacksRequest()), ("2", StacksRequest(native=True))]
    assert request_files.take_requests(run_dir) == []


def test_an_answer_is_replaced_and_nothing_is_left_in_the_end(run_dir, tmp_path):
    request_files.write_request(run_dir, "1", StacksRequest())
    assert request_files.read_answer(run_dir, "1") is None
    for answer in (Answer(AnswerState.PROGRESS, "é"), Answer(AnswerState.DONE, "", {"a": [1, None]})):
        request_files.write_answer(run_dir, "1", answer)
        assert request_files.read_answer(run_dir, "1") == answer
    request_files.remove_request(run_dir, "1")
    assert list(tmp_path.iterdir()) == []
    request_files.remove_request(run_dir, "1")


def test_what_is_no_request_is_known_as_such(run_dir, tmp_path):
    request_files.write_request(run_dir, "1", StacksRequest())
    (tmp_path / REQUESTS_DIR / "2.request").write_bytes(b"\0\0\0\5hello")
    (tmp_path / REQUESTS_DIR / "3.request").write_bytes(b"\xff")
    (tmp_path / REQUESTS_DIR / "notes").touch()
    assert request_files.take_requests(run_dir) == [("1", StacksRequest()), ("2", None), ("3", None)]
    assert [path.name for path in (tmp_path / REQUESTS_DIR).iterdir()] == ["notes"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_requests_of_other_users_are_not_carried_out(run_dir, tmp_path):
    request_files.write_request(run_dir, "1", StacksRequest())
    os.chown(tmp_path / REQUESTS_DIR / "1.request", 1234, 1234)
    assert request_files.take_requests(run_dir) == []
    request_files.write_request(run_dir, "2", StacksRequest())
    os.chown(tmp_path / REQUESTS_DIR, 1234, 1234)
    assert request_files.take_requests(run_dir) == []


# ---- jaxrun profile

DONE = Answer(AnswerState.DONE, content={"files": 2, "bytes": 3 * 2**20})
EARLY = Answer(AnswerState.REFUSED, "too early", {"again": True})
LATE = Answer(AnswerState.REFUSED, "rank 1: it had made call #9 already", {"again": True, "files": 1, "bytes": 5})


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Asks a job that answers so; returns what is printed, and how long the order may take at each attempt."""

    def ask(*answers):
        leads, remaining = [], list(answers)

        def answer(job, request, timeout, on_progress):
            leads.append(request.lead_s)
            found = remaining.pop(0)
            if found.state is AnswerState.REFUSED:
                raise RequestRefused(found)
            on_progress("calls #5-6 of ranks 0-1")
            return found

        monkeypatch.setattr(running_job, "ask", answer)
        monkeypatch.setattr(running_job, "_RETRY_S", 0.0)
        lines = []
        done = running_job.take_profile(RunningJob(tmp_path, 1), 2, None, lines.append)
        return [*lines, done], leads

    return ask


def test_before_the_first_calls_it_waits_and_says_so_once(asked, tmp_path):
    lines, leads = asked(EARLY, EARLY, DONE)
    assert lines[:2] == ["too early; trying again", "profiling 2 steps: calls #5-6 of ranks 0-1 ..."]
    assert lines[2].startswith("2 profiles, 3 MiB, in ") and f"xprof --logdir {tmp_path}/profile" in lines[2]
    assert len(set(leads)) == 1


def test_an_order_that_came_too_late_has_more_time_the_next_time_but_not_for_ever(asked):
    _, leads = asked(LATE, LATE, DONE)
    assert leads == sorted(set(leads))
    with pytest.raises(UnavailableError, match="no profile of all ranks: rank 1: it had made call #9 already"):
        asked(LATE, LATE, LATE, DONE)


def test_other_refusals_are_final(asked):
    with pytest.raises(UnavailableError, match="its program is taking a profile"):
        asked(Answer(AnswerState.REFUSED, "its program is taking a profile of its own", {"again": False}), DONE)


def test_a_file_is_no_directory_for_profiles(tmp_path):
    (tmp_path / "f").touch()
    with pytest.raises(UsageError, match="is a file, not a directory"):
        running_job.take_profile(RunningJob(tmp_path, 1), 1, tmp_path / "f", print)
