"""`jaxrun profile` asks again where it is worth it."""

from pathlib import Path

import pytest

from jaxrun.errors import UnavailableError
from jaxrun.protocol.requests import Answer, AnswerState
from jaxrun.rundir import profile_request
from jaxrun.rundir.running_job import RequestRefused, RunningJob

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

        monkeypatch.setattr(profile_request, "ask", answer)
        monkeypatch.setattr(profile_request, "_RETRY_S", 0.0)
        lines = []
        lines.append(profile_request.take_profile(RunningJob(tmp_path, 1), 2, None, lines.append))
        return lines, leads

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
    with pytest.raises(UnavailableError.__base__, match="is a file, not a directory"):
        profile_request.take_profile(RunningJob(Path(tmp_path), 1), 1, tmp_path / "f", print)
