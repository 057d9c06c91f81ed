"""Sets JAX's persistent cache of compiled programs up, before the first compilation."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrun.files.compiled_programs import cache_directory, make_cache_directory, open_cache_directory
from jaxrun.files.own_files import is_draft
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.settings import CACHE_AUTO
from jaxrun_runtime import jax_private
from jaxrun_runtime.compile_cache import compiler_hooks
from jaxrun_runtime.compile_cache.shared_programs import choose_oldest, list_stored

# A restart needs many small programs, too. Loading a program is faster than compiling it, whatever its size.
_THRESHOLDS = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}
_MAX_AUTO_BYTES = 4 * 2**30  # the limit of jaxrun's own directory; the oldest programs are deleted beyond it
_STALE_S = 3600.0  # a draft older than this was abandoned
_X86_FACTS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
_ARM_FACTS = ("Features", "CPU implementer", "CPU variant", "CPU part")


def set_up(env: WorkerEnv, warn: Callable[[str], None]) -> None:
    """Let JAX keep compiled programs in the directory of --compile-cache. jax must have been imported.

    warn:  called with a line for each feature that this JAX lacks
    """
    import jax

    directory = cache_directory(env.compile_cache, os.environ)
    try:
        make_cache_directory(directory)
    except OSError as error:
        if env.local_rank == 0:
            _print(env, f"does not use --compile-cache {directory}: {error.strerror}")
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    for option, value in _THRESHOLDS.items():
        if option.upper() not in os.environ:
            jax.config.update(option, value)
    if env.local_rank == 0:
        clean(directory, _MAX_AUTO_BYTES if env.compile_cache == CACHE_AUTO else None)

    def report_error(error: str) -> None:
        _print(env, f"keeps no more compiled programs in {directory}: {error}")

    if not compiler_hooks.write_whole_files(report_error):
        warn(jax_private.lacks("a rank that is killed may leave half a program in the directory of --compile-cache"))
    if env.local_rank == 0 and env.rank and not compiler_hooks.write_on_this_rank(directory):
        what = "this host keeps no programs unless it shares the directory of --compile-cache"
        print(f"jaxrun: rank {env.rank} ({env.host}): {jax_private.lacks(what)}", file=sys.stderr)
    machine = describe_machine()

    def describe(devices: Sequence[Any]) -> bytes:
        # XLA splits loops by the number of cores of the compiling thread, and the program may bind itself to fewer.
        return repr((machine, len(os.sched_getaffinity(0)), compiler_hooks.describe_devices(devices))).encode()

    if not compiler_hooks.make_keys_alike(describe):
        warn(jax_private.lacks("on CPUs only rank 0 finds what --compile-cache keeps"))


def clean(directory: Path, max_bytes: int | None) -> None:
    """Delete abandoned drafts and, if the directory has more than `max_bytes`, the oldest programs."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        opened = open_cache_directory(directory)
        stack.callback(os.close, opened)
        files = list_stored(opened)
        stale = {file for file in files if is_draft(file.name) and file.written < time.time() - _STALE_S}
        kept = [file for file in files if file not in stale]
        oldest = choose_oldest(kept, sum(file.size for file in kept), max_bytes or sys.maxsize)
        for name in (*(file.name for file in stale), *oldest):
            with contextlib.suppress(OSError):  # it is gone, or a directory; delete the others all the same
                os.unlink(name, dir_fd=opened)


def describe_machine() -> tuple[object, ...]:
    """Return what the code for CPUs depends on besides the program: the processor and the number of threads."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in _X86_FACTS + _ARM_FACTS:
                facts.setdefault(name.strip(), value.strip())
    return (sorted(facts.items()), len(os.sched_getaffinity(0)), os.environ.get("NPROC", ""))


def _print(env: WorkerEnv, text: str) -> None:
    print(f"jaxrun: rank {env.rank} ({env.host}) {text}", file=sys.stderr)
