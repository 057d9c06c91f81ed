"""Lets jax.make_mesh lay a mesh over several hosts, which JAX refuses on CPU and GPU since 0.10.2.

JAX treats each host (each NVLink domain of GPUs) as a slice, and asks for create_hybrid_device_mesh if devices belong
to several slices. Before 0.10.2 it laid the devices in order, so that the leading axes go over the hosts, and so does
this file. XLA does not see this. If it were told that all hosts are one slice (partition_index), it would plan GPU
collectives for fast links that do not exist.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxrun.text import agree
from jaxrun_runtime import jax_private

_REFUSAL = "multi-slice"
_SLICED_PLATFORMS = ("cpu", "gpu")  # on TPUs slices matter to XLA, so JAX's refusal stays


def allow_several_hosts(notify: Callable[[str], None]) -> None:
    """Replace jax.make_mesh in a job on several hosts; calls `notify` with a line when it is first needed."""
    import jax

    devices = jax.devices()
    if devices[0].platform in _SLICED_PLATFORMS and len({_slice(device) for device in devices}) > 1:
        jax_private.replace_make_mesh(lambda original: _over_several_hosts(original, notify))


def _over_several_hosts(original: Callable[..., Any], notify: Callable[[str], None]) -> Callable[..., Any]:
    """Wrap `original` so that it lays the mesh if JAX refuses to."""
    told: list[str] = []

    @functools.wraps(original)
    def make_mesh(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ValueError as error:
            if _REFUSAL not in str(error):
                raise
        mesh = _lay_mesh(original, *args, **kwargs)
        if not told:
            told.append(_describe(mesh))
            notify(told[0])
        return mesh

    return make_mesh


def _lay_mesh(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make the mesh, with devices in order, that `original` refuses to make from these arguments."""
    import jax
    from jax.experimental import mesh_utils

    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    sizes, *names_and_types = given.args
    sizes = tuple(int(size) for size in sizes)
    devices = list(jax.devices() if given.kwargs["devices"] is None else given.kwargs["devices"])
    # A mesh of one device has one slice. It shows how JAX interprets the names and types.
    model = original((1,) * len(sizes), *names_and_types, devices=devices[:1])
    laid = mesh_utils.create_device_mesh(sizes, devices[: math.prod(sizes)])
    return jax.sharding.Mesh(laid, model.axis_names, axis_types=model.axis_types)


def _describe(mesh: Any) -> str:
    import numpy as np

    slices = np.vectorize(_slice, otypes=[int])(mesh.devices)
    crossing = [
        str(name) for axis, name in enumerate(mesh.axis_names) if (slices != np.take(slices, [0], axis=axis)).any()
    ]
    inside = [name for name in map(str, mesh.axis_names) if name not in crossing]
    sizes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    hosts = f"{len(np.unique(slices))} hosts"
    where = f"{_and(crossing)} {agree('goes', len(crossing))} across the hosts"
    where += f", {_and(inside)} {agree('stays', len(inside))} within a host" if inside else ""
    return (
        f"JAX refuses to make a mesh over {hosts}, so jaxrun has made the one that jax.make_mesh asks for: "
        f"{sizes}; {where} (--make-mesh jax leaves it to JAX)"
    )


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0
