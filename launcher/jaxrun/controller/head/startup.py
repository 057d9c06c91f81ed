"""Starts a job up: from the reports of agents to the first line of the program.

AgentConnected of an agent      ──▶ nothing yet                   only its host is known, and its end is noticed
AgentReport of every agent      ──▶ StartWorkers to all           (agent_registry.py)
                                                                  where the job asks for it, HostProbes and
                                                                  StagingRound (staging_round.py) come before; agents
                                                                  without the environment report again after that
Hello of every rank             ──▶ StartCoordinator to rank 0    versions, program and settings must be the same;
                                                                  where all ranks have keys, with certificates of them
CoordinatorReady of rank 0      ──▶ Join to the others
DeviceReport of every rank      ──▶ Run to all                    JAX must show the job that was asked for
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from jaxrun.controller.head import consistency
from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.head.certificates import CertificateAuthority
from jaxrun.controller.head.round import Round
from jaxrun.controller.head.staging_round import StagingRound
from jaxrun.errors import NotUniformError, UnavailableError, UsageError
from jaxrun.job_events.actions import Action, PrintLine, Send, SendToAgents
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentConnected, AgentReport, StartWorkers
from jaxrun.protocol.probe_messages import HostFacts, PeerResults, ProbePeers
from jaxrun.protocol.staging_messages import StagedCopied
from jaxrun.protocol.worker_messages import CoordinatorReady, DeviceReport, Hello, Join, Run, StartCoordinator
from jaxrun.spec.job.worker_assignment import reachable_address
from jaxrun.text import format_ranks_on_hosts

AgentStartupEvent = AgentReport | HostFacts | PeerResults | StagedCopied
StartupEvent = AgentConnected | AgentStartupEvent | Hello | CoordinatorReady | DeviceReport
_BY_HAND_HINT = "is jaxrun started there, with the same --hosts, --head and JAXRUN_TOKEN, and a --host-rank of its own?"


class Startup:
    """The start-up of one job."""

    def __init__(
        self,
        hosts: dict[int, str],
        expected: consistency.Expected,
        registry: AgentRegistry,
    ) -> None:
        """`hosts` maps each rank to its host; it and `expected` are replaced once all agents have reported."""
        self._hosts = hosts
        self._expected = expected
        self._interface = ""  # the address on rank 0's host for the coordinator
        self._registry = registry
        self._probes = HostProbes(registry)
        self._staging = StagingRound(registry)
        self._hellos: dict[int, Hello] = {}
        self._device_reports: dict[int, DeviceReport] = {}
        self._authority: CertificateAuthority | None = None
        self._ready: CoordinatorReady | None = None
        self._silent: set[int] = set()  # ranks that are started again, until their Hello

    @property
    def complete(self) -> bool:
        """Whether every rank has joined, and the job is what was asked for."""
        return len(self._device_reports) == len(self._hosts)

    @property
    def has_all_agents(self) -> bool:
        """Whether all agents have reported."""
        return self._registry.complete

    @property
    def is_staging(self) -> bool:
        """Whether hosts copy what is staged, which may take long."""
        return bool(self._staging.awaited)

    @property
    def platform(self) -> str:
        """The platform that all ranks report, once they have joined."""
        return next(report.platform for report in self._device_reports.values())

    @property
    def is_checking(self) -> bool:
        """Whether agents may run --host-check."""
        return bool(self._registry.job.host_check) and not self._registry.complete

    def add_late(self, report: AgentReport) -> None:
        """Note the report of an agent that comes when the job has started, or ends."""
        self._registry.add_late(report)

    def has_hello(self, rank: int) -> bool:
        return rank in self._hellos and rank not in self._silent

    def handle(self, event: StartupEvent) -> list[Action]:
        """Handle an event. Raises NotUniformError, UsageError or UnavailableError if the job is not as asked for."""
        match event:
            case AgentConnected():
                self._add_host(event)
                return []
            case AgentReport() | HostFacts() | PeerResults() | StagedCopied():
                return self._on_agent_event(event)
            case Hello():
                return self._on_hello(event)
            case CoordinatorReady():
                return self._order_to_join(event)
        self._device_reports[event.rank] = event
        if not self.complete:
            return []
        consistency.refuse(consistency.check_device_reports(self._device_reports, self._hellos, self._expected))
        return [Send(tuple(self._hosts), Run())]

    def start_again(self, rank: int) -> None:
        """Note that another process of this rank is started while the others run."""
        self._silent.add(rank)

    def add_again(self, event: Hello | DeviceReport) -> list[Action]:
        """Let a rank that was started again join the others, which run, and then run its program.

        Raises NotUniformError if it differs from them.
        """
        rank = event.rank
        if isinstance(event, DeviceReport):
            self._device_reports[rank] = event
            consistency.refuse(consistency.check_device_reports(self._device_reports, self._hellos, self._expected))
            return [Send((rank,), Run())]
        self._hellos[rank] = event
        self._silent.discard(rank)
        consistency.refuse(consistency.compare_hellos(self._hellos))
        assert self._ready is not None
        order = Join(self._ready.address, self._ready.master_port)
        if self._authority is not None:
            self._authority.certify(event)
            order = replace(order, certificate=self._authority.issued[rank])
        return [Send((rank,), order)]

    def describe_progress(self, seconds: float) -> str:
        """Describe the ranks for which the start-up waits after `seconds` seconds, in one line."""
        step, present = self._step()
        absent = format_ranks_on_hosts(self._absent(present), self._hosts)
        return f"{step}: {len(present)} of {len(self._hosts)} ranks after {seconds:.0f} s, waiting for {absent}"

    def describe_missing(self, limit: float) -> str:
        """Describe the ranks that have not come within the limit (seconds), and what to do about it."""
        step, present = self._step()
        if not self._registry.complete:
            addresses = self._registry.listen_addresses
            text = consistency.describe_missing_agents(self._hosts, present, limit, addresses)
            by_hand = self._registry.job.host_rank is not None
            return f"{text}\n{_BY_HAND_HINT}" if by_hand else text
        return consistency.describe_missing_ranks(
            self._hosts, present, limit, "joined" if step == "joining" else "started"
        )

    def _step(self) -> tuple[str, Collection[int]]:
        """Return the current step of the start-up, and the ranks that have done it."""
        if not self._registry.complete:
            return "checking the hosts" if self.is_checking else "starting agents", self._registry.reported_ranks
        if not self._probes.complete:
            return "probing the network", self._probes.ready_ranks
        if self._staging.awaited:
            awaited = {rank for agent in self._staging.awaited for rank in self._registry.agents[agent]}
            return "copying what is staged", self._hosts.keys() - awaited
        return ("joining", self._device_reports) if self._all_started else ("starting", self._hellos)

    def _absent(self, present: Collection[int]) -> Iterable[int]:
        return (rank for rank in self._hosts if rank not in present)

    @property
    def _all_started(self) -> bool:
        return len(self._hellos) == len(self._hosts)

    def _on_agent_event(self, event: AgentStartupEvent) -> list[Action]:
        orders: list[Action] = []
        match event:
            case AgentReport():
                self._registry.add(event)
                self._add_host(event)
                self._registry.refuse_sick_hosts()
            case StagedCopied() if self.is_staging:
                orders += self._staging.handle(event)
            case HostFacts() | PeerResults() if not self._probes.complete:
                orders += self._probes.handle(event)
            case _:
                return []  # nobody has asked
        if not self._registry.complete or not (self._probes.complete or self._registry.lacks_environment):
            return orders
        if not self._staging.complete:
            return orders if self.is_staging else [*orders, *self._staging.begin()]
        if self._registry.lacks_environment or not self._probes.complete:
            return orders
        assignment = self._registry.assign()
        platform, devices = assignment.platform, assignment.local_devices
        self._expected = replace(self._expected, platform=platform, local_devices=devices)
        self._interface = assignment.interface
        notes = [PrintLine(note) for note in assignment.notes]
        starts = {start.worker.rank: start for start in assignment.starts}
        return [
            *orders,
            *notes,
            *(
                SendToAgents((agent,), StartWorkers(tuple(starts[rank] for rank in ranks)))
                for agent, ranks in self._registry.agents.items()
            ),
        ]

    def _add_host(self, event: AgentConnected | AgentReport) -> None:
        """Note the host of this agent's ranks, if it has any; other agents' reports say why they are refused."""
        self._hosts.update(dict.fromkeys(self._registry.agents.get(event.agent, ()), event.host))

    def _on_hello(self, hello: Hello) -> list[Action]:
        known = self._hellos.setdefault(hello.rank, hello)
        if known is not hello:
            raise NotUniformError(consistency.describe_duplicate_rank(known, hello))
        if hello.refusal:
            raise UsageError(hello.refusal)
        if hello.public_key:  # at once, because the last ranks wait for this
            self._authority = self._authority or CertificateAuthority(self._expected.nonce)
            self._authority.certify(hello)
        if not self._all_started:
            return []
        consistency.refuse(consistency.compare_hellos(self._hellos))
        if self._authority is not None and len(self._authority.issued) < len(self._hosts):
            self._authority = None  # a rank without a key has reported why
        certificate = self._authority.issued[0] if self._authority is not None else None
        return [Send((0,), StartCoordinator(self._interface, certificate))]

    def _order_to_join(self, ready: CoordinatorReady) -> list[Action]:
        self._ready = ready
        others = tuple(rank for rank in self._hosts if rank != ready.rank)
        order = Join(ready.address, ready.master_port)
        if self._authority is not None:
            return [Send((rank,), replace(order, certificate=self._authority.issued.get(rank))) for rank in others]
        return [Send(others, order)] if others else []


class HostProbes:
    """Collects the facts of all hosts before a job that asks for it, and lets an agent of each connect to the others.

    `registry` has the agents.
    """

    def __init__(self, registry: AgentRegistry) -> None:
        self._registry = registry
        self._facts: dict[AgentId, HostFacts] = {}  # sent unasked, after each report
        self._round: Round[AgentId, PeerResults] | None = None  # None until the agents are told to connect

    @property
    def complete(self) -> bool:
        """Whether there is nothing to wait for any more."""
        return not self._registry.job.probe_hosts or (self._knows_all and not self._awaited)

    @property
    def ready_ranks(self) -> Collection[int]:
        return {rank for agent in self._facts.keys() - self._awaited for rank in self._registry.agents[agent]}

    def handle(self, event: HostFacts | PeerResults) -> list[SendToAgents]:
        """Return the order to connect, once the last agent has reported its facts.

        Raises UnavailableError once all have tried, if some hosts cannot connect: a job on them would hang.
        """
        if isinstance(event, PeerResults):
            is_last = self._round is not None and self._round.add(event.agent, event)
            if is_last and self._round is not None and any(one.errors for one in self._round.answers.values()):
                raise UnavailableError("the hosts cannot all connect to each other, so no job was started")
            return []
        self._facts[event.agent] = event
        if not self._knows_all or not self._probing:
            return []
        self._round = Round(self._probing)
        return [SendToAgents(self._probing, self._order())]

    @property
    def _knows_all(self) -> bool:
        return self._registry.complete and len(self._facts) == len(self._registry.agents)

    @property
    def _probing(self) -> tuple[AgentId, ...]:
        """The agents that connect to each other: one per host, if there are several hosts."""
        agents = self._registry.first_of_each_host() if self._registry.complete else ()
        return agents if len(agents) > 1 else ()

    @property
    def _awaited(self) -> set[AgentId]:
        return self._round.missing if self._round is not None else set(self._probing)

    def _order(self) -> ProbePeers:
        facts, reports = {agent: self._facts[agent] for agent in self._probing}, self._registry.reports
        addresses = {agent: reachable_address(reports[agent], reports.values()) for agent in facts}
        return ProbePeers(
            addresses={agent: str(Address(addresses[agent], one.port)) for agent, one in facts.items()},
            hosts={agent: one.host for agent, one in facts.items()},
        )
