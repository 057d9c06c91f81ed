"""Each process's rows of the data: the same number on every process at every step.

A global batch of `batch_size` rows is cut into `size` consecutive parts of equal length, one for each rank. A part that
is too short (in the uneven last batch, or if `size` does not divide the batch) is padded by repeating a row, with False
in the mask. So every process takes the same number of steps with the same shapes, and no collective waits for a process
that has run out of data. The parts in the order of ranks are the global batch, whatever `size` is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]
Tree = TypeVar("Tree")


def shard(data: Tree, rank: int | None = None, size: int | None = None, *, multiple: int = 1) -> tuple[Tree, Mask]:
    """Return this process's rows of `data`, and a mask of shape [rows] that is False where a row is padding.

    `data` is an array, or a pytree of arrays with the same number of rows (leading axis). It must be equal on every
    process. For the other parameters see `batches`. Raises ValueError if `data` has no rows, or as `batches` does.
    """
    import jax

    lengths = {_row_count(leaf) for leaf in jax.tree.leaves(data)}
    if len(lengths) != 1 or lengths == {0}:
        raise ValueError(
            f"every array must have the same number of rows, at least 1, but there are {sorted(lengths)}; "
            "give shard() arrays whose leading axes are equal"
        )
    (n_rows,) = lengths
    indices, mask = next(batches(n_rows, n_rows, rank, size, multiple=multiple))
    return jax.tree.map(lambda rows: rows[indices], data), mask


def batches(
    n_rows: int,
    batch_size: int,
    rank: int | None = None,
    size: int | None = None,
    *,
    multiple: int = 1,
    seed: int | Sequence[int] | None = None,
) -> Iterator[tuple[Indices, Mask]]:
    """Yield for each global batch the indices of this process's rows, and a mask that is False where a row is padding.

    There are ceil(n_rows / batch_size) pairs of arrays of shape [rows], where rows is ceil(batch_size / size) rounded
    up to a multiple of `multiple`; with multiple=jax.local_device_count() the devices of a process get equal parts.
    Over all processes and steps, each of the n_rows rows is unmasked exactly once.

    `rank` and `size` default to jax.process_index() and jax.process_count(). With a `seed`, rows are shuffled in the
    same way on every process; seed=(number, epoch) gives each epoch its own order. Raises ValueError for a parameter
    that is out of range.
    """
    rank, size = _rank_and_size(rank, size)
    limits = (("n_rows", n_rows, 0), ("batch_size", batch_size, 1), ("multiple", multiple, 1))
    for name, value, least in limits:
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    order = np.arange(n_rows) if seed is None else np.random.default_rng(seed).permutation(n_rows)
    rows = _round_up(-(-batch_size // size), multiple)
    within = rank * rows + np.arange(rows)
    return (_rows_of_rank(order[start : start + batch_size], within) for start in range(0, n_rows, batch_size))


def _rows_of_rank(batch: Indices, within: Indices) -> tuple[Indices, Mask]:
    # Padding repeats a real row. A row of zeros could become NaN, and a mask does not keep NaN out of a gradient.
    return batch[np.minimum(within, len(batch) - 1)], within < len(batch)


def _rank_and_size(rank: int | None, size: int | None) -> tuple[int, int]:
    if rank is None and size is None:
        import jax

        return jax.process_index(), jax.process_count()
    if rank is None or size is None:
        raise ValueError(f"give rank and size together or neither, not rank={rank}, size={size}")
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in 0 ... size-1, but rank is {rank} and size is {size}")
    return rank, size


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _row_count(leaf: Any) -> int:
    shape = np.shape(leaf)
    if not shape:
        raise ValueError(f"shard() needs arrays with rows, but got the scalar {leaf!r}")
    return int(shape[0])
