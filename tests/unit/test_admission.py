"""Which agents are admitted to an attempt, refused, or contested."""

import pytest

from jaxrun.controller.supervisor.admission import Entry, Place, decide_entry

FREE = Place(is_its_own=False, is_taken=False, is_forsaken=False, loss_is_held=False)
OWN = Place(is_its_own=True, is_taken=False, is_forsaken=False, loss_is_held=False)
TAKEN = Place(is_its_own=False, is_taken=True, is_forsaken=False, loss_is_held=False)
FORSAKEN = Place(is_its_own=False, is_taken=True, is_forsaken=True, loss_is_held=False)
LOST_JUST_NOW = Place(is_its_own=False, is_taken=False, is_forsaken=False, loss_is_held=True)


@pytest.mark.parametrize(
    ("place", "waits", "runs", "is_report", "wanted"),
    [
        (OWN, True, True, False, Entry.ADMITTED),
        (FREE, True, True, True, Entry.ADMITTED),
        (TAKEN, False, False, True, Entry.NAMED),  # the head names both
        (TAKEN, False, True, True, Entry.REFUSED),
        (TAKEN, False, False, False, Entry.IGNORED),  # a second path of the same agent
        (TAKEN, True, False, True, Entry.CONTENDS),
        (TAKEN, True, True, False, Entry.CONTENDS),
        (LOST_JUST_NOW, True, True, True, Entry.CONTENDS),  # the head must learn of the loss first
        (LOST_JUST_NOW, False, True, True, Entry.ADMITTED),
        (FORSAKEN, True, False, True, Entry.ADMITTED),
    ],
)
def test_what_becomes_of_a_message(place, waits, runs, is_report, wanted):
    assert decide_entry(place, waits=waits, runs=runs, is_report=is_report) is wanted
