"""--keep-survivors: a program that handles the death of another rank goes on, with JAX's own live_devices.

JAX alone learns of a death when heartbeats stay away, and on CPU some ranks wait in a collective that will never end.
Here the head says at once who has died (protocol/survivor_messages.py). Each survivor then closes Gloo's connections of
the groups that the dead rank was in, so that whatever waits there raises, and live_devices asks the head who lives.

XLA keeps one communicator on CPU for a list of devices, for as long as a process lives: once its connections are lost,
these devices can never exchange anything again in this order. So when a rank is back, live_devices yields the devices
in the order that the head names, in which they were not connected before; the devices of a rank stay together.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.flight import is_in_group
from jaxrun.protocol.survivor_messages import LiveRanksAsked
from jaxrun_runtime import jax_private, stopping
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected
from jaxrun_runtime.gloo.gloo_connections import GlooConnections
from jaxrun_runtime.lockstep import call_recorder
from jaxrun_runtime.own_threads import start_thread

_GET_LIVE_NODES = "get_live_nodes"


def connect(env: WorkerEnv, channel: AgentChannel, gloo: GlooConnections | None) -> None:
    """Let live_devices ask the head, and close the connections to ranks that have died."""
    live = LiveRanksClient(env.rank, channel, gloo)
    jax_private.wrap_coordination_calls((_GET_LIVE_NODES,), live.wrap)
    jax_private.order_live_devices(lambda devices: order_devices(devices, live.orders))
    start_thread(_close_connections, "jaxrun-survivors", channel, gloo)


class LiveRanksClient:
    """Asks the head which ranks live, and remembers its last answer.

    incarnations:  rank → incarnation
    orders:        ranks → the same ranks in the order of their devices
    """

    def __init__(self, rank: int, channel: AgentChannel, gloo: GlooConnections | None) -> None:
        self._rank = rank
        self._channel = channel
        self._gloo = gloo
        self._lock = threading.Lock()
        self._asked_about: tuple[int, ...] = ()  # the ranks of the last question
        self._number = 0  # of the last question
        self.incarnations: Mapping[int, int] = MappingProxyType({})
        self.orders: dict[frozenset[int], tuple[int, ...]] = {}

    def wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., dict[int, int]]:
        @functools.wraps(original)
        def get_live_nodes(client: Any, process_ids: Iterable[int]) -> dict[int, int]:
            with self._lock:
                return dict(self._ask(tuple(sorted(map(int, process_ids)))))

        return get_live_nodes

    def _ask(self, ranks: tuple[int, ...]) -> Mapping[int, int]:
        is_back = not self.incarnations
        # An exception, as of a signal handler, may have ended the wait for the answer to the first question. JAX has
        # begun no block then, and begins it with that answer: the other ranks have got it, too, or will.
        if not is_back or ranks != self._asked_about:
            self._send_question(ranks)
        answer = self._channel.receive_live_ranks(self._rank, self._number)
        self.incarnations = dict(answer.incarnations)
        self.orders[frozenset(answer.order)] = answer.order
        call_recorder.count_on({group: n for group, n in answer.calls.items() if is_in_group(self._rank, group)})
        if is_back and self.incarnations[self._rank] > 1:
            stopping.count_on(answer.polls + 1)  # the others make one poll between this live_devices and their next
        if self._gloo is not None:
            self._gloo.set_live(self.incarnations)
        return self.incarnations

    def _send_question(self, ranks: tuple[int, ...]) -> None:
        calls, polls = call_recorder.call_counts(), stopping.polls_made()
        self._asked_about, self._number = ranks, self._number + 1
        self._channel.send(LiveRanksAsked(self._rank, ranks, self._number, calls, polls))


def order_devices(devices: Sequence[Any], orders: Mapping[frozenset[int], tuple[int, ...]]) -> list[Any]:
    """Return devices in the order that the head has named for their ranks; unchanged if it has not.

    Only the ranks are permuted: a mesh of ranks and their devices has groups of one device each.
    """
    order = orders.get(frozenset(device.process_index for device in devices))
    return sorted(devices, key=lambda device: order.index(device.process_index)) if order else list(devices)


def _close_connections(channel: AgentChannel, gloo: GlooConnections | None) -> None:
    with contextlib.suppress(AgentDisconnected):
        while True:
            lost = channel.receive_losses()
            if gloo is not None:
                gloo.close_groups_of({rank: lost.incarnations.get(rank, 1) for rank in lost.ranks})
