"""Tests that are run under the debugger."""

import pytest


@pytest.mark.processes(2)
def test_stops_on_one_rank(gang):
    secret = 40 + gang.rank
    if gang.rank == 1:
        breakpoint()
    gang.barrier()
    assert secret


@pytest.mark.processes(2)
def test_fails_on_both_ranks(gang):
    secret = 70 + gang.rank
    assert secret == 0


@pytest.mark.processes(2)
def test_comes_after():
    pass
