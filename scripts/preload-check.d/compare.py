"""Compares what ranks see of their processes with and without preloading. Pure functions over states of process_state.

A state varies from run to run (addresses, times, generators), so there are two runs without preloading. A value that is
equal in all of their ranks must be equal with preloading. A value that differs from rank to rank must also differ with
preloading.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

State = Mapping[str, Any]
Ranks = Sequence[State]  # one run: the state of each rank

# Values that jaxrun keeps for itself, and modules that are needed only with or only without preloading.
_OURS = re.compile(r"(jaxrun|jaxrun_runtime)(\.|:|$)")
_ADDRESS = re.compile(r"0x[0-9a-f]+")
MOST_SHOWN = 4
# Differences that are allowed: the part of the state, the name, and the reason.
_WHEN = "when it was imported, which is earlier and the same for all ranks"
_ADDRESSES = "addresses, which are the same in forks"
_COMPARED = "a process id, which is compared with the process's own before each use"
ACCEPTED = (
    (
        "threads",
        r"of the kernel: (python|jaxrun.*)",
        "OpenBLAS stops its threads for a fork, and starts them when used",
    ),
    ("threads", r"of the kernel: jemalloc_bg_thd", "jemalloc does without it in a fork"),
    ("values", r"absl\.flags\._helpers:\.disclaim_module_ids.*", _ADDRESSES),
    (
        "values",
        r".*:\.__path__\._last_parent_path.*",
        "Python looks for a namespace's parts anew as soon as sys.path changes",
    ),
    ("values", r"orbax\.checkpoint\._src\.path\.atomicity:\._LAST_CHECKPOINT_WRITE_TIME", _WHEN),
    (
        "values",
        r"jax\.experimental\.colocated_python\.func:\..*\.held_by",
        "a random id, for controllers of remote Python",
    ),
    ("values", r"joblib\._multiprocessing_helpers:\.name", "a semaphore that joblib has made as a trial, and removed"),
    ("values", r"joblib\._multiprocessing_helpers:\._rand\._rng_pid", _COMPARED),
    ("own values", r"joblib\._multiprocessing_helpers:\._rand\._rng_pid", _COMPARED),
    ("values", r"multiprocessing\.heap:\..*\._lastpid", _COMPARED),
    ("own values", r"multiprocessing\.heap:\..*\._lastpid", _COMPARED),
    ("values", r"wsgiref\.handlers:\.BaseHandler\.os_environ\..*", "the variables of then, for programs of CGI"),
    ("values", r"psutil:\._last_(per_)?cpu_times.*", _WHEN),
    ("values", r"transformers\.utils\.hub:\.SESSION_ID", "a random id that requests to the hub carry as user agent"),
    ("values", r"fsspec\.asyn:\.lock", "fsspec sets it after a fork, and does not use it"),
    ("values", r".*:.*prometheus.*\._created", _WHEN),
)


def differences(without: Sequence[Ranks], preloaded: Ranks, most: int = MOST_SHOWN) -> list[str]:
    """Return a line for each thing that a program sees with preloading, and in neither run `without` it.

    most: the most lines for each part of the state
    """
    found = []
    in_all = set.intersection(*(set(state["sys.modules"]) for ranks in (*without, preloaded) for state in ranks))
    for part in without[0][0]:
        if part == "sys.modules":
            found += _compare_modules(without, preloaded)
            continue
        plain = [[dict(flatten(part, state[part])) for state in ranks] for ranks in without]
        other = [dict(flatten(part, state[part])) for state in preloaded]
        if part == "own values":  # a number that happens to be the process id, in one rank
            kept = set.intersection(*(set(rank) for ranks in plain for rank in ranks))
            other = [{name: text for name, text in rank.items() if name in kept} for rank in other]
        lines = [
            line
            for name, line in _compare_values(plain, other)
            if not is_accepted(part, name) and (part != "values" or name.partition(":")[0] in in_all)
        ]
        found += [f"{part}: {line}" for line in lines[:most]]
        if len(lines) > most:
            found.append(f"{part}: and {len(lines) - most} more")
    return found


def is_accepted(part: str, name: str) -> bool:
    return any(part == where and re.fullmatch(pattern, name) for where, pattern, _ in ACCEPTED)


def flatten(part: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield names and texts: members of mappings by key, members of lists with the number of times that they occur."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if part == "values" and _OURS.match(key):
                continue
            if isinstance(inner, list) and part not in ("import hooks", "sys.argv"):  # whose order counts
                for member, count in Counter(map(str, inner)).items():
                    yield f"{key}: {member}", str(count)
            else:
                yield key, _ADDRESS.sub("0x", str(inner))
    elif isinstance(value, list) and part in ("sys.path", "warnings filters"):  # whose order counts
        yield "all", str(value)
    elif isinstance(value, list):
        for member, count in Counter(map(str, value)).items():
            if not _OURS.match(member):
                yield member, str(count)
    else:
        yield "", str(value)


def _compare_values(
    without: Sequence[Sequence[Mapping[str, str]]], preloaded: Sequence[Mapping[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield the names that differ, each with a sentence."""
    plain = [rank for ranks in without for rank in ranks]
    names = dict.fromkeys(name for rank in (*plain, *preloaded) for name in rank)
    for name in names:
        before, after = [rank.get(name) for rank in plain], [rank.get(name) for rank in preloaded]
        if len(set(before)) == 1:
            if set(after) != set(before):
                shown = next(value for value in after if value != before[0])
                yield name, f"{name} is {_show(shown)}, and {_show(before[0])} without".lstrip()
        elif (
            _is_shared(after)
            and not _is_address(after[0])
            and not any(_is_shared([rank.get(name) for rank in ranks]) for ranks in without)
        ):
            yield name, f"{name} is the same on all ranks ({_show(after[0])})"


def _is_shared(values: Sequence[str | None]) -> bool:
    return len(values) > 1 and len(set(values)) == 1


def _is_address(value: str | None) -> bool:
    """Whether this is probably an address in memory, such as an id(): they are the same in forks."""
    return value is not None and value.isdigit() and 2**40 <= int(value) < 2**48


def _show(value: str | None) -> str:
    return "not there" if value is None else value if len(value) <= 160 else f"{value[:160]}…"


def _compare_modules(without: Sequence[Ranks], preloaded: Ranks) -> list[str]:
    """Return lines about modules that are imported only with or without preloading, and about the order of modules."""
    plain = [module for module in without[0][0]["sys.modules"] if not _OURS.match(module)]
    varying = {module for ranks in without for state in ranks for module in set(plain) ^ set(state["sys.modules"])}
    other = [module for module in preloaded[0]["sys.modules"] if not _OURS.match(module)]
    found = []
    for text, these, those in (("only with preloading", other, plain), ("only without", plain, other)):
        extra = [module for module in these if module not in set(those) | varying]
        if extra:
            found.append(f"sys.modules: {text}: {' '.join(extra[:MOST_SHOWN])}{' …' if extra[MOST_SHOWN:] else ''}")
    plain, other = ([one for one in these if one in set(those)] for these, those in ((plain, other), (other, plain)))
    moved = next(((one, two) for one, two in zip(plain, other, strict=True) if one != two), None)
    if moved:
        found.append(f"sys.modules: {moved[1]} stands where {moved[0]} stands without")
    return found
