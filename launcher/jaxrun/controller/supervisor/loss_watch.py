"""Holds the ends of agents and workers until it is known who went first, and then tells the head in that order.

It gathers what loss_attribution.py decides by: which hosts answer a probe, and how the launch command has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxrun.controller.supervisor.connections import AgentClocks, AgentConnections
from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.controller.supervisor.loss_attribution import Evidence, LossAttribution
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.agent_messages import StartFailed
from jaxrun.records.event_log.events import Event

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.attempts import AttemptContext

_PROBE_TIMEOUT_S = 1.0  # in which a live host answers
_ATTACHED_PROBE_TIMEOUT_S = 0.15  # an mpirun or srun leaves the processes that it started, as this one, less time


class LossWatch:
    """The agents of one attempt and their launch command, as far as they may go away."""

    def __init__(
        self,
        context: AttemptContext,
        launch: LaunchProcess,
        connections: AgentConnections,
        clocks: AgentClocks,
        handle: Callable[[Event], None],
        *,
        attached: bool,
    ) -> None:
        """`handle` tells the head; `attached` is that of the AgentServer."""
        self._dispatcher = context.dispatcher
        self._now = context.clock
        self._launch = launch
        self._connections = connections
        self._clocks = clocks
        self._handle = handle
        self._losses = LossAttribution(_ATTACHED_PROBE_TIMEOUT_S if attached else _PROBE_TIMEOUT_S)
        self._failure_reported: set[int] = set()

    def attach(self, loop: EventLoop) -> None:
        loop.add_timer(lambda: self.deadline, self._tell)

    @property
    def deadline(self) -> float | None:
        """When what is held is told at the latest; None if nothing is."""
        return self._losses.deadline

    @property
    def all_reported(self) -> bool:
        return len(self._clocks.reported) == len(self._dispatcher.hosts)

    def add_failure(self, rank: int) -> None:
        """The worker of this rank has reported why it fails."""
        self._failure_reported.add(rank)

    def handle_or_hold(self, event: Event) -> None:
        """Hold the end of a worker while the cause of other ends is sought: the launch command may have ended them."""
        if self._losses.probed:
            self.hold(event, probe=False)
        else:
            self._handle(event)

    def hold(self, *events: Event, probe: bool) -> None:
        """Hold these events until it is known why agents end; `probe` whether all hosts still answer."""
        probe_hosts = self._connections.probe if probe and self._clocks.reported else None
        self._losses.hold(events, self._now(), all_reported=self.all_reported, probe=probe_hosts)

    def _tell(self) -> None:
        launch_end = None
        if self._launch.status is not None:
            launch_end = StartFailed(self._launch.describe_failure(self._dispatcher.hosts, self._clocks.reported))
        evidence = Evidence(
            unanswered=self._connections.unanswered_ranks() if self._losses.probed else (),
            failure_reported=frozenset(self._failure_reported),
            launch_end=launch_end,
            launch_failed=self._launch.failed,
            all_reported=self.all_reported,
        )
        for event in self._losses.explain(evidence):
            self._handle(event)
