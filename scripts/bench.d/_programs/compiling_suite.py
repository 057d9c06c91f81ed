"""Sixty tests, each of which compiles something: on BENCH_SIZE processes with jaxrun's pytest plugin, or without it."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest
from compiles import kinds

SIZE = int(os.environ["BENCH_SIZE"])
pytestmark = [pytest.mark.processes(SIZE)] if SIZE > 1 else []


@pytest.mark.parametrize("size", [5, 6, 7, 9, 10])
@pytest.mark.parametrize("kind", range(12))
def test_compiles(kind: int, size: int) -> None:
    a = np.random.default_rng(size).normal(size=(size, size)).astype("f")
    results = jax.tree.leaves(jax.jit(kinds()[kind])(a))
    assert results and all(np.isfinite(result).all() for result in results)
