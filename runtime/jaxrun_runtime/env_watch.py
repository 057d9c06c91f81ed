"""Settings of JAX that the program makes itself, by os.environ["JAX_ENABLE_X64"] = "1" or by jax.config.update.

Under `python` JAX reads them when it is imported or when its backend starts, and here both have happened before the
program's first line. So JAX_… variables that are options are set as options when the program imports jax. JAX would
ignore other settings silently: one line tells where the program makes them, and which option of jaxrun does the same.
One line also warns of jax_disable_jit, because JAX then computes wrong results in a job of several processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from jaxrun import stack_frames
from jaxrun_runtime import jax_private
from jaxrun_runtime.import_watch import ImportWatch

# Options that JAX reads only when it joins the job or starts its backend.
_READ_AT_START = re.compile(
    "jax_(platforms|platform_name|num_cpu_devices|cpu_collectives_implementation|cpu_get_.*_timeout_minutes|distributed_.*|mtls_.*"
    "|enable_preemption_service|enable_recoverability|pjrt_client_create_options|mock_gpu_topology|cross_host_.*)"
)
# Variables that are not JAX's own, by the platform that reads them when it starts.
_READ_BY_PLATFORM = {
    "gpu": re.compile(
        "XLA_(PYTHON_)?CLIENT_.*|TF_GPU_ALLOCATOR|(CUDA|HIP|ROCR)_VISIBLE_DEVICES|JAX_(PARTITION|SLICE)_INDEX"
    ),
    "tpu": re.compile("LIBTPU_INIT_ARGS|TPU_.*"),
}
_XLA_FLAGS = "XLA_FLAGS"
_PLATFORM_NAMES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
_DISABLE_JIT = "jax_disable_jit"
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_FLAG_OF_PLATFORM = re.compile("--xla_(cpu|gpu|tpu)_")


class EnvWatch:
    """Watches variables and options while the program runs; calls `notify` with a line for each without effect.

    size:             number of processes of the job
    jax_is_imported:  whether the program imports jax before everything else
    """

    def __init__(self, notify: Callable[[str], None], *, size: int, jax_is_imported: bool = False) -> None:
        import jax

        self._notify = notify
        self._size = size
        self._platform = jax.local_devices()[0].platform
        self._local_devices = jax.local_device_count()
        self._before = dict(os.environ)
        self._places: dict[str, str] = {}
        self._told: set[str] = set()
        self._owner = os.getpid()
        self._jax_is_imported = jax_is_imported
        self._import = ImportWatch("jax", lambda jax: self._apply_options())

    def start(self) -> None:
        if jax_private.read_option(_DISABLE_JIT):
            self._warn_of_disabled_jit("the environment")
        jax_private.watch_updates(self._handle_update)
        if not self._jax_is_imported:
            self._import.start()
        original = os.putenv

        @functools.wraps(original)
        def putenv(name: Any, value: Any, /) -> None:
            original(name, value)
            with contextlib.suppress(Exception):  # whatever the program has done to os, to sys or to its stderr
                self._handle(os.fsdecode(name), os.fsdecode(value), sys._getframe(1))

        os.putenv = putenv  # what os.environ calls

    def stop(self) -> None:
        """Put jax back into sys.modules, for jaxrun and exit handlers, if the program has not imported it."""
        self._import.stop()

    def _handle(self, name: str, value: str, frame: FrameType) -> None:
        """Remember where the program sets a variable of JAX; report other variables at once if they are too late."""
        if name.startswith("JAX_"):
            self._places[name] = find_place(frame)
        else:
            self._tell_if_late(name, value, frame)

    def _handle_update(self, name: str, value: object, before: object) -> None:
        """Handle `jax.config.update(name, value)`, or `with jax.disable_jit()`, just before it happens."""
        frame = sys._getframe(1)
        if name == _DISABLE_JIT:
            if value:
                self._warn_of_disabled_jit(find_place(frame))
        elif _READ_AT_START.fullmatch(name) and value is not None:
            self._tell_if_late(name, str(value), frame, before="" if before is None else str(before))

    def _warn_of_disabled_jit(self, place: str) -> None:
        if self._size == 1 or _DISABLE_JIT in self._told or os.getpid() != self._owner:
            return
        self._told.add(_DISABLE_JIT)
        self._notify(
            f"{place} sets {_DISABLE_JIT}, so JAX ignores the shardings of jit: calls between the ranks silently "
            "return wrong results, for example process_allgather returns the rank's own part; use it only with -n 1"
        )

    def _apply_options(self) -> None:
        """Set JAX's options from the variables that the program set before it imported jax."""
        for name, value in os.environ.items():
            if not name.startswith("JAX_") or self._before.get(name) == value:
                continue
            option = jax_private.find_option(name)
            if option is None or _READ_AT_START.fullmatch(option):
                self._tell_if_late(name, value)
            else:
                jax_private.set_option(option, name, value)

    def _tell_if_late(self, name: str, value: str, frame: FrameType | None = None, before: str | None = None) -> None:
        """Report a variable, or an option with the value `before`, if JAX has read it already."""
        if name in self._told or os.getpid() != self._owner:  # a forked child has its own environment
            return
        if before is None:
            before = self._before.get(name, "")
        instead = say_instead(name.upper(), value, before, self._platform, self._local_devices)
        if instead:
            self._told.add(name)
            place = find_place(frame) if frame else self._places.get(name, "the program")
            self._notify(f"{place} sets {name}, which JAX has read already; too late here: use {instead}")


