"""State of this process that a fork would share or break, or that a program would see. Compared around an import."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from jaxrun_runtime import jax_private

CUDA_DEVICES = ("/dev/nvidia-uvm", "/dev/dxg")  # on Linux, and under Windows
_BLAS = "openblas"  # its threads stop themselves around a fork
# Variables that JAX reads when it is imported or when its backend starts, or that the start of a process reads.
_READ_EARLY = ("JAX_", "XLA_", "CUDA_", "NCCL_", "TF_CPP_", "TF_GPU_", "PYTHON", "LD_")
_MAX_ROUNDS = 20  # of Python's random numbers, 624 each
_HARMLESS_THREADS = ("jemalloc_bg_thd",)  # pyarrow's allocator works without this thread in a fork


_RandomState = tuple[Any, ...]  # of random.getstate: version, the numbers of a round with the place in it, a float


class ForkState(Struct, frozen=True):
    """The state at one moment.

    files:     "3 socket:[1234]" for each open descriptor
    handlers:  of signals
    environ:   the variables of _READ_EARLY
    """

    threads: int
    files: frozenset[str]
    children: frozenset[int]
    handlers: tuple[object, ...]
    random: _RandomState
    numpy_random: bytes
    directory: str
    environ: dict[str, str]
    has_backend: bool

    @classmethod
    def now(cls) -> ForkState:
        return cls(
            threads=count_threads(),
            files=frozenset(open_files()),
            children=frozenset(child_processes()),
            handlers=tuple(signal.getsignal(number) for number in signal.valid_signals()),
            random=random.getstate(),
            numpy_random=_numpy_random(),
            directory=os.getcwd(),
            environ={name: value for name, value in os.environ.items() if name.startswith(_READ_EARLY)},
            has_backend=jax_private.has_backend(),
        )

    def difference(self, after: ForkState, new_blas_threads: Callable[[], int]) -> str:
        """Return what has changed until `after`, as text; empty if nothing has.

        new_blas_threads:  returns the number of threads that pools of BLAS have started meanwhile
        """
        if after.has_backend and not self.has_backend:
            return "it makes a backend of JAX"
        for file in sorted(after.files - self.files):
            _, _, name = file.partition(" ")
            if name in CUDA_DEVICES:
                return "it opens a GPU"
            return "it opens a socket" if name.startswith("socket:") else f"it leaves {name} open"
        if after.threads > self.threads and after.threads > self.threads + new_blas_threads():
            return "it starts a thread"
        if after.children - self.children:
            return "it starts a process"
        if after.handlers != self.handlers:
            return "it handles a signal"
        if _was_seeded(self.random, after.random):
            return "it seeds Python's global random numbers"
        if after.numpy_random != self.numpy_random:
            return "it uses numpy's global random numbers"
        if changed := sorted(dict(set(after.environ.items()) ^ set(self.environ.items()))):
            return f"it sets {changed[0]}"
        return "it changes the directory" if after.directory != self.directory else ""


def count_threads() -> int:
    """Return the number of threads of this process, without threads that a fork may lose."""
    count = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:  # it has ended meanwhile
            count += file.read().strip() not in _HARMLESS_THREADS
    return count


def open_files() -> Iterator[str]:
    """Yield each descriptor and its target, "3 /dev/null"."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            yield f"{descriptor} {os.readlink(f'/proc/self/fd/{descriptor}')}"


def child_processes() -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # a kernel without that file
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def _was_seeded(before: _RandomState, after: _RandomState) -> bool:
    """Whether Python's generator was seeded, not only used. (Python seeds it again after a fork.)"""
    generator = random.Random()
    generator.setstate(before)
    for _ in range(_MAX_ROUNDS):
        if generator.getstate()[1][:-1] == after[1][:-1]:  # less the place in it
            return False
        generator.getrandbits(32 * (len(after[1]) - 1))
    return True


def _numpy_random() -> bytes:
    state: Any = sys.modules["numpy"].random.get_state()
    return bytes(state[1].tobytes()) + repr(state[2:]).encode()


def count_blas_libraries() -> int:
    """Return the number of loaded BLAS libraries. Each has a pool of threads."""
    with open("/proc/self/maps") as file:
        return len({line.rpartition(" ")[2] for line in file if _BLAS in line})


def names_in(folder: str) -> set[str]:
    """Return the names of modules and packages in a directory."""
    with contextlib.suppress(OSError):
        with os.scandir(folder) as entries:
            return {
                entry.name.partition(".")[0]
                for entry in entries
                if entry.name.endswith((".py", ".so")) or os.path.exists(os.path.join(entry.path, "__init__.py"))
            }
    return set()
