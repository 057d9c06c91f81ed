"""One test for each way in which ranks may fare alike or not. The ranks stay in step."""

import warnings

import jax
import pytest
from jax.experimental import multihost_utils

two = pytest.mark.processes(2)


@two
def test_passes(gang):
    ranks = multihost_utils.process_allgather(jax.numpy.ones(1) * jax.process_index())
    assert ranks.sum() == 1 and jax.process_index() == gang.rank


@two
def test_one_fails(gang):
    print(f"rank {gang.rank} was here")
    assert gang.rank == 0


@two
def test_all_fail_alike():
    raise ValueError("the same")


@two
def test_all_fail_differently(gang):
    raise ValueError(f"of rank {gang.rank}")


@two
def test_all_skip():
    pytest.skip("no GPU")


@two
def test_one_skips(gang):
    if gang.rank == 1:
        pytest.skip("not here")


@two
@pytest.mark.skip(reason="not today")
def test_is_skipped_by_its_mark(gang):
    pass


@two
@pytest.mark.xfail(reason="known", strict=True)
def test_one_fails_as_expected(gang):
    assert gang.rank == 0


@two
@pytest.mark.xfail(reason="known", strict=True)
def test_passes_unexpectedly():
    pass


@pytest.fixture
def broken(gang):
    if gang.rank == 1:
        raise RuntimeError("setup is broken")
    yield


@two
def test_setup_fails(broken):
    pass


@pytest.fixture
def breaks_later(gang):
    yield
    if gang.rank == 1:
        raise RuntimeError("teardown is broken")


@two
def test_teardown_fails(breaks_later):
    pass


@two
def test_wants_no_such_fixture(no_such_fixture):
    pass


@two
def test_waits_for_who_fails(gang):
    if gang.rank == 1:
        raise ValueError("boo")
    gang.barrier("all here")


@two
def test_meets_in_different_places(gang):
    gang.barrier("here" if gang.rank else "there")


@two
def test_warns():
    warnings.warn("careful", stacklevel=1)


@pytest.mark.processes(2, tiemout=3)
def test_has_a_wrong_mark():
    pass


def test_has_no_mark_and_asks_for_a_gang(gang):
    pass


def test_has_no_mark():
    pass
