"""Assigns to each agent the workers that it starts, from the reports of all agents: devices, cores and variables.

Ranks are on one host if they report the same host name and boot id; their local ranks follow from that, regardless of
mpirun or srun. Hosts that are simulated share a machine: its devices and cores are divided among all of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.errors import NotUniformError, UsageError
from jaxrun.protocol.addresses import LOOPBACK, LOOPBACK_6
from jaxrun.protocol.agent_messages import AgentReport, StartWorker
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.spec.job.binding import RankCores, choose_cores
from jaxrun.spec.job.layout import FORKED_PLATFORMS, Layout, decide_layout
from jaxrun.spec.job.plan import Plan, Worker
from jaxrun.spec.job.worker_variables import worker_variables
from jaxrun.text import plural

Reports = Mapping[int, AgentReport]  # of each rank's agent
Reported = tuple[int, AgentReport]  # a rank, and the report of its agent
Number = TypeVar("Number", bound=int)


class LauncherSettings(HidesFields, frozen=True):
    """The launcher's settings for the workers of all hosts.

    user_env:          the environment that the user gives them
    run_dir, log_dir:  of the job, and of the attempt's logs; empty if it leaves no files
    """

    hidden = frozenset({"user_env"})

    user_env: Mapping[str, str]
    run_dir: str = ""
    log_dir: str = ""


class Assignment(Struct, frozen=True):
    """The workers that all agents start.

    workers:        by rank
    starts:         by rank, what its agent is told
    platform:       of every worker
    local_devices:  the number of devices of every worker; None if only JAX can tell
    shapes:         the devices of each rank as text; a job whose ranks differ in them must not start
    interface:      the address of rank 0's host that all other hosts can reach
    notes:          remarks on the devices
    """

    workers: tuple[Worker, ...]
    starts: tuple[StartWorker, ...]
    platform: str
    local_devices: int | None
    shapes: Mapping[int, str]
    interface: str
    notes: tuple[str, ...]


def assign_workers(plan: Plan, reports: Reports, settings: LauncherSettings) -> Assignment:
    """Decide what every agent starts, once the reports are complete.

    Raises NotUniformError if a host lacks devices, and UsageError if the job is not possible on their platform.
    """
    machines = _group(sorted(reports.items()), _machine)
    layouts = {rank: layout for machine in machines for rank, layout in _lay_out(plan, machine, settings).items()}
    interface = reachable_address(reports[0], reports.values())
    starts = [start for machine in machines for start in _starts(plan, machine, layouts, interface, settings)]
    starts.sort(key=lambda start: start[0].rank)
    any_layout = layouts[0]
    replace(plan.job, platform=any_layout.platform)  # raises if this Job would be invalid
    return Assignment(
        workers=tuple(worker for worker, _ in starts),
        starts=tuple(start for _, start in starts),
        platform=any_layout.platform,
        local_devices=any_layout.devices_per_process,
        shapes={rank: f"{one.platform}, {_describe_devices(one.devices_per_process)}" for rank, one in layouts.items()},
        interface=interface,
        notes=tuple(dict.fromkeys(note for layout in layouts.values() for note in layout.notes)),
    )


def assign_on_host(
    plan: Plan, host: Sequence[Reported], reports: Reports, settings: LauncherSettings
) -> list[StartWorker]:
    """Return what agents on one host start while ranks on others run, or prepare for while they wait on a spare one.

    host:     the ranks that they get, with their agents' reports; while they wait, any numbers instead of ranks
    reports:  of all ranks

    Raises NotUniformError if no rank can run there.
    """
    interface = reachable_address(reports[0], reports.values())
    return [start for _, start in _starts(plan, host, _lay_out(plan, host, settings), interface, settings)]


def group_by_host(reports: Iterable[tuple[Number, AgentReport]]) -> list[list[tuple[Number, AgentReport]]]:
    """Group reports with their numbers (ranks or agents) by host, in order of arrival."""
    return _group(reports, _host)


def _group(
    reports: Iterable[tuple[Number, AgentReport]], key: Callable[[AgentReport], Hashable]
) -> list[list[tuple[Number, AgentReport]]]:
    groups: dict[Hashable, list[tuple[Number, AgentReport]]] = {}
    for number, report in reports:
        groups.setdefault(key(report), []).append((number, report))
    return list(groups.values())


def reachable_address(own: AgentReport, reports: Iterable[AgentReport]) -> str:
    """Return the address of `own` host that other hosts can reach: one over which a connection already exists."""
    others = (report for report in reports if _host(report) != _host(own))
    other = min(others, key=lambda report: report.agent, default=None)
    if other is None:
        return LOOPBACK_6 if ":" in own.address else LOOPBACK
    # The head is elsewhere, and this is the address over which it and this host reach each other.
    if own.address != own.head_address:
        return own.address
    return other.head_address


def _host(report: AgentReport) -> tuple[str, str]:
    return report.host, report.boot_id


def _machine(report: AgentReport) -> tuple[str, str]:
    return report.machine.host, report.boot_id


def _lay_out(plan: Plan, machine: Sequence[Reported], settings: LauncherSettings) -> dict[int, Layout]:
    layouts: dict[int, Layout] = {}
    for group in _group_by_gpus(machine):
        _, first = group[0]
        per_process = plan.job.devices_per_process
        if per_process is None and (names := first.machine.seen_gpus.names):
            per_process = max(1, len(names) // len(group))
        # A job on one host: the numbers of hosts are for the whole job.
        wanted = replace(
            plan.job,
            processes=len(group),
            hosts=None,
            processes_per_host=None,
            host_rank=None,
            head="",
            devices_per_process=per_process,
            simulated_hosts=0,
        )
        try:
            layout = decide_layout(wanted, first.machine, settings.user_env)
        except UsageError as error:
            raise NotUniformError(f"{first.host}: {error}") from None
        layouts |= {rank: layout for rank, _ in group}
    return layouts


def _starts(
    plan: Plan,
    machine: Sequence[Reported],
    layouts: Mapping[int, Layout],
    interface: str,
    settings: LauncherSettings,
) -> Iterator[tuple[Worker, StartWorker]]:
    job, shares_cores = plan.job, len({report.machine.cores for _, report in machine}) == 1
    index_of = {rank: index for group in _group_by_gpus(machine) for index, (rank, _) in enumerate(group)}
    device_ids = {rank: _device_ids(layouts[rank], index_of[rank]) for rank, _ in machine}
    ranks = [RankCores(report.machine.cores, _cores_near(report, device_ids[rank])) for rank, report in machine]
    first_rank, first = machine[0]
    on_cpu = layouts[first_rank].platform == "cpu"
    cpus = choose_cores(job.bind, ranks, on_cpu=on_cpu, all_cores=first.machine.all_cores)
    places = {rank: (at, len(host)) for host in group_by_host(machine) for at, (rank, _) in enumerate(host)}
    for (rank, report), own_cpus in zip(machine, cpus, strict=True):
        layout = layouts[rank]
        cores = len(report.machine.cores)
        cores = max(1, cores // len(machine)) if shares_cores else cores
        asked = replace(job, devices_per_process=layout.devices_per_process) if layout.gpus.names else job
        values = worker_variables(asked, replace(layout, processes=1), settings.user_env, cores=cores)
        worker = Worker(rank, *places[rank], report.host, device_ids[rank], own_cpus, report.simulated_boot_id)
        yield (
            worker,
            StartWorker(
                worker=plan.worker_env(worker, run_dir=settings.run_dir if report.can_write_run_dir else ""),
                program=plan.program_argv,
                environment={**job.env, **_bypass_proxies(values, interface)},
                log_dir=settings.log_dir if report.can_write_run_dir else "",
                show_output=job.shows(rank),
                fork=layout.platform in FORKED_PLATFORMS and not job.why_no_fork,
                wrap=job.wrap,
                preload=job.preload,
            ),
        )


def _cores_near(report: AgentReport, device_ids: Sequence[int]) -> tuple[str, ...]:
    near = dict(enumerate(report.machine.seen_gpus.cores))
    return tuple(near.get(ordinal, "") for ordinal in device_ids)


def _bypass_proxies(values: Mapping[str, str], interface: str) -> dict[str, str]:
    """Add the coordinator's address to those that gRPC must not look for behind a proxy."""
    name = "no_grpc_proxy"
    if name not in values or interface in values[name].split(","):
        return dict(values)
    return {**values, name: f"{values[name]},{interface}"}


def _describe_devices(count: int | None) -> str:
    return "its own devices" if count is None else plural(count, "device")


def _device_ids(layout: Layout, index: int) -> tuple[int, ...]:
    """Return the ordinals of a rank's GPUs; the rank is at `index` among those that share them."""
    count = layout.devices_per_process if layout.gpus.names and layout.devices_per_process else 0
    return tuple(range(index * count, (index + 1) * count))


def _group_by_gpus(machine: Sequence[Reported]) -> list[list[Reported]]:
    """Group the ranks of a machine that see the same GPUs, which are divided among them."""
    return _group(machine, lambda report: report.machine.seen_gpus.ids)
