"""After ranks have diverged, histories are compared on: what differs once they are in step again is found."""

import pytest

from jaxrun.lockstep.compare import Candidate, find_candidates, find_divergence
from jaxrun.lockstep.further_divergences import find_further_divergences, find_latest_sets
from jaxrun.protocol.flight import DispatchedCall, Flight, ProgramInfo
from jaxrun.protocol.flight_file import EVERY_CALL

ALL = "0-2"


def flight(text, *, first=1):
    """The flight of a rank that made these calls: a letter for each program and line; upper case for another line."""
    programs = {ord(key): ProgramInfo(f"jit({key})", key, key) for key in text.lower()}
    calls, chain = [], 0
    for number, letter in enumerate(text, 1):
        chain = hash((chain, letter.lower()))
        if number >= first:
            calls.append(DispatchedCall(float(number), ALL, number, chain, ord(letter.lower()), ord(letter)))
    sites = {ord(letter): (f"train.py:{ord(letter)} main",) for letter in text}
    return Flight(EVERY_CALL, calls=tuple(calls), call_counts={ALL: len(text)}, programs=programs, sites=sites)


def further(*texts, first=1):
    """What differs after the first divergence: (number, ranks that made one call more)."""
    whole = {rank: flight(text) for rank, text in enumerate(texts)}
    (candidate,) = find_candidates(whole)
    divergence = find_divergence(candidate, whole)
    assert divergence is not None
    flights = {rank: flight(text, first=first) for rank, text in enumerate(texts)}
    latest = find_latest_sets(flights, ALL)
    assert latest is not None
    found = find_further_divergences(divergence, latest, {rank: flights[rank] for rank in latest.representatives})
    return [(one.number, one.extra_call_ranks) for one in found]


@pytest.mark.parametrize(
    ("texts", "found"),
    {
        "nothing more": (("ssessssss", "sssssssss"), []),
        "a call of one rank alone, then another program": (("sslssssess", "ssssssfss"), [(7, ())]),
        "one alone again and again": (("slslslslss", "ssssss"), []),
        "one alone again and again, then another program": (("slslslslssvs", "ssssssws"), [(7, ())]),
        "one alone twice in other lines": (("sslsssLsss", "ssssssss"), [(6, (0,))]),
        "two alone, at once": (("ssabssscss", "sssssdss"), [(6, ())]),
        "the same in another line is no difference": (("sasss", "sbsSs"), []),
        "one that never comes together again": (("sabababa", "scdefghi"), []),
        "a third rank": (("sassbss", "scssdss", "scssbss"), [(5, ())]),
    }.values(),
)
def test_what_differs_after_a_divergence(texts, found):
    shown = further(*texts, *[texts[1]] * (3 - len(texts)))
    assert [number for number, _ in shown] == [number for number, _ in found], shown
    assert [extra for _, extra in shown] == [extra for _, extra in found]


def test_histories_that_do_not_go_back_to_the_divergence_show_nothing():
    texts = ("sa" + "s" * 30 + "vs", "sb" + "s" * 30 + "ws", "sb" + "s" * 30 + "ws")
    assert further(*texts) == [(33, ())] and further(*texts, first=5) == []


def test_ranks_without_a_common_call_are_not_compared():
    flights = {0: flight("abc"), 1: flight("abcdefgh", first=6), 2: flight("abc")}
    assert find_latest_sets(flights, ALL) is None
    flights = {0: flight("abc"), 1: flight("abx"), 2: flight("abcd")}
    assert find_latest_sets(flights, ALL) == Candidate(ALL, 3, ((0, 2), (1,)))
