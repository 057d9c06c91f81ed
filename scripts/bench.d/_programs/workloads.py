"""The workloads of `bench map`: what is done to one item, for JAX, for numpy and in plain Python.

(a) cheap maths on a number; (b) 200 steps of an ODE for a point; (c) a Python function that JAX cannot trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

STEPS, STEP = 200, 0.005


def maths(x: Any) -> Any:
    import jax.numpy as jnp

    return jnp.sin(x) * jnp.exp(-x * x) + jnp.sqrt(jnp.abs(x) + 1.0)


def maths_numpy(x: Any) -> Any:
    """Of a number, or of an array of them."""
    return np.sin(x) * np.exp(-x * x) + np.sqrt(np.abs(x) + 1.0)


def maths_python(x: float) -> float:
    return math.sin(x) * math.exp(-x * x) + math.sqrt(abs(x) + 1.0)


def ode(state: Any) -> Any:
    """Lorenz's equations by Runge and Kutta's method of order 4."""
    import jax

    return jax.lax.fori_loop(0, STEPS, lambda _, now: _step(now, jax.numpy), state)


def ode_numpy(state: Any) -> Any:
    """Of a point, or of an array of shape [points, 3]."""
    now = np.moveaxis(state, -1, 0)
    for _ in range(STEPS):
        now = _step(now, np)
    return np.moveaxis(now, 0, -1)


def ode_python(state: Sequence[float]) -> tuple[float, float, float]:
    x, y, z = state
    for _ in range(STEPS):
        a1, b1, c1 = _slope_of(x, y, z)
        a2, b2, c2 = _slope_of(x + STEP / 2 * a1, y + STEP / 2 * b1, z + STEP / 2 * c1)
        a3, b3, c3 = _slope_of(x + STEP / 2 * a2, y + STEP / 2 * b2, z + STEP / 2 * c2)
        a4, b4, c4 = _slope_of(x + STEP * a3, y + STEP * b3, z + STEP * c3)
        x += STEP / 6 * (a1 + 2 * a2 + 2 * a3 + a4)
        y += STEP / 6 * (b1 + 2 * b2 + 2 * b3 + b4)
        z += STEP / 6 * (c1 + 2 * c2 + 2 * c3 + c4)
    return x, y, z


def _slope_of(x: float, y: float, z: float) -> tuple[float, float, float]:
    return 10.0 * (y - x), x * (28.0 - z) - y, x * y - (8.0 / 3.0) * z


def _step(now: Any, library: Any) -> Any:
    k1 = _slope(now, library)
    k2 = _slope(now + np.float32(STEP / 2) * k1, library)
    k3 = _slope(now + np.float32(STEP / 2) * k2, library)
    k4 = _slope(now + np.float32(STEP) * k3, library)
    return now + np.float32(STEP / 6) * (k1 + 2 * k2 + 2 * k3 + k4)


def _slope(now: Any, library: Any) -> Any:
    x, y, z = now
    return library.stack([10.0 * (y - x), x * (28.0 - z) - y, x * y - (8.0 / 3.0) * z])


def words(number: int) -> int:
    """A quarter of a millisecond of Python."""
    letters: dict[str, int] = {}
    for step in range(1000):
        letter = chr(97 + (number * step) % 26)
        letters[letter] = letters.get(letter, 0) + step
    return sum(letters.values())
