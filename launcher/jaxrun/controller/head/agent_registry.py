"""Collects the reports of agents on other hosts; once all have come, assigns to each the worker that it starts.

Ranks are on one host if they report the same host name and boot id; their local ranks follow from that, whatever mpirun
or srun says.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxrun.analysis.fabric.checks import check_fabric, describe_choice
from jaxrun.controller.head.consistency import Expected, describe_unknown_rank
from jaxrun.errors import NotUniformError, UnavailableError, UsageError
from jaxrun.protocol.addresses import LOOPBACK, LOOPBACK_6
from jaxrun.protocol.agent_messages import AgentReport, StartWorker
from jaxrun.protocol.env import attempt_nonce
from jaxrun.protocol.probe_messages import FabricFacts
from jaxrun.protocol.settings import TLS_ON
from jaxrun.protocol.stage_messages import Stage
from jaxrun.protocol.worker_messages import NcclNetwork
from jaxrun.spec.job.binding import RankCores, choose_cores
from jaxrun.spec.job.devices import Gpus, Machine
from jaxrun.spec.job.environment import worker_variables
from jaxrun.spec.job.layout import FORKED_PLATFORMS, Layout, decide_layout
from jaxrun.spec.job.plan import Plan
from jaxrun.text import format_columns, format_ranks, format_ranks_on_hosts, plural


@dataclass(frozen=True, slots=True)
class Assignment:
    """What every agent starts.

    starts:     by rank
    expected:   what every worker must then be
    interface:  the address of rank 0's host that all other hosts can reach
    notes:      lines for people
    """

    starts: tuple[StartWorker, ...]
    expected: Expected
    interface: str
    notes: tuple[str, ...]


class AgentRegistry:
    """The reports of one attempt."""

    def __init__(
        self,
        plan: Plan,
        user_env: Mapping[str, str],
        *,
        version: str,
        directory: str = "",
        run_dir: str = "",
        log_dir: str = "",
        listen_addresses: str = "",
        stage: Stage | None = None,
    ) -> None:
        """`user_env` is the environment that the user gives the workers; `version` is that of jaxrun.

        directory:         where the job was started; empty where the agents may be anywhere
        run_dir, log_dir:  that of the job, and that of the attempt's logs; empty where it leaves no files
        listen_addresses:  at which the head listens, as text for people
        stage:             what is staged
        """
        self.plan = plan
        self.job = plan.job
        self.size = len(plan.workers)
        self.listen_addresses = listen_addresses
        self.stage = stage
        self._user_env = user_env
        self._version = version
        self._directory = directory
        self._run_dir = run_dir
        self._log_dir = log_dir
        self.reports: dict[int, AgentReport] = {}
        self._networks: set[str] = set()  # that NCCL has taken

    @property
    def complete(self) -> bool:
        return len(self.reports) == self.size

    def add(self, report: AgentReport) -> None:
        """Raises NotUniformError or UnavailableError if this agent cannot be one of the job's."""
        by_hand, size = self.job.host_rank is not None, self.size
        self.check_command(report)
        if report.rank >= size:
            raise NotUniformError(describe_unknown_rank(report.rank, size))
        known = self.reports.setdefault(report.rank, report)
        if known is not report:
            host_rank = report.rank * (self.job.hosts or 1) // size if by_hand else None
            raise NotUniformError(_describe_duplicate(known, report, host_rank))
        self.check_installation(report)

    def check_command(self, report: AgentReport) -> None:
        """Raises NotUniformError if this agent was started for a job of another size, or with another program."""
        by_hand = self.job.host_rank is not None
        size = len(self.plan.whole) if by_hand else self.size
        if report.size != (self.plan.agent_count or size):
            raise NotUniformError(_describe_other_size(report, size, by_hand=by_hand))
        if report.command and report.command != self.job.program:
            raise NotUniformError(_describe_other_program(report, self.job.program))

    def check_installation(self, report: AgentReport) -> None:
        """Raises UnavailableError if this agent cannot start workers of the job."""
        if report.jaxrun_version != self._version:
            raise UnavailableError(
                f"{report.host} has jaxrun {report.jaxrun_version}, but the launcher has jaxrun {self._version}\n"
                "install the same version on every host, or start it from a directory that all share"
            )
        if self._directory and report.directory != self._directory:
            raise UnavailableError(
                f"{self._directory} does not exist on {report.host}; the agent was started in {report.directory}\n"
                "start the job in a directory that all hosts share"
            )

    def assign(self) -> Assignment:
        """Decide what every agent starts, once the reports are complete.

        Raises NotUniformError if the hosts differ, and UsageError if the job is not possible on their platform.
        """
        layouts = {rank: layout for ranks in self._hosts() for rank, layout in self._lay_out(ranks).items()}
        _check_same_devices(layouts, {rank: report.host for rank, report in self.reports.items()})
        interface = reachable_address(0, self.reports)
        starts = [start for ranks in self._hosts() for start in self._starts(ranks, layouts, interface)]
        any_layout = layouts[0]
        replace(self.job, platform=any_layout.platform)  # which is valid, or does not exist
        nonce = attempt_nonce(self.plan.job_id, self.plan.attempt)
        tls, devices = self.job.coordinator_tls == TLS_ON, any_layout.devices_per_process
        expected = Expected(self.size, nonce, any_layout.platform, devices, tls)
        by_rank = sorted(starts, key=lambda start: start.rank)
        return Assignment(tuple(by_rank), expected, interface, self._notes(layouts))

    def prepare(self, host: Sequence[AgentReport]) -> list[StartWorker]:
        """What agents on a spare host prepare for; to be called once the reports are complete.

        Raises NotUniformError if no rank can run there."""
        starts = self._starts(host, self._lay_out(host), reachable_address(0, self.reports))
        return [replace(start, waits=True) for start in starts]

    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each host."""
        return tuple(reports[0].rank for reports in self._hosts())

    def _hosts(self) -> list[list[AgentReport]]:
        """The reports of each host, sorted by rank."""
        hosts: dict[tuple[str, str], list[AgentReport]] = {}
        for _, report in sorted(self.reports.items()):
            hosts.setdefault((report.host, report.boot_id), []).append(report)
        return list(hosts.values())

    def _lay_out(self, host: Sequence[AgentReport]) -> dict[int, Layout]:
        """The layout of each rank of one host."""
        job = self.job
        layouts: dict[int, Layout] = {}
        for group in _group_by_gpus(host):
            per_process = job.devices_per_process
            if per_process is None and group[0].gpu_names:
                per_process = max(1, len(group[0].gpu_names) // len(group))
            # Of one host: the numbers of hosts are those of the whole job.
            wanted = replace(
                job,
                processes=len(group),
                hosts=None,
                processes_per_host=None,
                host_rank=None,
                head="",
                devices_per_process=per_process,
            )
            try:
                layout = decide_layout(wanted, _machine(group[0]), self._user_env)
            except UsageError as error:
                raise NotUniformError(f"{group[0].host}: {error}") from None
            layouts |= {report.rank: layout for report in group}
        return layouts

    def _starts(
        self, host: Sequence[AgentReport], layouts: Mapping[int, Layout], interface: str
    ) -> Iterable[StartWorker]:
        shares_cores = len({report.cpus for report in host}) == 1
        index_of = {report.rank: index for group in _group_by_gpus(host) for index, report in enumerate(group)}
        device_ids = {report.rank: _device_ids(layouts[report.rank], index_of[report.rank]) for report in host}
        cpus = self._bind(host, layouts, device_ids)
        for local_rank, report in enumerate(host):
            layout = layouts[report.rank]
            cores = max(1, len(report.cpus) // len(host)) if shares_cores else len(report.cpus)
            job = replace(self.job, devices_per_process=layout.devices_per_process) if layout.gpus.names else self.job
            values = worker_variables(job, replace(layout, processes=1), self._user_env, cores=cores)
            yield StartWorker(
                rank=report.rank,
                size=self.size,
                local_rank=local_rank,
                local_size=len(host),
                host=report.host,
                program=self.plan.program_argv,
                environment={**self.job.env, **_bypass_proxies(values, interface)},
                local_device_ids=device_ids[report.rank],
                cpus=cpus[local_rank],
                run_dir=self._run_dir if report.can_write_run_dir else "",
                log_dir=self._log_dir if report.can_write_run_dir else "",
                show_output=self.job.shows(report.rank),
                settings=self.job.worker_settings,
                attempt=self.plan.attempt,
                restart_reason=self.plan.restart_reason,
                fork=layout.platform in FORKED_PLATFORMS and not self.job.why_no_fork,
                wrap=self.job.wrap,
            )

    def _bind(
        self, host: Sequence[AgentReport], layouts: Mapping[int, Layout], device_ids: Mapping[int, tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        """The cores of each rank of one host."""
        ranks = []
        for report in host:
            near = dict(enumerate(report.gpu_cores))
            ranks.append(RankCores(report.cpus, tuple(near.get(ordinal, "") for ordinal in device_ids[report.rank])))
        on_cpu = layouts[host[0].rank].platform == "cpu"
        return choose_cores(self.job.bind, ranks, on_cpu=on_cpu, all_cores=host[0].all_cores)

    def _notes(self, layouts: Mapping[int, Layout]) -> tuple[str, ...]:
        hosts = {rank: report.host for rank, report in self.reports.items()}
        notes = list(dict.fromkeys(note for layout in layouts.values() for note in layout.notes))
        without_run_dir = [rank for rank, report in self.reports.items() if not report.can_write_run_dir]
        if self._run_dir and without_run_dir:
            where = format_ranks_on_hosts(without_run_dir, hosts)
            notes.append(f"{where} cannot write to the run directory {self._run_dir}; their logs come by network")
        if self.plan.attempt == 1 and len(self._hosts()) > 1 and not self.job.probe_hosts:  # doctor tells it itself
            found = list(check_fabric(self._fabrics()))
            advice = "; jaxrun doctor says what to do" if len(found) > 1 else ""
            notes += [f"fabric: {'; '.join(one.text for one in found)}{advice}"] if found else []
        return tuple(notes)

    def describe_network(self, taken: NcclNetwork) -> str:
        """The line about the network that NCCL has taken; empty if another host has said the same."""
        text = describe_choice(taken.network, taken.provider, (facts for _, facts in self._fabrics()))
        where = f", on {self.reports[taken.rank].host}" if self._networks else ""
        is_new = text not in self._networks
        self._networks.add(text)
        return f"{text}{where}" if is_new else ""

    def _fabrics(self) -> list[tuple[str, FabricFacts]]:
        return [(one.host, one.fabric) for _, one in sorted(self.reports.items()) if one.fabric is not None]


def reachable_address(rank: int, reports: Mapping[int, AgentReport]) -> str:
    """The address of the host of `rank` that the other hosts can reach: one over which a connection exists already."""
    own = reports[rank]
    others = [report for _, report in sorted(reports.items()) if _host(report) != _host(own)]
    if not others:
        return LOOPBACK_6 if ":" in own.address else LOOPBACK
    if own.address != own.head_address:  # the head is elsewhere, and this is how it and this rank reach each other
        return own.address
    return others[0].head_address


def _bypass_proxies(values: Mapping[str, str], interface: str) -> dict[str, str]:
    """Add the coordinator's address to those that gRPC must not look for behind a proxy."""
    name = "no_grpc_proxy"
    return {**values, name: f"{values[name]},{interface}"} if name in values else dict(values)


