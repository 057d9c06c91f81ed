"""Whose a frame is, by the name of its file: JAX's, jaxrun's, a library's or the program's.

One set of rules for ranks, which look at their own frames, and for those who read the stacks of ranks on other hosts.
"""

from __future__ import annotations

import re
from functools import lru_cache

_PACKAGES = r"(?:^|/)(?:site|dist)-packages/"
_PYTHON = r"/lib(?:64)?/python3\.\d+/"
_JAX = re.compile(rf"{_PACKAGES}(?:jax|jaxlib)/|/jax/(?:_src|experimental|interpreters)/|/jaxlib/")
_OURS = re.compile(r"/jaxrun_runtime/(?!programs/)|/jaxrun/protocol/|^<frozen ")
_AROUND_PROGRAMS = re.compile(rf"{_PYTHON}(?:runpy|threading)\.py$")
_LIBRARY = re.compile(rf"{_PACKAGES}|{_PYTHON}|^<frozen ")
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
    """Whether the file is Python's own, or that of an installed package."""
    return _LIBRARY.search(file) is not None


def is_programs(file: str) -> bool:
    """Whether the file is the user's, or one of the programs that come with jaxrun."""
    return _SHIPPED_PROGRAMS in file or not (is_jax(file) or is_scaffold(file) or is_library(file))
