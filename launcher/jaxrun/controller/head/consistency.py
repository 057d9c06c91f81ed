"""Checks before the program's first line that the processes are uniform, and are the job that was asked for.

A check returns "" if there is no problem. Otherwise it returns the text of the refusal, with the smallest difference:
the ranks in groups, only what differs, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from jaxrun.errors import NotUniformError
from jaxrun.protocol.worker_messages import DeviceReport, Hello
from jaxrun.text import format_columns, format_ranks, format_ranks_on_hosts, has_several_hosts, plural

_NOT_SET = "(not set)"
# Hosts may number their devices differently; a difference that matters shows in the device counts.
_MAY_DIFFER = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_CERTIFICATES = ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")
# Each host may have its own, but JAX and XLA use them only if every process has one.
_ON_ALL_OR_NONE = ("JAX_PARTITION_INDEX", "JAX_SLICE_INDEX", *_CERTIFICATES)


class Expected(Struct, frozen=True):
    """The required properties of every worker; `nonce` is the attempt's; `local_devices`: None if only JAX can tell."""

    size: int
    nonce: str
    platform: str
    local_devices: int | None


def describe_duplicate_rank(known: Hello, other: Hello) -> str:
    return (
        f"two processes say that they are rank {other.rank}: "
        f"process {known.pid} on {known.host} and process {other.pid} on {other.host}\n"
        "every process needs a rank of its own; is one of them left over from an earlier job?"
    )


def refuse(text: str) -> None:
    """Raise NotUniformError with the text of a check, if there is one."""
    if text:
        raise NotUniformError(text)


def describe_unknown_rank(rank: int, size: int) -> str:
    return (
        f"a process says that it is rank {rank}, but the job has ranks 0 to {size - 1}\n"
        "is it left over from another job? Start your job again."
    )


def compare_hellos(hellos: Mapping[int, Hello]) -> str:
    """Check that versions, program and the variables that matter are the same on all ranks."""
    tables = {rank: _compared_values(hello) for rank, hello in hellos.items()}
    names = sorted({name for table in tables.values() for name in table})
    differing = [n for n in names if len({table.get(n, _NOT_SET) for table in tables.values()}) > 1]
    if not differing:
        return ""
    lines = [f"the processes differ in {', '.join(differing)}"]
    for name in differing:
        lines += _table({rank: f"{name} {table.get(name, _NOT_SET)}" for rank, table in tables.items()}, _hosts(hellos))
    lines.append("every process must run the same program with the same versions and settings.")
    return "\n".join(lines)


def describe_different_devices(shapes: Mapping[int, str], hosts: Mapping[int, str]) -> str:
    """Return the refusal of hosts that would give ranks different devices; `shapes` describes the devices by rank."""
    advice = "every process must see the same number of devices; leave the odd host out, or ask for fewer with -d"
    different = shapes if len(set(shapes.values())) > 1 else {}
    return _describe_differences("the hosts differ in their devices", different, hosts, advice)


def check_device_reports(reports: Mapping[int, DeviceReport], hellos: Mapping[int, Hello], expected: Expected) -> str:
    """Check the devices that JAX shows in each process; only the first kind of difference is reported."""
    return (
        _check_membership(reports, _hosts(hellos), expected)
        or _check_platform(reports, _hosts(hellos), expected)
        or _check_local_devices(reports, hellos, expected)
        or _check_global_devices(reports, _hosts(hellos))
    )


def _check_membership(reports: Mapping[int, DeviceReport], hosts: Mapping[int, str], expected: Expected) -> str:
    strangers = [rank for rank, report in reports.items() if report.nonce != expected.nonce]
    if strangers:
        return (
            f"{format_ranks_on_hosts(strangers, hosts)} joined the coordinator of another job\n"
            "a stranger has taken the port of this job's coordinator; start the job again, it takes a new port."
        )
    shown = {rank: (report.process_index, report.process_count) for rank, report in reports.items()}
    return _describe_differences(
        f"JAX does not see the job of {expected.size} processes that you asked for",
        {rank: f"process {i} of {n} to JAX" for rank, (i, n) in shown.items() if (i, n) != (rank, expected.size)},
        hosts,
        "does the program, or a variable of yours, call jax.distributed.initialize before jaxrun does?",
    )


def _check_platform(reports: Mapping[int, DeviceReport], hosts: Mapping[int, str], expected: Expected) -> str:
    # JAX calls both cuda and rocm devices "gpu".
    wanted = {"cuda": "gpu", "rocm": "gpu"}.get(expected.platform, expected.platform)
    wrong = {rank: report.platform for rank, report in reports.items() if report.platform != wanted}
    found = wrong[min(wrong)] if wrong else ""
    return _describe_differences(
        f"the job asked for {expected.platform}, but JAX runs on something else",
        {rank: f"platform {platform}" for rank, platform in wrong.items()},
        hosts,
        f"is JAX installed with support for {expected.platform} there, and is a device free? "
        f"Or ask for --platform {'cuda (or rocm)' if found == 'gpu' else found}.",
    )


