"""Gives each rank its own files for what XLA and JAX dump, since all ranks would write files of the same names.

A directory gets a subdirectory for each rank: --xla_dump_to=dumps writes to dumps/rank-0003. The name of a single file
begins with the rank instead: rank-0003-results.txt.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

from jaxrun.protocol.env import WorkerEnv
from jaxrun_runtime import jax_private

_XLA_FLAGS, _TPU_FLAGS = "XLA_FLAGS", "LIBTPU_INIT_ARGS"
_MAX_FLAGS_BYTES = 100_000  # of a file with flags
_DIRECTORY_FLAG = "--xla_dump_to"
_FLAG = re.compile(
    r"""(?P<name>--xla_\w*dump\w*_to|--xla_gpu_kernel_cache_file)=(?P<quote>["']?)(?P<path>[^"'\s]+|(?<=["'])[^"']+)(?P=quote)"""
)
_IR_DIRECTORY = "jax_dump_ir_to"
_NO_DIRECTORIES = ("-", "sponge")  # stdout, and what JAX and XLA take for a directory that a test names


def keep_apart(env: WorkerEnv, environ: MutableMapping[str, str]) -> None:
    """Change XLA_FLAGS, and JAX's own option, before this rank compiles anything; not if it is the only rank."""
    if env.size == 1:
        return
    for variable in (_XLA_FLAGS, _TPU_FLAGS):
        flags = environ.get(variable, "")
        if variable == _XLA_FLAGS:
            flags = _read_flags(flags)
        if (own := rank_flags(flags, env.rank)) != flags:
            environ[variable] = own
    directory = jax_private.read_option(_IR_DIRECTORY)
    if isinstance(directory, str) and _is_path(directory):
        import jax

        jax.config.update(_IR_DIRECTORY, os.path.join(directory, _name(env.rank)))


def _read_flags(value: str) -> str:
    """Return the flags of XLA_FLAGS, or of the file that it names, as XLA reads them."""
    if value.lstrip().startswith("-") or not os.path.isfile(value):
        return value
    try:
        with open(value, encoding="utf-8") as file:
            return file.read(_MAX_FLAGS_BYTES)
    except (OSError, ValueError):
        return value


def rank_flags(flags: str, rank: int) -> str:
    """Return XLA_FLAGS with this rank's own paths for dumps."""

    def own(found: re.Match[str]) -> str:
        name, quote, path = found["name"], found["quote"], found["path"]
        if not _is_path(path):
            return found[0]
        head, tail = os.path.split(path)
        is_directory = name == _DIRECTORY_FLAG
        path = os.path.join(path, _name(rank)) if is_directory else os.path.join(head, f"{_name(rank)}-{tail}")
        return f"{name}={quote}{path}{quote}"

    return _FLAG.sub(own, flags)


def _is_path(path: str) -> bool:
    return bool(path) and path not in _NO_DIRECTORIES and "://" not in path


def _name(rank: int) -> str:
    return f"rank-{rank:04d}"
