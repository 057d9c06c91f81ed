"""should_stop: tells the program when to save its state and exit, with the same answer on all ranks at each poll.

| started by               | request to stop comes from          | ranks agree by                            |
|--------------------------|-------------------------------------|-------------------------------------------|
| jaxrun                   | the head                            | protocol/stop_messages.py                 |
| something else, several  | SIGTERM, as JAX's preemption notice | JAX's preemption sync                     |
| something else, one      | SIGTERM                             |                                           |

A job of jaxrun does not use JAX's preemption sync, because it compares the numbers of all callers and answers only
once. If orbax calls it, too, as each `CheckpointManager.save` does, only one of the two would get the answer.
"""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.flight_file import SHOULD_STOP
from jaxrun.protocol.stop_messages import NO_STEP, PollCount, StopAt, StopPolled, StopReached
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected
from jaxrun_runtime.joint_calls import JointCall
from jaxrun_runtime.own_threads import start_thread

Poll = Callable[[int | None], bool]
_make_poll: Callable[[], Poll] | None = None  # None outside of a worker
_poll: Poll | None = None  # None before the first poll
_agreed: _AgreedStop | None = None
_polls_before = 0  # of the other ranks, before this one came back


def should_stop(step: int | None = None) -> bool:
    """Return whether the job should stop: if True, save a checkpoint and exit with status 0. Once True, it stays True.

    It becomes True on all ranks at the same call, counted from the program's start. So all ranks must make the same
    calls, from one thread. A call costs less than a microsecond: call it in every step of warm-up, training and
    evaluation.

    step:  your number of the step, for jaxrun's messages
    """
    global _poll
    if _poll is None:
        _poll = (_make_poll or _poll_without_jaxrun)()
    return _poll(step)


def connect(env: WorkerEnv, channel: AgentChannel) -> None:
    """Let the head decide when this worker's program should stop."""
    global _make_poll

    def make_poll() -> Poll:
        global _agreed
        _agreed = _AgreedStop(channel, env.rank, _polls_before)
        return _agreed.poll

    _make_poll = make_poll


def polls_made() -> int:
    """Return how many polls of this rank, which jaxrun has started, have returned False."""
    return _agreed.polls if _agreed is not None else 0


def count_on(polls: int) -> None:
    """Count this rank's polls on from this number, as the other ranks have made so many when this one comes back."""
    global _polls_before
    _polls_before = polls
    if _agreed is not None:
        _agreed.count_on(polls)


class _AgreedStop:
    """The rank's side of stop_messages.py. A thread answers the head, because the program may be in a long call."""

    def __init__(self, channel: AgentChannel, rank: int, polls: int = 0) -> None:
        self._channel = channel
        self._rank = rank
        self._lock = threading.Lock()
        self._change = threading.Condition(self._lock)
        self._polls = polls  # polls that have returned False
        self._is_asked = False
        self._stop_at: int | None = None
        self._is_stopped = False
        # Only the first call is counted: from then on the thread answers for this rank.
        self._first_call = JointCall(SHOULD_STOP)
        self._first_call.count()
        with contextlib.suppress(AgentDisconnected):
            channel.send(StopPolled(rank))
        start_thread(self._serve, "jaxrun-stop")
        os.register_at_fork(after_in_child=self._give_up)

    @property
    def polls(self) -> int:
        return self._polls

    def count_on(self, polls: int) -> None:
        with self._lock:
            self._polls = max(self._polls, polls)

    def poll(self, step: int | None) -> bool:
        if self._is_stopped:
            return True
        with self._lock:
            while self._is_asked and self._stop_at is None:
                self._first_call.wait(1, self._change.wait)
            if self._stop_at is None or self._polls + 1 < self._stop_at:
                self._polls += 1
                return False
            self._is_stopped = True
        with contextlib.suppress(AgentDisconnected):
            self._channel.send(StopReached(self._rank, NO_STEP if step is None else operator.index(step)))
        return True

    def _serve(self) -> None:
        with contextlib.suppress(AgentDisconnected):
            while self._stop_at is None:
                message = self._channel.receive_stop()
                with self._lock:
                    if isinstance(message, StopAt):
                        self._stop_at = message.poll
                        self._change.notify_all()
                        continue
                    self._is_asked, polls = True, self._polls
                self._channel.send(PollCount(self._rank, polls))

    def _give_up(self) -> None:
        """Keep the present answer forever, in a process that the program has forked: no thread gets messages there."""
        global _poll
        is_stopped = self._is_stopped

        def poll(step: int | None) -> bool:
            return is_stopped

        _poll = poll


def _poll_without_jaxrun() -> Poll:
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1:
        return _JaxSync().poll
    return _Termination().poll


class _JaxSync:
    """Asks JAX's preemption sync, which compares the numbers that processes pass to it: the numbers of their polls."""

    def __init__(self) -> None:
        from jax.experimental import multihost_utils

        self._reached: Callable[[int], bool] = multihost_utils.reached_preemption_sync_point
        self._polls = 0
        self._is_stopped = False

    def poll(self, step: int | None) -> bool:
        self._polls += 1
        self._is_stopped = self._is_stopped or self._reached(self._polls)
        return self._is_stopped


class _Termination:
    """Notes SIGTERM, then calls the program's handler. Sees no signal if it is made outside of the main thread."""

    def __init__(self) -> None:
        self._is_stopped = False
        if threading.current_thread() is threading.main_thread():
            self._before: Any = signal.signal(signal.SIGTERM, self._handle)

    def poll(self, step: int | None) -> bool:
        return self._is_stopped

    def _handle(self, signum: int, frame: Any) -> None:
        self._is_stopped = True
        if callable(self._before):
            self._before(signum, frame)
