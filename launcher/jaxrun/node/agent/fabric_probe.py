"""Finds this host's equipment for NCCL's traffic to other hosts: NICs, net plugins, and variables that select them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from jaxrun.analysis.diagnosis.fabric import CXI, INFINIBAND, plugin_names, relevant_variables
from jaxrun.node.channel.host_addresses import list_addresses
from jaxrun.protocol.probe_messages import FabricFacts

_NCCL = "libnccl.so.2"
_PLUGIN_FILES = "lib[nr]ccl-net*.so*"
_CACHED_PLUGIN = re.compile(rb"/[^\0]*/lib[nr]ccl-net[^/\0]*\.so[^/\0]*")  # a path in the loader's cache


def collect_fabric_facts(environ: Mapping[str, str], gpus: tuple[str, ...], root: Path = Path("/")) -> FabricFacts:
    """Return what a rank with this environment, which sees these GPUs, would find; `root` has /sys and /etc."""
    given = [Path(name) for name in environ.get("LD_LIBRARY_PATH", "").split(":") if name]
    wheels = PathFinder.find_spec("nvidia")
    installed = [Path(folder) / "nccl/lib" for folder in (wheels and wheels.submodule_search_locations) or ()]
    plugins = dict.fromkeys(str(file) for directory in (*given, *installed) for file in _files(directory))
    with contextlib.suppress(OSError):
        plugins |= dict.fromkeys(map(os.fsdecode, _CACHED_PLUGIN.findall((root / "etc/ld.so.cache").read_bytes())))
    replaced = next((path for directory in given if (path := directory / _NCCL).exists()), None)
    has_installed = any((directory / _NCCL).exists() for directory in installed)
    return FabricFacts(
        nics={path.name: kind for kind in (CXI, INFINIBAND) for path in _files(root / "sys/class" / kind, "*")},
        interfaces=tuple(dict.fromkeys(address.interface for address in list_addresses())),
        gpus=gpus,
        plugins=tuple(plugins),
        plugin=_find_plugin(tuple(plugins), environ),
        replaced_nccl=str(replaced) if replaced and has_installed else "",
        variables=relevant_variables(environ),
    )


def _files(directory: Path, pattern: str = _PLUGIN_FILES) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(directory.glob(pattern))
    return []


def _find_plugin(plugins: tuple[str, ...], environ: Mapping[str, str]) -> str:
    by_name = {os.path.basename(path): path for path in reversed(plugins)}
    found = (name if "/" in name and os.path.exists(name) else by_name.get(name) for name in plugin_names(environ))
    return next((path for path in found if path), "")
