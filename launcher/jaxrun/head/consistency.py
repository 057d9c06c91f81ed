"""Is this the job that was asked for? Pure comparisons before the program's first line; "" where all is well.

A refusal shows the smallest difference: the ranks in groups, only what differs, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from jaxrun.protocol.worker_messages import DeviceReport, Hello
from jaxrun.text import format_columns, format_ranks, format_ranks_on_hosts, has_several_hosts, plural

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


def describe_duplicate_rank(known: Hello, other: Hello) -> str:
    """The refusal for two processes that both say that they are the same rank."""
    return (
        f"two processes say that they are rank {other.rank}: "
        f"process {known.pid} on {known.host} and process {other.pid} on {other.host}\n"
        "every process needs a rank of its own; is one of them left over from an earlier job?"
    )


def describe_unknown_rank(rank: int, size: int) -> str:
    """The refusal for a process whose rank the job does not have."""
    return (
        f"a process says that it is rank {rank}, but the job has ranks 0 to {size - 1}\n"
        "is it left over from another job? Start the job again."
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
        values = {rank: f"{name} {table.get(name, _UNSET)}" for rank, table in tables.items()}
        lines += _table(hellos, values, values.__getitem__)
    lines.append("every process must run the same program with the same versions and settings.")
    return "\n".join(lines)


def check_device_reports(proofs: Mapping[int, DeviceReport], hellos: Mapping[int, Hello], expected: Expected) -> str:
    """Hold what JAX shows in each process against the job; the first kind of difference is reported."""
    checks = (_stranger, _membership, _platform, _local_devices, _asked_devices, _global_devices)
    return next((text for text in (check(proofs, hellos, expected) for check in checks) if text), "")


def _stranger(proofs: Mapping[int, DeviceReport], hellos: Mapping[int, Hello], expected: Expected) -> str:
    wrong = [rank for rank, proof in proofs.items() if proof.nonce != expected.job_id]
    if not wrong:
        return ""
    return (
        f"{_locate(hellos, wrong)} joined the coordinator of another job\n"
        "a stranger has taken the port of this job's coordinator; start the job again, it takes a new port."
    )


def _membership(proofs: Mapping[int, DeviceReport], hellos: Mapping[int, Hello], expected: Expected) -> str:
    wrong = [
        rank for rank, proof in proofs.items() if (proof.process_index, proof.process_count) != (rank, expected.size)
    ]
    if not wrong:
        return ""
    return "\n".join(
        [
            f"JAX does not show the job of size {expected.size} that was asked for",
            *_table(hellos, wrong, lambda rank: _identity(proofs[rank])),
            "does the program, or a variable of yours, call jax.distributed.initialize before jaxrun does?",
        ]
    )


def _identity(proof: DeviceReport) -> str:
    return f"process {proof.process_index} of {proof.process_count} to JAX"


def _platform(proofs: Mapping[int, DeviceReport], hellos: Mapping[int, Hello], expected: Expected) -> str:
    # JAX calls both cuda and rocm devices "gpu".
    wanted = {"cuda": "gpu", "rocm": "gpu"}.get(expected.platform, expected.platform)
    wrong = [rank for rank, proof in proofs.items() if proof.platform != wanted]
    if not wrong:
        return ""
    found = proofs[min(wrong)].platform
    return "\n".join(
        [
            f"the job asked for {expected.platform}, but JAX runs on something else",
            *_table(hellos, wrong, lambda rank: f"platform {proofs[rank].platform}"),
            f"is JAX installed with support for {expected.platform} there, and is a device free? "
            f"Or ask for --platform {'cuda (or rocm)' if found == 'gpu' else found}.",
        ]
    )


def _local_devices(proofs: Mapping[int, DeviceReport], hellos: Mapping[int, Hello], expected: Expected) -> str:
    counts = {rank: proof.local_devices for rank, proof in proofs.items()}
    if len(set(counts.values())) == 1:
        return ""
    rows = []
    for value, ranks in _group(counts, lambda rank: plural(counts[rank], "device")):
        kinds = sorted({kind for rank in ranks for kind in proofs[rank].device_kinds})
        where = [_hosts(hellos, ranks)] if has_several_hosts(_places(hellos)) else []
        rows.append((format_ranks(ranks), value, f"({', '.join(where + kinds)}){_cause(hellos[ranks[0]])}"))
    return "\n".join(
        [
            "local device counts differ",
            *_rows(rows),
            "every process must see the same number of devices; free the missing ones, "
            f"or ask for -d {min(counts.values())}.",
        ]
    )


def _asked_devices(proofs: Mapping[int, DeviceReport], hellos: Mapping[int, Hello], expected: Expected) -> str:
    found = next(iter(proofs.values())).local_devices  # the same in all: they have been compared
    if expected.local_devices is None or expected.local_devices == found:
        return ""
    return (
        f"every process was to have {plural(expected.local_devices, 'device')}, "
        f"but JAX shows {found} in each{_cause(hellos[min(hellos)])}\n"
        f"ask for -d {found}, or take the setting away that decides otherwise."
    )


def _global_devices(proofs: Mapping[int, DeviceReport], hellos: Mapping[int, Hello], expected: Expected) -> str:
    total = sum(proof.local_devices for proof in proofs.values())
    wrong = [rank for rank, proof in proofs.items() if proof.global_devices != total]
    if not wrong:
        return ""
    return "\n".join(
        [
            f"the processes have {plural(total, 'device')} together, but JAX shows another number in all",
            *_table(hellos, wrong, lambda rank: plural(proofs[rank].global_devices, "device")),
            "they did not all join one job; start it again.",
        ]
    )


def describe_missing_ranks(hosts: Mapping[int, str], present: Iterable[int], seconds: float, step: str) -> str:
    """Who has not taken `step` ("started", "joined" …) within the time limit."""
    there = set(present)
    absent = format_ranks_on_hosts((rank for rank in hosts if rank not in there), hosts)
    return (
        f"{len(there)} of {len(hosts)} ranks {step} within {seconds:g} s; missing: {absent}\n"
        "their output, if any, is in the logs; a slow file system or import needs a larger --init-timeout."
    )


def describe_missing_agents(hosts: Mapping[int, str], present: Iterable[int], seconds: float, offered: str) -> str:
    """Whose agent has not reported to the head, which listens at `offered`, within the time limit."""
    there = set(present)
    absent = format_ranks_on_hosts((rank for rank in hosts if rank not in there), hosts)
    return (
        f"{len(there)} of {len(hosts)} agents reported within {seconds:g} s; missing: {absent}\n"
        f"can their hosts reach this one? It listens at {offered}; --interface chooses another.\n"
        f"to try it there: jaxrun attach --check {offered.split(',')[0].split()[-1]}"
    )


def _facts(hello: Hello) -> dict[str, str]:
    environment = {name: value for name, value in hello.environment.items() if name not in _MAY_DIFFER}
    return {**hello.versions, **environment, "program": hello.program_hash or "(cannot be read)"}


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


def _table(hellos: Mapping[int, Hello], ranks: Iterable[int], key: Callable[[int], str]) -> list[str]:
    """A row for each value of `key`: which ranks have it, and on which hosts if there are several."""
    several = has_several_hosts(_places(hellos))
    return _rows(
        [
            (format_ranks(members), value, f"({_hosts(hellos, members)})" if several else "")
            for value, members in _group(ranks, key)
        ]
    )


def _rows(rows: list[tuple[str, str, str]]) -> list[str]:
    return [f"  {line}" for line in format_columns(rows, gap="   ")]


def _places(hellos: Mapping[int, Hello]) -> dict[int, str]:
    return {rank: hello.host for rank, hello in hellos.items()}


def _hosts(hellos: Mapping[int, Hello], ranks: Iterable[int]) -> str:
    return ", ".join(dict.fromkeys(hellos[rank].host for rank in ranks))


def _locate(hellos: Mapping[int, Hello], ranks: Iterable[int]) -> str:
    return format_ranks_on_hosts(ranks, _places(hellos))
