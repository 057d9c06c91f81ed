"""Tests of which each process sees a part of covered.py."""

import covered
import pytest


@pytest.mark.processes(2)
def test_ranks(gang):
    assert covered.by_rank(gang.rank)


def test_parent():
    assert covered.here()
