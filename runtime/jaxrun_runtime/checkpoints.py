"""`saved`: the program tells jaxrun that a checkpoint is complete. `attempt`: which attempt to run the job this is.

With orbax's CheckpointManager, rank 0 reports checkpoints by itself: its public methods `save` and
`wait_until_finished` are wrapped when the program imports them.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from msgspec import Struct

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.flight_file import SAVE
from jaxrun.protocol.names import JOB_ID
from jaxrun.protocol.stop_messages import CheckpointSaved
from jaxrun_runtime import background_saves, joint_calls, this_rank
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected
from jaxrun_runtime.import_watch import call_after_import

_report: Callable[[int], None] | None = None  # None outside of a worker


class AttemptInfo(Struct, frozen=True):
    """One attempt to run the job.

    number:  from 1
    size:    number of processes; may be smaller than in the previous attempt
    reason:  why the previous attempt ended, in one line; empty in the first attempt
    """

    number: int
    size: int
    reason: str


def attempt() -> AttemptInfo:
    """Return the attempt to which this process belongs; without jaxrun, attempt 1 with one process.

    It has `number` (from 1), `size` (the number of processes, perhaps fewer than before) and `reason` (in one line,
    why the previous attempt ended; empty in the first).
    """
    if JOB_ID not in os.environ:
        return AttemptInfo(1, 1, "")
    env = this_rank.read(os.environ)
    return AttemptInfo(env.attempt, env.size, env.restart_reason)


def saved(step: int) -> None:
    """Tell jaxrun that the checkpoint of `step` is complete, so that --max-restarts counts this as progress.

    Call it on one or more ranks, once the checkpoint can be restored. Without jaxrun it does nothing. Raises TypeError
    or ValueError if `step` is not an integer of 0 or more.
    """
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"a step must be 0 or more, not {step!r}")
    if _report is not None:
        _report(number)


def connect(env: WorkerEnv, channel: AgentChannel) -> None:
    """Report checkpoints of this worker to the head from now on."""
    global _report

    def report(step: int) -> None:
        with contextlib.suppress(AgentDisconnected):
            channel.send(CheckpointSaved(env.rank, step))

    def watch(module: ModuleType) -> None:
        background_saves.report_failures(env, channel)
        _note_saves(module)
        if env.rank == 0:
            _watch_orbax(module)

    _report = report
    call_after_import("orbax.checkpoint.checkpoint_manager", watch)


def _note_saves(module: ModuleType) -> None:
    """Note which step a CheckpointManager saves, on every rank."""
    manager_class: Any = getattr(module, "CheckpointManager", None)
    save = getattr(manager_class, "save", None)
    if save is None:
        return

    @functools.wraps(save)
    def noted_save(manager: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        has_saved = save(manager, step, *args, **kwargs)
        if has_saved:
            background_saves.note_save(int(step))
        return has_saved

    manager_class.save = noted_save


def _watch_orbax(module: ModuleType) -> None:
    """Report each checkpoint of a CheckpointManager as soon as it is complete, even if it saves asynchronously."""
    manager_class: Any = getattr(module, "CheckpointManager", None)
    if not all(hasattr(manager_class, name) for name in ("save", "wait_until_finished")):
        return  # the program can call `saved`
    save, wait_until_finished = manager_class.save, manager_class.wait_until_finished
    unfinished: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # by manager: the step that is being saved

    @functools.wraps(save)
    def watched_save(manager: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        has_saved = save(manager, step, *args, **kwargs)
        if has_saved:
            unfinished[manager] = [step]
            threading.Thread(target=wait_quietly, args=(manager,), name="jaxrun-checkpoint", daemon=True).start()
        return has_saved

    @functools.wraps(wait_until_finished)
    def watched_wait(manager: Any, *args: Any, **kwargs: Any) -> Any:
        steps = unfinished.get(manager, [])  # the step of a save that begins meanwhile is in another list
        is_main = threading.current_thread() is threading.main_thread()
        noted = joint_calls.state_stage(SAVE, "by orbax") if is_main else contextlib.nullcontext()
        try:
            with noted:
                result = wait_until_finished(manager, *args, **kwargs)
        except Exception:
            steps.clear()
            raise
        with contextlib.suppress(IndexError):
            saved(steps.pop())
        return result

    def wait_quietly(manager: Any) -> None:
        with contextlib.suppress(Exception):  # the program's own next call raises it
            manager.wait_until_finished()

    manager_class.save, manager_class.wait_until_finished = watched_save, watched_wait
