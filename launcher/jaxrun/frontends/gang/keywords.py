"""Names the right keyword for one that other tools have: Gang(procs=2) is Gang(processes=2). No I/O."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import ParamSpec, TypeVar

from jaxrun.frontends.gang.spec import GangSpec
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.option_declaration import options_of

P = ParamSpec("P")
R = TypeVar("R")

_WORDS = {
    "processes": (
        *("n", "np", "procs", "nprocs", "nproc", "num_processes", "num_procs", "nproc_per_node", "ranks", "size"),
        *("workers", "num_workers", "n_workers", "world_size"),
    ),
    "devices": (
        *("d", "devices_per_process", "num_devices", "local_devices", "gpus", "num_gpus", "n_gpus", "gpus_per_process"),
    ),
    "hosts": ("N", "nodes", "nnodes", "num_nodes", "num_hosts", "simulate_hosts"),
    "platform": ("platforms", "device", "accelerator"),
    "env": ("environ", "environment", "envs", "env_vars"),
}
ARGUMENTS = frozenset(GangSpec.__struct_fields__)
_INSTEAD = {word: name for name, words in _WORDS.items() for word in words}


def names_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that a TypeError about an unknown keyword names the right one."""
    known = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_keywords("Gang", kwargs, known)
        return function(*args, **kwargs)

    return checked


def check_passed_on(fn: Callable[..., object], given: Iterable[str]) -> None:
    """Raise TypeError for a keyword that `fn` does not take, but that is another tool's word for a gang's argument."""
    try:
        taken = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # of many functions in C nothing is known
        return
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        check_keywords("launch", (name for name in given if name in _INSTEAD and name not in taken), ARGUMENTS)


def check_keywords(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for the first keyword that is not `known`, with the one that was meant."""
    wrong = next((name for name in given if name not in known), None)
    if wrong is not None:
        raise TypeError(f"{what} has no argument {wrong!r}{_describe_instead(wrong, known)}")


def _describe_instead(wrong: str, known: Collection[str]) -> str:
    instead = _INSTEAD.get(wrong)
    if instead in known:
        return f"; did you mean {instead!r}?"
    if option := _find_option(wrong):
        return f"; an option of jaxrun's command line: options={option!r}"
    import difflib  # takes 1 ms

    close = difflib.get_close_matches(wrong, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(sorted({*known} - {'self'}))}"


def _find_option(name: str) -> str:
    """Return what to write for the option of this name; empty if there is none."""
    flag = f"--{name.replace('_', '-')}"
    for _, declared in options_of(Job):
        if flag in (*declared.flags, *declared.aliases):
            return flag if declared.kind.is_flag else f"{flag} …"
    return ""
