"""jax.make_mesh over several hosts: what JAX refuses is laid, and anything else is as JAX does it."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxrun_runtime.make_mesh import _describe, _over_several_hosts

_REFUSAL = "`jax.make_mesh` does not support multi-slice topologies. Please use create_hybrid_device_mesh"


def _mesh(slices, *names):
    devices = np.vectorize(lambda index: SimpleNamespace(slice_index=index), otypes=[object])(np.array(slices))
    return SimpleNamespace(devices=devices, axis_names=names, shape=dict(zip(names, devices.shape, strict=True)))


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (_mesh([0, 0, 1, 1], "x"), "mesh over 2 hosts: x=4, hosts along x;"),
        (_mesh([[0, 0], [1, 1], [2, 2]], "data", "model"), "mesh over 3 hosts: data=3 x model=2, hosts along data;"),
        (_mesh([[0, 1], [0, 1]], "data", "model"), "mesh over 2 hosts: data=2 x model=2, hosts along model;"),
        (_mesh([[0, 1], [2, 3]], "a", "b"), "mesh over 4 hosts: a=2 x b=2, hosts along a and b;"),
    ],
)
def test_the_line_says_along_which_axes_the_hosts_lie(mesh, text):
    assert _describe(mesh).startswith(text)


def _make_mesh(axis_sizes, axis_names, axis_types=None, *, devices=None):
    """Refuses as JAX does where the devices are of several hosts, for which a size of more than 1 stands."""
    import jax

    if axis_names == ("wrong",):
        raise ValueError("another error")
    if max(axis_sizes) > 1:
        raise ValueError(_REFUSAL)
    return jax.make_mesh(axis_sizes, axis_names, axis_types, devices=devices)


def test_a_mesh_that_jax_makes_or_refuses_for_another_reason_is_left_as_it_is():
    told = []
    make_mesh = _over_several_hosts(_make_mesh, told.append)
    assert make_mesh((1,), ("x",)).axis_names == ("x",)
    with pytest.raises(ValueError, match="another error"):
        make_mesh((2,), ("wrong",))
    assert told == []


def test_a_mesh_that_does_not_fit_the_devices_is_refused_with_jaxs_own_words():
    make_mesh = _over_several_hosts(_make_mesh, pytest.fail)
    with pytest.raises(ValueError, match="must equal the product of mesh_shape"):
        make_mesh((99,), ("x",))