def _check_local_devices(reports: Mapping[int, DeviceReport], hellos: Mapping[int, Hello], expected: Expected) -> str:
    counts = {rank: report.local_devices for rank, report in reports.items()}
    smallest = min(counts.values())
    if len(set(counts.values())) == 1:
        if expected.local_devices in (None, smallest):
            return ""
        return (
            f"every process should have {plural(expected.local_devices or 0, 'device')}, "
            f"but JAX sees {smallest} in each{_device_settings(hellos[min(hellos)])}\n"
            f"ask for -d {smallest}, or remove the setting that says otherwise."
        )
    hosts = _hosts(hellos)
    rows = []
    for value, ranks in _group_ranks({rank: plural(count, "device") for rank, count in counts.items()}):
        kinds = sorted({kind for rank in ranks for kind in reports[rank].device_kinds})
        where = [_format_hosts(ranks, hosts)] if has_several_hosts(hosts) else []
        rows.append((format_ranks(ranks), value, f"({', '.join(where + kinds)}){_device_settings(hellos[ranks[0]])}"))
    advice = f"every process must see the same number of devices; free the missing ones, or ask for -d {smallest}."
    return "\n".join(["local device counts differ", *_align(rows), advice])


def _check_global_devices(reports: Mapping[int, DeviceReport], hosts: Mapping[int, str]) -> str:
    total = sum(report.local_devices for report in reports.values())
    shown = {rank: report.global_devices for rank, report in reports.items()}
    return _describe_differences(
        f"the processes have {plural(total, 'device')} together, but JAX sees another number",
        {rank: plural(count, "device") for rank, count in shown.items() if count != total},
        hosts,
        "they did not all join one job; start it again.",
    )


def describe_missing_ranks(hosts: Mapping[int, str], present: Iterable[int], seconds: float, step: str) -> str:
    """Describe the ranks that have not done `step` ("started", "joined") within the time limit, in seconds."""
    there = set(present)
    absent = format_ranks_on_hosts((rank for rank in hosts if rank not in there), hosts)
    return (
        f"{len(there)} of {len(hosts)} ranks {step} within {seconds:g} s; missing: {absent}\n"
        "their output, if any, is in the logs; a slow file system or import needs a larger --init-timeout."
    )


def describe_missing_agents(hosts: Mapping[int, str], present: Iterable[int], seconds: float, addresses: str) -> str:
    """Describe the ranks whose agent has not reported to the head (at `addresses`) within the time limit."""
    there = set(present)
    absent = format_ranks_on_hosts((rank for rank in hosts if rank not in there), hosts)
    return (
        f"{len(there)} of {len(hosts)} agents reported within {seconds:g} s; missing: {absent}\n"
        f"can their hosts reach this one? It listens at {addresses}; --interface chooses another.\n"
        f"to try it there: jaxrun attach --check {addresses.split(',')[0].split()[-1]}"
    )


def _compared_values(hello: Hello) -> dict[str, str]:
    given = {name: value for name, value in hello.environment.items() if name not in _MAY_DIFFER}
    environment = {name: "(set)" if name in _ON_ALL_OR_NONE else value for name, value in given.items()}
    return {**hello.versions, **environment, "program": hello.program_hash or "(cannot be read)"}


def _device_settings(hello: Hello) -> str:
    """Return the variables that decide how many devices a process sees, if any is set."""
    names = ("CUDA_VISIBLE_DEVICES", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    return "".join(f"  {name}={hello.environment[name]}" for name in names if name in hello.environment)


def _describe_differences(problem: str, values: Mapping[int, str], hosts: Mapping[int, str], advice: str) -> str:
    """Return the refusal for the ranks with wrong values; "" if there are none."""
    return "\n".join([problem, *_table(values, hosts), advice]) if values else ""


def _table(values: Mapping[int, str], hosts: Mapping[int, str]) -> list[str]:
    """Return a line for each value: its ranks, and their hosts if there are several hosts."""
    several = has_several_hosts(hosts)
    groups = _group_ranks(values)
    return _align([(format_ranks(r), value, f"({_format_hosts(r, hosts)})" if several else "") for value, r in groups])


def _group_ranks(values: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Return each value with its ranks, the most common first."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))


def _align(rows: list[tuple[str, str, str]]) -> list[str]:
    return [f"  {line}" for line in format_columns(rows, gap="   ")]


def _hosts(hellos: Mapping[int, Hello]) -> dict[int, str]:
    return {rank: hello.host for rank, hello in hellos.items()}


def _format_hosts(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    return ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
