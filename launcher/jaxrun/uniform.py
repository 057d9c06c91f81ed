"""Is this the job that was asked for? Pure comparisons, before the program's first line; text is "" where all is well.

A refusal shows the smallest difference: the ranks in groups, only what differs, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .contract import Hello, Proof
from .ranks import spell

_UNSET = "(not set)"
# Hosts may number their devices differently; a difference that matters shows in the device counts.
_MAY_DIFFER = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Expected:
    """What the plan promises of every worker; `local_devices` is None where only JAX can tell."""

    size: int
    job_id: str
    platform: str
    local_devices: int | None


def duplicate(known: Hello, other: Hello) -> str:
    """The refusal for two processes that both say that they are the same rank."""
    return (
        f"two processes say that they are rank {other.rank}: process {known.pid} on {known.host} and process {other.pid} "
        f"on {other.host}\nevery process needs a rank of its own; is one of them left over from an earlier job?"
    )


def compare_hellos(hellos: Mapping[int, Hello]) -> str:
    """Versions, program and the variables that matter must be alike on all ranks."""
    tables = {rank: _facts(hello) for rank, hello in hellos.items()}
    names = sorted({name for table in tables.values() for name in table})
    differing = [n for n in names if len({table.get(n, _UNSET) for table in tables.values()}) > 1]
    if not differing:
        return ""
    lines = [f"the processes differ in {', '.join(differing)}"]
    for name in differing:
        groups = _group(hellos, lambda rank, name=name: tables[rank].get(name, _UNSET))  # type: ignore[misc]
        lines += _rows([(spell(ranks), f"{name} {value}", _hosts(hellos, ranks)) for value, ranks in groups])
    lines.append("every process must run the same program with the same versions and settings; make them alike on all ranks.")
    return "\n".join(lines)


def check_proofs(proofs: Mapping[int, Proof], hellos: Mapping[int, Hello], expected: Expected) -> str:
    """Hold what JAX shows in each process against the job; the first kind of difference is reported."""
    checks = (_stranger, _membership, _platform, _local_devices, _asked_devices, _global_devices)
    return next((text for text in (check(proofs, hellos, expected) for check in checks) if text), "")


def _stranger(proofs: Mapping[int, Proof], hellos: Mapping[int, Hello], expected: Expected) -> str:
    wrong = [rank for rank, proof in proofs.items() if proof.nonce != expected.job_id]
    if not wrong:
        return ""
    return (
        f"{spell(wrong)} joined the coordinator of another job\n"
        "the port of this job's coordinator was taken by a stranger; start the job again, it takes a new port each time."
    )


def _membership(proofs: Mapping[int, Proof], hellos: Mapping[int, Hello], expected: Expected) -> str:
    wrong = [
        rank
        for rank, proof in proofs.items()
        if (proof.process_index, proof.process_count) != (rank, expected.size)
    ]
    if not wrong:
        return ""
    seen = [
        (spell([rank]), f"is process {proofs[rank].process_index} of {proofs[rank].process_count} to JAX", _hosts(hellos, [rank]))
        for rank in wrong
    ]
    return "\n".join(
        [
            f"JAX does not show the job of {expected.size} processes that was asked for",
            *_rows(seen),
            "does the program, or a variable of yours, call jax.distributed.initialize before jaxrun does?",
        ]
    )


def _platform(proofs: Mapping[int, Proof], hellos: Mapping[int, Hello], expected: Expected) -> str:
    # JAX calls both cuda and rocm devices "gpu".
    wanted = {"cuda": "gpu", "rocm": "gpu"}.get(expected.platform, expected.platform)
    wrong = {rank: proof for rank, proof in proofs.items() if proof.platform != wanted}
    if not wrong:
        return ""
    groups = _group(wrong, lambda rank: f"platform {proofs[rank].platform}")
    return "\n".join(
        [
            f"the job asked for {expected.platform}, but JAX runs on something else",
            *_rows([(spell(ranks), value, _hosts(hellos, ranks)) for value, ranks in groups]),
            f"is JAX installed with support for {expected.platform} there, and is a device free? "
            f"Or ask for --platform {next(iter(wrong.values())).platform}.",
        ]
    )


def _local_devices(proofs: Mapping[int, Proof], hellos: Mapping[int, Hello], expected: Expected) -> str:
    if len({proof.local_devices for proof in proofs.values()}) <= 1:
        return ""
    groups = _group(proofs, lambda rank: _plural(proofs[rank].local_devices, "device"))
    rows = []
    for value, ranks in groups:
        kinds = ", ".join(sorted({kind for rank in ranks for kind in proofs[rank].device_kinds}))
        rows.append((spell(ranks), value, f"({_names(hellos, ranks)}, {kinds})" + _cause(hellos[ranks[0]])))
    fewest = min(proof.local_devices for proof in proofs.values())
    return "\n".join(
        [
            "local device counts differ",
            *_rows(rows),
            f"every process must see the same number of devices; free the missing ones, or ask for -d {fewest}.",
        ]
    )


def _asked_devices(proofs: Mapping[int, Proof], hellos: Mapping[int, Hello], expected: Expected) -> str:
    found = next(iter(proofs.values())).local_devices
    if expected.local_devices in (None, found):
        return ""
    return (
        f"every process was to have {_plural(expected.local_devices or 0, 'device')}, "
        f"but JAX shows {found} in each{_cause(hellos[min(hellos)])}\n"
        f"ask for -d {found}, or take the setting away that decides otherwise."
    )


def _global_devices(proofs: Mapping[int, Proof], hellos: Mapping[int, Hello], expected: Expected) -> str:
    total = sum(proof.local_devices for proof in proofs.values())
    wrong = [rank for rank, proof in proofs.items() if proof.global_devices != total]
    if not wrong:
        return ""
    return (
        f"the processes have {total} devices together, but {spell(wrong)} see {proofs[wrong[0]].global_devices} in all\n"
        "they did not all join one job; start it again with -v and look for the first rank that differs."
    )


def missing(size: int, hosts: Mapping[int, str], present: Iterable[int], seconds: float, step: str) -> str:
    """Who has not taken `step` ("started", "joined" …) within the time limit."""
    there = set(present)
    absent = [rank for rank in range(size) if rank not in there]
    places = sorted({hosts[rank] for rank in absent})
    on = f" (on {', '.join(places)})" if len(set(hosts.values())) > 1 else ""
    return (
        f"{len(there)} of {size} ranks {step} within {seconds:g} s; missing: {spell(absent)}{on}\n"
        "their output, if any, is in the logs; a slow file system or a long import needs a larger --init-timeout."
    )


def _facts(hello: Hello) -> dict[str, str]:
    environment = {name: value for name, value in hello.environment.items() if name not in _MAY_DIFFER}
    return {**hello.versions, **environment, "program": hello.program}


def _cause(hello: Hello) -> str:
    """The settings that decide how many devices a process sees, where it has any."""
    names = ("CUDA_VISIBLE_DEVICES", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    found = [f"{name}={hello.environment[name]}" for name in names if name in hello.environment]
    return "".join(f"  {text}" for text in found)


def _group(ranks: Iterable[int], key: Callable[[int], str]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        groups.setdefault(key(rank), []).append(rank)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))


def _rows(rows: list[tuple[str, str, str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return [f"  {a:<{widths[0]}}   {b:<{widths[1]}}   {c}".rstrip() for a, b, c in rows]


def _hosts(hellos: Mapping[int, Hello], ranks: list[int]) -> str:
    return f"({_names(hellos, ranks)})" if len({hello.host for hello in hellos.values()}) > 1 else ""


def _names(hellos: Mapping[int, Hello], ranks: list[int]) -> str:
    return ", ".join(dict.fromkeys(hellos[rank].host for rank in ranks))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
