"""The files by which a running job is asked, and answers."""

import json
import os

import pytest

from jaxrun.protocol.requests import REQUESTS_DIR, Answer, AnswerState, StacksRequest
from jaxrun.rundir import request_files


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


@pytest.mark.parametrize("content", [{}, [], None, {"state": "well", "text": "", "content": 1}, {"state": "done"}])
def test_what_is_no_answer_is_refused(content):
    with pytest.raises(ValueError):
        Answer.from_json(json.dumps(content))
