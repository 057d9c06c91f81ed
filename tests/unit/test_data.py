"""The data slicer: every row exactly once, and the same steps and shapes on every rank."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun_runtime.data import batches, shard

layouts = st.tuples(st.integers(1, 60), st.integers(1, 25), st.integers(1, 7), st.integers(1, 4))
seeds = st.none() | st.integers(0, 2**32) | st.tuples(st.integers(0, 9), st.integers(0, 9))


def on_all_ranks(n_rows, batch_size, size, multiple, seed=None):
    return [list(batches(n_rows, batch_size, rank, size, multiple=multiple, seed=seed)) for rank in range(size)]


@given(layouts, seeds)
def test_all_ranks_take_the_same_steps_and_together_see_every_row_once_in_the_order_of_one_process(layout, seed):
    n_rows, batch_size, size, multiple = layout
    ranks = on_all_ranks(*layout, seed)
    assert {len(steps) for steps in ranks} == {-(-n_rows // batch_size)}
    shapes = {array.shape for steps in ranks for step in steps for array in step}
    ((rows,),) = shapes
    assert rows % multiple == 0
    assert batch_size <= rows * size < batch_size + size * multiple
    alone = [indices[mask] for indices, mask in batches(n_rows, batch_size, 0, 1, seed=seed)]
    assert sorted(np.concatenate(alone)) == list(range(n_rows))
    for step, parts in enumerate(zip(*ranks, strict=True)):
        joined = np.concatenate([indices[mask] for indices, mask in parts])
        assert joined.tolist() == alone[step].tolist()
        # Padding repeats rows of the batch.
        assert {row for indices, mask in parts for row in indices[~mask]} <= set(joined)


def test_an_uneven_last_batch_is_padded_and_masked():
    (first, _), (last, mask) = batches(6, 4, rank=1, size=2)
    assert first.tolist() == [2, 3]
    assert last.tolist() == [5, 5]
    assert mask.tolist() == [False, False]
    assert list(batches(0, 4, rank=0, size=2)) == []


def test_each_epoch_has_an_order_of_its_own():
    orders = [np.concatenate([rows for rows, _ in batches(64, 16, 0, 1, seed=(0, epoch))]) for epoch in (0, 1, 0)]
    assert orders[0].tolist() == orders[2].tolist() != orders[1].tolist()


@pytest.mark.jax_version
def test_without_rank_and_size_they_come_from_jax(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert [rows.tolist() for rows, _ in batches(6, 6)] == [[4, 5]]
    assert shard(np.arange(6))[0].tolist() == [4, 5]


@pytest.mark.jax_version
@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 4))
def test_shard_takes_the_same_rows_of_every_array_in_a_tree(n_rows, size, multiple):
    data = {"x": np.arange(2 * n_rows).reshape(n_rows, 2), "y": (np.arange(n_rows),)}
    parts = [shard(data, rank, size, multiple=multiple) for rank in range(size)]
    x = np.concatenate([part["x"][mask] for part, mask in parts])
    y = np.concatenate([part["y"][0][mask] for part, mask in parts])
    assert x.tolist() == data["x"].tolist()
    assert y.tolist() == data["y"][0].tolist()
    assert len({mask.shape for _, mask in parts}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_rows": -1}, "n_rows must be at least 0, not -1"),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"rank": 2, "size": 2}, "rank is 2 and size is 2"),
        ({"rank": -1, "size": 2}, "rank is -1 and size is 2"),
        ({"size": None}, "together or neither, not rank=0, size=None"),
        ({"multiple": 0}, "multiple must be at least 1, not 0"),
    ],
)
def test_a_parameter_out_of_range_is_named_before_the_first_batch(arguments, message):
    with pytest.raises(ValueError, match=message):
        batches(**{"n_rows": 8, "batch_size": 4, "rank": 0, "size": 1, **arguments})


@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((np.zeros(3), np.zeros(4)), r"but there are \[3, 4\]"),
        (np.zeros((0, 2)), r"at least 1, but there are \[0\]"),
        ({}, r"but there are \[\]"),
        ([1.5, 2.5], "got the scalar 1.5"),
    ],
)
def test_shard_refuses_data_without_common_rows(data, message):
    with pytest.raises(ValueError, match=message):
        shard(data, 0, 1)