def _device_ids(layout: Layout, index: int) -> tuple[int, ...]:
    """The ordinals of a rank's GPUs, which is at `index` among those that share them."""
    count = layout.devices_per_process if layout.gpus.names and layout.devices_per_process else 0
    return tuple(range(index * count, (index + 1) * count))


def _machine(report: AgentReport) -> Machine:
    counted_by = f"the agent on {report.host}"
    gpus = Gpus(report.gpu_names, counted_by, report.gpu_limit, trouble=report.gpu_trouble)
    found = {report.gpu_platform: gpus} if report.gpu_platform else {}
    return Machine(report.host, report.cpus, found, report.tpu, report.cuda_plugin)


def _check_same_devices(layouts: Mapping[int, Layout], hosts: Mapping[int, str]) -> None:
    groups: dict[str, list[int]] = {}
    for rank, layout in sorted(layouts.items()):
        shape = (
            plural(layout.devices_per_process, "device")
            if layout.devices_per_process is not None
            else "its own devices"
        )
        groups.setdefault(f"{layout.platform}, {shape}", []).append(rank)
    if len(groups) == 1:
        return
    rows = [
        (format_ranks_on_hosts(ranks, hosts), shape)
        for shape, ranks in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    table = "\n".join(f"  {line}" for line in format_columns(rows, gap="   "))
    raise NotUniformError(
        f"the hosts differ in their devices\n{table}\n"
        "every process must see the same number of devices; leave the odd host out, or ask for fewer with -d"
    )


def _describe_other_size(report: AgentReport, size: int, *, by_hand: bool) -> str:
    if by_hand:
        return (
            f"{report.host} was started for {report.size} processes in all, host 0 for {size}\n"
            "-n, --hosts, --processes-per-host and -d must be alike on all hosts"
        )
    return (
        f"rank {report.rank} ({report.host}) was started as one of {report.size}, but the job has {size} "
        "processes\nstart as many processes as -n says"
    )


def _describe_other_program(report: AgentReport, program: Sequence[str]) -> str:
    rows = [("rank 0", shlex.join(program)), (format_ranks([report.rank]), shlex.join(report.command))]
    table = "\n".join(f"  {line}" for line in format_columns(rows, gap="   "))
    return f"{report.host} was started with another program than rank 0\n{table}\ntype the same on every host"


def _describe_duplicate(known: AgentReport, other: AgentReport, host_rank: int | None) -> str:
    if host_rank is not None:
        where = f"{known.host} and {other.host}" if known.host != other.host else f"twice on {known.host}"
        return (
            f"--host-rank {host_rank} was given {'on ' if known.host != other.host else ''}{where}\n"
            f"each host needs a number of its own, from 0 to one less than --hosts"
        )
    return (
        f"two agents say that they are rank {other.rank}: process {known.pid} on {known.host} and process {other.pid} "
        f"on {other.host}\nis one of them left over from an earlier job, or is this two jobs in one place?"
    )


def _group_by_gpus(host: Sequence[AgentReport]) -> list[list[AgentReport]]:
    """The ranks of a host in groups that see the same GPUs, which are shared out among them."""
    groups: dict[tuple[str, ...], list[AgentReport]] = {}
    for report in host:
        groups.setdefault(report.gpu_ids, []).append(report)
    return list(groups.values())


def _host(report: AgentReport) -> tuple[str, str]:
    return report.host, report.boot_id
