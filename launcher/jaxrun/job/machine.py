"""This machine as a job finds it. `look` reads it; everything that follows decides on the value."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxrun.job.devices import Gpus, amd_cards, cuda_gpus, has_tpu, nvidia_probes, rocm_gpus


@dataclass(frozen=True, slots=True)
class Machine:
    """What a job may use here.

    cores:        those that this process may run on
    gpus:         what is visible, by platform ("cuda", "rocm"); a platform that nobody looked for is left out
    tpu:          whether there are TPU chips
    cuda_plugin:  whether JAX's plugin for CUDA is installed
    """

    host: str
    cores: tuple[int, ...]
    gpus: Mapping[str, Gpus] = field(default_factory=dict)
    tpu: bool = False
    cuda_plugin: bool = True


def probe_machine(platforms: Iterable[str], environ: Mapping[str, str]) -> Machine:
    """Look for the devices of `platforms` only: asking a driver takes time."""
    wanted = set(platforms)
    gpus = {}
    if "cuda" in wanted:
        gpus["cuda"] = cuda_gpus(environ, nvidia_probes(environ))
    if "rocm" in wanted:
        gpus["rocm"] = rocm_gpus(environ, amd_cards())
    return Machine(
        host=os.uname().nodename,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        gpus=gpus,
        tpu="tpu" in wanted and has_tpu(environ),
        cuda_plugin="cuda" in wanted and _has_cuda_plugin(),
    )


def _has_cuda_plugin() -> bool:
    """Whether `jax_plugins`, a namespace that every plugin of JAX adds itself to, holds one for CUDA."""
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("jax_plugins")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return any(name.startswith("xla_cuda") for folder in folders for name in os.listdir(folder))
