"""Examples that hypothesis makes up are the same on all ranks."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.mark.processes(2)
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, database=None)
@given(number=st.integers())
def test_examples_are_the_same_everywhere(gang, number):
    assert len(set(gang.allgather(number))) == 1