def say_instead(name: str, value: str, before: str, platform: str, local_devices: int) -> str:
    """The options of jaxrun to set a variable early enough; empty where JAX would not do anything else with it.

    An option of JAX, as jax_platforms, has the same name as its variable in capitals.


    before:         its value when JAX started, empty for none
    platform:       "cpu", "gpu" or "tpu"
    local_devices:  what this process has
    """
    if value == before:
        return ""
    if name == _XLA_FLAGS:
        return _xla_flags_instead(value, before, platform, local_devices)
    if name == "JAX_ENABLE_RECOVERABILITY":
        return "--keep-survivors" if value.lower() in ("1", "true") else ""
    if name == "JAX_NUM_CPU_DEVICES":
        return f"-d {value}" if platform == "cpu" and value != str(local_devices) else ""
    if name in _PLATFORM_NAMES:
        wanted = value.partition(",")[0].strip().lower()
        same = wanted in ("", platform) or (platform == "gpu" and wanted in ("cuda", "rocm"))
        return "" if same else f"--platform {wanted}"
    read = _READ_BY_PLATFORM.get(platform)
    if _READ_AT_START.fullmatch(name.lower()) or (read and read.fullmatch(name)):
        return f"--env {shlex.quote(f'{name}={value}')}"
    return ""


def _xla_flags_instead(value: str, before: str, platform: str, local_devices: int) -> str:
    options, flags = [], []
    for flag in value.split():
        count, of_platform = _DEVICE_COUNT.fullmatch(flag), _FLAG_OF_PLATFORM.match(flag)
        if count:
            options += [f"-d {count[1]}"] if platform == "cpu" and int(count[1]) != local_devices else []
        elif flag not in before.split() and (not of_platform or of_platform[1] == platform):
            flags.append(flag)
    if flags:
        kept = " ".join(flag for flag in value.split() if not _DEVICE_COUNT.fullmatch(flag))
        options.append(f"--env {shlex.quote(f'{_XLA_FLAGS}={kept}')}")
    return " ".join(options)


def find_place(frame: FrameType | None) -> str:
    """Return the program's current line, "train.py:3": in its own file rather than in a package that it calls."""
    found = None
    while frame is not None:
        filename = frame.f_code.co_filename
        if stack_frames.is_programs(filename):
            found = frame
            break
        found = found or (None if stack_frames.is_ours(filename) else frame)
        frame = frame.f_back
    return f"{os.path.basename(found.f_code.co_filename)}:{found.f_lineno}" if found else "the program"
