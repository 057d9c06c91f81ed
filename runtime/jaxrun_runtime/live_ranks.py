"""--keep-survivors: a program that handles the death of another rank goes on, with JAX's own live_devices.

JAX alone learns of a death when heartbeats stay away, and on CPU some ranks wait in a collective that will never end.
Here the head says at once who has died (protocol/survivor_messages.py). Each survivor then closes Gloo's connections of
the groups that the dead rank was in, so that whatever waits there raises, and live_devices asks the head who lives.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.survivor_messages import LiveRanksAsked
from jaxrun_runtime import jax_private
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected
from jaxrun_runtime.gloo.gloo_connections import GlooConnections

_GET_LIVE_NODES = "get_live_nodes"


def connect(env: WorkerEnv, channel: AgentChannel, gloo: GlooConnections | None) -> None:
    """Let live_devices ask the head, and close the connections to ranks that have died."""
    jax_private.wrap_coordination_calls((_GET_LIVE_NODES,), functools.partial(_ask_the_head, env, channel))
    threading.Thread(target=_close_connections, args=(channel, gloo), name="jaxrun-survivors", daemon=True).start()


def _ask_the_head(
    env: WorkerEnv, channel: AgentChannel, name: str, original: Callable[..., Any]
) -> Callable[..., dict[int, int]]:
    lock = threading.Lock()

    @functools.wraps(original)
    def get_live_nodes(client: Any, process_ids: Iterable[int]) -> dict[int, int]:
        with lock:
            channel.send(LiveRanksAsked(env.rank, tuple(sorted(map(int, process_ids)))))
            return dict(channel.receive_live_ranks().incarnations)

    return get_live_nodes


def _close_connections(channel: AgentChannel, gloo: GlooConnections | None) -> None:
    with contextlib.suppress(AgentDisconnected):
        while True:
            lost = channel.receive_losses().ranks
            if gloo is not None:
                gloo.close_groups_of(lost)
