"""A function of one item, traced and compiled for chunks."""

from __future__ import annotations

from typing import NamedTuple

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrun.protocol.map_messages import ArraySpec, StartMap
from jaxrun_runtime.map.compiled_function import CompiledFunction, TracingFailed, cached_function

pytestmark = pytest.mark.jax_version


class Point(NamedTuple):
    x: object
    y: object


def task_of(function, *leaves, template=0, star=False, whole=(), **static):
    specs = tuple(ArraySpec(np.shape(leaf)[1:], np.asarray(leaf).dtype) for leaf in leaves)
    code = cloudpickle.dumps((function, static))
    return StartMap(code, star, template, specs, tuple(map(np.asarray, whole)), None, None)


def run(task, *leaves):
    """The results of one chunk, in the containers that the function returns."""
    found = CompiledFunction(task)
    program = found.programs(len(leaves[0]))[0]
    device = jax.local_devices()[0]
    given = tuple(np.asarray(leaf, spec.dtype) for leaf, spec in zip(leaves, found.inputs, strict=True))
    results = program(jax.device_put(given, device), jax.device_put(task.shared_leaves, device))
    return jax.tree.map(lambda number: np.asarray(jax.tree.leaves(results)[number]), found.template)


XS = np.arange(4.0)


def test_a_function_of_one_item_becomes_one_of_a_chunk():
    assert run(task_of(lambda x: x * x, XS), XS).tolist() == [0.0, 1.0, 4.0, 9.0]


def test_items_and_results_may_be_trees():
    def f(item):
        return {"sum": item["a"] + item["b"][0], "pair": Point(item["a"], None)}

    result = run(task_of(f, XS, 10 * XS, template={"a": 0, "b": (1,)}), XS, 10 * XS)
    assert result["sum"].tolist() == [0.0, 11.0, 22.0, 33.0]
    assert result["pair"].x.tolist() == XS.tolist()
    assert result["pair"].y is None


def test_a_shared_array_is_not_mapped():
    task = task_of(lambda item: item[0] @ item[1], np.ones((4, 3)), template=(1, 0), whole=[np.ones((2, 3))])
    assert run(task, np.ones((4, 3))).shape == (4, 2)


def test_an_item_may_be_the_arguments():
    assert run(task_of(lambda x, y: x - y, XS, XS, template=(0, 1), star=True), XS, XS).tolist() == [0.0] * 4


def test_static_arguments_are_python_values():
    def f(x, *, n, kind):
        return x * n if kind == "times" else x

    assert run(task_of(f, XS, n=3, kind="times"), XS).tolist() == [0.0, 3.0, 6.0, 9.0]


def test_types_are_those_that_jax_takes():
    found = CompiledFunction(task_of(lambda x: x, XS))
    assert found.inputs == (ArraySpec((), np.dtype("float32")),)
    assert found.results == (ArraySpec((), np.dtype("float32")),)


def _branches(x):
    return 1 if x > 0 else 2


@pytest.mark.parametrize(
    "function",
    [
        _branches,
        lambda x: float(x),
        lambda x: [1, 2][x],
        lambda x: np.linalg.eigvals(x),
        lambda x: x.upper(),
        lambda x: "text",
        lambda x: {1: 2}[x],
        lambda x: jnp.arange(10)[jnp.arange(10) > x],
    ],
)
def test_a_function_that_cannot_be_traced_is_refused(function):
    with pytest.raises(TracingFailed):
        CompiledFunction(task_of(function, np.arange(3)))


def test_a_refusal_names_the_users_line():
    with pytest.raises(TracingFailed) as caught:
        CompiledFunction(task_of(_branches, XS))
    refused = caught.value.refused
    assert refused.reason.startswith("TracerBoolConversionError: ")
    assert "\n" not in refused.reason
    assert refused.source_line.startswith(f"{__file__}:")
    assert "in _branches: return 1 if x > 0 else 2" in refused.source_line


def test_an_error_of_the_users_stays_what_it_is():
    with pytest.raises(ZeroDivisionError):
        CompiledFunction(task_of(lambda x: x + 1 / 0, XS))


def test_a_result_that_the_parent_could_not_put_together_is_refused():
    with pytest.raises(TypeError, match="return a dict"):
        CompiledFunction(task_of(lambda x: jax.tree_util.Partial(max, x), XS))


def test_a_function_is_kept_for_its_next_map():
    task = task_of(lambda x: x + 1, XS)
    again = StartMap(task.code, task.unpack_items, task.template, task.item_specs, task.shared_leaves, 7, 5)
    assert cached_function(again) is cached_function(task)
    wider = np.ones((4, 2))
    assert cached_function(
        StartMap(task.code, False, 0, (ArraySpec((2,), wider.dtype),), (), None, None)
    ) is not cached_function(task)


def test_a_chunk_fits_the_memory_that_a_device_may_take():
    def heavy(x):
        return jnp.linalg.inv(jnp.eye(400) + x).sum()

    found = CompiledFunction(task_of(heavy, XS))
    assert found.limit_by_memory(512) < 512
    assert CompiledFunction(task_of(lambda x: x, XS)).limit_by_memory(512) == 512
