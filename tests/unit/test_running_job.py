"""The client of a running job: answers that come, or do not, and the end of the job meanwhile."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxrun.errors import UnavailableError
from jaxrun.job_client.job_requests import stop
from jaxrun.job_client.running_job import RequestRefused, RunningJob
from jaxrun.protocol.codec import Form, MessageDecoder, encode_json_frame, message_types
from jaxrun.protocol.job_messages import (
    SOCKET_VERSION,
    Answer,
    Answered,
    AnswerState,
    Ask,
    Dropped,
    EndOrder,
    FromClient,
    Greeting,
    JobEnded,
    OverviewRequest,
)

JOB_ID = "ab" * 16
DONE = Answer(AnswerState.DONE, "", {"a": [1, None]})


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[RunningJob, Callable[..., None], socket.socket]]:
    """(a RunningJob, what sends it frames, the launcher's end)."""
    ours, theirs = socket.socketpair()
    asking = RunningJob(tmp_path, ours, 4711)
    with theirs:
        yield asking, lambda *messages: theirs.sendall(b"".join(map(encode_json_frame, messages))), theirs
    asking.close()


Ends = tuple[RunningJob, Callable[..., None], socket.socket]


def test_the_final_answer_is_returned_and_earlier_ones_are_shown(ends: Ends) -> None:
    job, answer, theirs = ends
    stale = Answered(5, Answer(AnswerState.DONE, "of another request"))
    answer(
        Greeting(SOCKET_VERSION, JOB_ID), stale, Answered(1, Answer(AnswerState.PROGRESS, "half")), Answered(1, DONE)
    )
    shown: list[Answer] = []
    assert job.ask(OverviewRequest(), 5.0, shown.append) == DONE and [one.text for one in shown] == ["half"]
    sent = MessageDecoder(message_types(FromClient), form=Form.JSON).feed(theirs.recv(2**16))
    assert sent == [Greeting(SOCKET_VERSION), Ask(1, OverviewRequest())]
    answer(Answered(2, Answer(AnswerState.REFUSED, "no")))
    with pytest.raises(RequestRefused, match="no"):
        job.ask(OverviewRequest())
    assert job.is_running


UNANSWERED = {
    "no answer comes": ([], r"the launcher \(process 4711\) has not answered in 0\.01 s; is it stopped\?"),
    "the job ends": ([JobEnded("{}")], "the job ended before it answered; to see how it went: jaxrun explain"),
    "it is newer": ([Greeting(99)], "it is of a newer jaxrun, and its socket speaks version 99, not 2; ask with"),
    "it is older": ([Greeting(1), Dropped("?")], "it is of an older jaxrun, and its socket speaks version 1, not 2"),
    "it was dropped": ([Dropped("64 others")], "cannot be asked: 64 others"),
    "it is no launcher": ([Ask(1, OverviewRequest())], "it is of another version of jaxrun: a frame is of no known"),
}


@pytest.mark.parametrize(("frames", "text"), UNANSWERED.values(), ids=UNANSWERED)
def test_what_is_not_answered_says_why(ends: Ends, frames: list[object], text: str) -> None:
    job, answer, _ = ends
    answer(*frames)
    with pytest.raises(UnavailableError, match=text):
        job.ask(OverviewRequest(), 60.0 if frames else 0.01)
    assert job.is_running == (not frames)


def frame_of_version_1(kind: str, **fields: object) -> bytes:
    """What a launcher sends that speaks the first version of the socket."""
    body = json.dumps({"v": 2, "type": kind, **fields}, separators=(",", ":")).encode()
    return struct.pack("!I", len(body)) + body


@pytest.mark.parametrize("ask", ["ask", "stop", "greet"])
def test_an_older_launcher_is_named_and_no_job_is_called_over_for_it(ends: Ends, ask: str) -> None:
    job, _, theirs = ends
    dropped = frame_of_version_1("Dropped", reason="it speaks version 2 of this socket, not 1")
    theirs.sendall(frame_of_version_1("Greeting", version=1, job_id=JOB_ID) + dropped)
    with pytest.raises(UnavailableError, match=r"it is of an older jaxrun, and its socket speaks version 1, not 2"):
        match ask:
            case "ask":
                job.ask(OverviewRequest())
            case "stop":
                stop(job, now=True, show=lambda text: None)
            case "greet":
                job.await_greeting(5.0)


def test_a_launcher_that_greets_late_or_not_at_all_is_asked_all_the_same(ends: Ends) -> None:
    job, answer, _ = ends
    job.await_greeting(0.01)
    answer(Greeting(SOCKET_VERSION, JOB_ID))
    job.await_greeting(5.0)
    assert job.is_running


def test_a_launcher_that_is_killed_ends_the_wait(ends: Ends) -> None:
    job, _, theirs = ends
    assert not job.wait_until_over(0.0)
    theirs.close()
    assert job.wait_until_over(5.0) and not job.is_running
    job.send(EndOrder())
    with pytest.raises(UnavailableError, match="the job ended before it answered"):
        job.ask(OverviewRequest(), None)
