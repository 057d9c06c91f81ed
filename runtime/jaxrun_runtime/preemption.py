"""Notices that a rank was sent SIGTERM by something else than jaxrun, such as a scheduler's daemon or a user's `kill`.

JAX handles SIGTERM in C++, where Python does not see it: the rank's preemption service leaves a notice with JAX's
coordinator, within a second, and each rank could ask for it (multihost_utils.reached_preemption_sync_point). Rank 0
waits for this notice in a thread, so that the head can ask a program that polls should_stop.
"""

from __future__ import annotations

import contextlib

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.worker_messages import PreemptionNotice
from jaxrun_runtime import jax_private
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected
from jaxrun_runtime.own_threads import start_thread


def watch(env: WorkerEnv, channel: AgentChannel) -> None:
    """Let rank 0 report the first notice of preemption."""
    if env.rank == 0:
        start_thread(_report, "jaxrun-preemption", channel)


def _report(channel: AgentChannel) -> None:
    if jax_private.wait_for_preemption_notice():
        with contextlib.suppress(AgentDisconnected):
            channel.send(PreemptionNotice(0))
