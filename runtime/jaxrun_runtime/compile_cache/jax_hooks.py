"""What jaxrun changes of JAX's persistent cache: each private name behind a probe.

| what                            | private name                            | without it                        |
|---------------------------------|-----------------------------------------|-----------------------------------|
| on CPU, equal keys on all ranks | jax._src.cache_key.get,                 | on CPU, only rank 0 hits          |
|                                 | cache_key._hash_accelerator_config      |                                   |
| each host has a rank that       | jax._src.compiler._cache_write,         | over hosts, the directory must be |
| writes                          | compilation_cache.put_executable_…      | shared                            |
| whole files                     | jax._src.lru_cache.LRUCache.put         | a killed rank may leave half of a |
|                                 |                                         | file, which JAX warns of for ever |
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

UNFINISHED = "-unfinished"  # how the name of a file ends that is being written
_CPU = "cpu"


def make_keys_alike(describe: Callable[[Sequence[Any]], bytes]) -> bool:
    """On CPU, make the key of a program from `describe(devices)` instead of a description of this process."""
    cache_key = sys.modules.get("jax._src.cache_key")
    get, hash_config = getattr(cache_key, "get", None), getattr(cache_key, "_hash_accelerator_config", None)
    if get is None or hash_config is None:
        return False

    @functools.wraps(get)
    def get_key(module: Any, devices: Any, options: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        if backend.platform == _CPU and is_local(list(devices.flat)):
            options = _without_device_numbers(options)
        return get(module, devices, options, backend, *args, **kwargs)

    @functools.wraps(hash_config)
    def hash_devices(digest: Any, devices: Any, *args: Any) -> None:
        if devices.flat[0].platform == _CPU:
            digest.update(describe(list(devices.flat)))
        else:
            hash_config(digest, devices, *args)

    cache_key.get, cache_key._hash_accelerator_config = get_key, hash_devices  # type: ignore[union-attr]
    return True


def is_local(devices: Sequence[Any]) -> bool:
    """Whether all of these devices are this process's own."""
    return all(device.process_index == device.client.process_index() for device in devices)


def _without_device_numbers(options: Any) -> Any:
    """The options with the devices of this process numbered from 0, as JAX does for GPUs."""
    options = copy.deepcopy(options)
    assigned = options.device_assignment
    if assigned is not None:
        shape = assigned.replica_count(), assigned.computation_count()
        options.device_assignment = type(assigned).create(
            sys.modules["numpy"].arange(shape[0] * shape[1]).reshape(shape)
        )
    return options


def write_on_this_rank(directory: Path) -> bool:
    """Keep what this rank compiles, which is not rank 0."""
    compiler, cache = sys.modules.get("jax._src.compiler"), sys.modules.get("jax._src.compilation_cache")
    write, put = getattr(compiler, "_cache_write", None), getattr(cache, "put_executable_and_time", None)
    if write is None or put is None:
        return False
    config, started = sys.modules["jax"].config, time.time()

    @functools.wraps(write)
    def write_here(key: str, seconds: float, name: str, backend: Any, executable: Any, callbacks: Any = ()) -> None:
        if callbacks or seconds < config.jax_persistent_cache_min_compile_time_secs:
            return
        if _changed_at(directory / f"{key}-cache") > started:  # by another rank, where hosts share the directory
            return
        with contextlib.suppress(Exception):  # not every executable can be serialized
            put(key, name, executable, backend, int(seconds))

    compiler._cache_write = write_here  # type: ignore[union-attr]
    return True


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def write_whole_files(report: Callable[[str], None]) -> bool:
    """Let a file appear under its name once it is complete, in the place of one that could not be read.

    The first error is reported, as of a full disk, and nothing is written any more.
    """
    kind = getattr(sys.modules.get("jax._src.lru_cache"), "LRUCache", None)
    put = getattr(kind, "put", None)
    if put is None:
        return False
    failed = False

    @functools.wraps(put)
    def put_whole(cache: Any, key: str, value: bytes) -> None:
        nonlocal failed
        directory = os.fspath(getattr(cache, "_path", ""))
        if getattr(cache, "eviction_enabled", True) or "://" in directory:
            put(cache, key, value)
        elif not failed:
            try:
                _write(os.path.join(directory, f"{key}-cache"), value)
            except OSError as error:
                failed = True
                report(error.strerror or str(error))

    kind.put = put_whole  # type: ignore[union-attr]
    return True


def _write(path: str, content: bytes) -> None:
    unfinished = f"{path}-{os.getpid()}{UNFINISHED}"
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
