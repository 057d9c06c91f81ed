"""The workloads of `bench map`: what is done to one item, for JAX, for numpy and in plain Python.

(a) cheap maths on a number; (b) 200 steps of an ODE for a point; (c) a Python function that JAX cannot trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

STEPS, STEP = 200, 0.005


def maths(x: Any) -> Any:
    import jax.numpy as jnp

    return jnp.sin(x) * jnp.exp(-x * x) + jnp.sqrt(jnp.abs(x) + 1.0)


def maths_numpy(x: Any) -> Any:
    return np.sin(x) * np.exp(-x * x) + np.sqrt(np.abs(x) + 1.0)


def ode(state: Any) -> Any:
    """Lorenz's equations by Runge and Kutta's method of order 4."""
    import jax

    def slope(now: Any) -> Any:
        return jax.numpy.stack(_slope(*now))

    def step(_: Any, now: Any) -> Any:
        k1 = slope(now)
        k2 = slope(now + STEP / 2 * k1)
        k3 = slope(now + STEP / 2 * k2)
        k4 = slope(now + STEP * k3)
        return now + STEP / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    return jax.lax.fori_loop(0, STEPS, step, state)


def ode_python(state: Sequence[float]) -> tuple[float, float, float]:
    x, y, z = state
    for _ in range(STEPS):
        a1, b1, c1 = _slope(x, y, z)
        a2, b2, c2 = _slope(x + STEP / 2 * a1, y + STEP / 2 * b1, z + STEP / 2 * c1)
        a3, b3, c3 = _slope(x + STEP / 2 * a2, y + STEP / 2 * b2, z + STEP / 2 * c2)
        a4, b4, c4 = _slope(x + STEP * a3, y + STEP * b3, z + STEP * c3)
        x += STEP / 6 * (a1 + 2 * a2 + 2 * a3 + a4)
        y += STEP / 6 * (b1 + 2 * b2 + 2 * b3 + b4)
        z += STEP / 6 * (c1 + 2 * c2 + 2 * c3 + c4)
    return x, y, z


def _slope(x: Any, y: Any, z: Any) -> tuple[Any, Any, Any]:
    return 10.0 * (y - x), x * (28.0 - z) - y, x * y - (8.0 / 3.0) * z


def words(number: int) -> int:
    """A quarter of a millisecond of Python."""
    letters: dict[str, int] = {}
    for step in range(1000):
        letter = chr(97 + (number * step) % 26)
        letters[letter] = letters.get(letter, 0) + step
    return sum(letters.values())
