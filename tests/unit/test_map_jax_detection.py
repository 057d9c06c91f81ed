"""The functions that a pool treats as JAX functions."""

from __future__ import annotations

import functools
import math
from collections import abc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrun.map.jax_detection import uses_jax

pytestmark = pytest.mark.jax_version

TABLE = jnp.arange(3)
LIST = [1, 2]


def direct(x):
    return jnp.sin(x)


def indirect(x):
    return helper(x) + 1


def helper(x):
    return direct(x)


def imports_it(x):
    import jax.numpy

    return jax.numpy.cos(x)


def with_array(x):
    return x + TABLE


def nested(x):
    def inner(y):
        return jnp.cos(y)

    return inner(x)


def closing_over(function):
    return lambda x: function(x)


class Model:
    def __init__(self):
        self.weights = np.ones(3)

    def __call__(self, x):
        return jnp.dot(x, self.weights)

    def plain(self, x):
        return x


@functools.wraps(direct)
def wrapper(x):
    return x


@pytest.mark.parametrize(
    "function",
    [
        direct,
        indirect,
        imports_it,
        with_array,
        nested,
        closing_over(direct),
        functools.partial(max, direct),
        functools.partial(direct),
        jax.jit(lambda x: x),
        jnp.sin,
        jax.vmap(lambda x: x),
        Model(),
        wrapper,
    ],
)
def test_a_function_that_names_jax_is_for_jax(function):
    assert uses_jax(function)


def plain(x):
    return math.sqrt(x) + len(LIST) + np.sin(x)


def recursive(x):
    return recursive(x - 1) if x else 0


def jaxlike(x):
    return abc.Sized, x.jax


@pytest.mark.parametrize(
    "function",
    [plain, recursive, jaxlike, len, str, math.sqrt, np.sin, "a".join, closing_over(plain), functools.partial(plain)],
)
def test_any_other_stays_plain_python(function):
    assert not uses_jax(function)
