"""Whose a frame is, by the name of its file: JAX's, jaxrun's, a library's or the program's.

One set of rules for ranks, which look at their own frames, and for those who read the stacks of ranks on other hosts.
A program may itself be an installed package, as one that `python -m package` runs: no file of its is the user's by name
alone, so there the package in which its outermost frame stands counts as the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from jaxrun.lazy_pattern import lazy_pattern

EXIT_HANDLER = "<exit handler>"  # the file of the frame that a handler of atexit gets which is no Python code

_PACKAGES = r"(?:^|/)(?:site|dist)-packages/"
_PYTHON = r"/lib(?:64)?/python3\.\d+t?/"
_ZIPPED = r"\.(?:zip|egg|whl)/"
# Files that only exist in memory: importlib's, and the wrappers that decorators of libraries generate.
_MADE = r"^<(?:frozen |@beartype\(|decorator-gen-|makefun-gen-|attrs generated )"
_JAX = lazy_pattern(rf"{_PACKAGES}(?:jax|jaxlib)/|/jax/(?:_src|experimental|interpreters)/|/jaxlib/")
_OURS = lazy_pattern(r"/jaxrun_runtime/(?!programs/)|/jaxrun/protocol/|^<frozen ")
_AROUND_PROGRAMS = lazy_pattern(rf"{_PYTHON}(?:runpy|threading)\.py$")
_LIBRARY = lazy_pattern(rf"{_PACKAGES}|{_PYTHON}|{_ZIPPED}|{_MADE}")
_INSTALLED = lazy_pattern(rf"{_PACKAGES}|{_ZIPPED}")
_PACKAGE_OF_FILE = lazy_pattern(rf".*{_PACKAGES}[^/]+/?|.*?{_ZIPPED}")
_SHIPPED_PROGRAMS = "/jaxrun_runtime/programs/"
_MAX_FILES = 10_000  # a program that makes code as it runs must not fill the memory


@lru_cache(maxsize=_MAX_FILES)
def is_jax(file: str) -> bool:
    return _JAX.search(file) is not None


@lru_cache(maxsize=_MAX_FILES)
def is_ours(file: str) -> bool:
    """Whether the file is jaxrun's own, and none of the programs that come with it; or part of Python's importing."""
    return _OURS.search(file) is not None


def is_scaffold(file: str) -> bool:
    """Whether the file is jaxrun's, or what Python itself puts around a program or a thread."""
    return is_ours(file) or _AROUND_PROGRAMS.search(file) is not None


def is_library(file: str) -> bool:
    """Whether the file is Python's own, an installed package's, or a wrapper that a package has generated."""
    return _LIBRARY.search(file) is not None


def is_packages(file: str) -> bool:
    """Whether the file belongs to an installed package other than JAX and jaxrun."""
    return _INSTALLED.search(file) is not None and not (is_jax(file) or is_ours(file))


def is_programs(file: str) -> bool:
    """Whether the file is the user's, or one of the programs that come with jaxrun."""
    return _SHIPPED_PROGRAMS in file or not (is_jax(file) or is_scaffold(file) or is_library(file))


def find_package(file: str) -> str:
    """Return how the names of all files of this file's package begin; empty for a file of no installed package."""
    found = _PACKAGE_OF_FILE.match(file) if is_packages(file) else None
    return found[0] if found else ""


def find_program_frames(files: Sequence[str]) -> list[int]:
    """Return the indices of the program's frames in a stack, whose `files` come innermost first.

    Where no file is the user's: the frames of the outermost installed package, which is the program.
    """
    own = [index for index, file in enumerate(files) if is_programs(file)]
    if own:
        return own
    package = next(filter(None, (find_package(file) for file in reversed(files))), "")
    return [index for index, file in enumerate(files) if package and file.startswith(package)]
