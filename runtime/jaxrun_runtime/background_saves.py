"""Reports errors of orbax's background saves at once. Orbax keeps such an error until the program's next call of it.

Until then other ranks may wait for the save, and nobody knows why. Orbax logs the error in the thread in which it has
happened, so this file looks at what is logged with an exception, in threads other than the main thread.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.error_chain import BackgroundSave
from jaxrun.protocol.worker_messages import ThreadFailed
from jaxrun_runtime import error_chains, failure_report
from jaxrun_runtime.agent_channel import AgentChannel

_ORBAX = re.compile(r"-packages/orbax/")
_OWN_THREADS = "jaxrun-"
_MAX_REPORTS = 20  # per rank, of a program whose saves always fail

_last_step: int | None = None


def note_save(step: int) -> None:
    """Note that the program has begun to save `step`; in stacks and reports it is the step of a failed save."""
    global _last_step
    _last_step = step


def last_save() -> BackgroundSave | None:
    """Return the last save that the program has begun; None if there was none."""
    return BackgroundSave(_last_step) if _last_step is not None else None


def report_failures(env: WorkerEnv, channel: AgentChannel) -> None:
    """Send a ThreadFailed for each error of a background save from now on. Call it once orbax is imported."""
    reports_left = _MAX_REPORTS

    def report(error: BaseException) -> None:
        nonlocal reports_left
        reports_left -= 1
        if reports_left >= 0:
            channel.send(
                ThreadFailed(
                    env.rank,
                    time.time(),
                    threading.current_thread().name,
                    type(error).__name__,
                    failure_report.format_traceback(error),
                    chain=error_chains.describe_chain(error, error_chains.plain_text),
                    save=last_save() or BackgroundSave(None),
                )
            )

    logging.setLogRecordFactory(_reporting(logging.getLogRecordFactory(), report))


def _reporting(make: Callable[..., Any], report: Callable[[BaseException], None]) -> Callable[..., Any]:
    """Return a factory of log records that also reports the exceptions of saves."""

    def make_record(
        name: Any, level: int, path: Any, line: Any, text: Any, args: Any, exc_info: Any, *rest: Any, **more: Any
    ) -> Any:
        with contextlib.suppress(Exception):  # a report must not change what the program logs
            if level >= logging.ERROR and exc_info and _is_of_save(exc_info[2]):
                report(exc_info[1])
        return make(name, level, path, line, text, args, exc_info, *rest, **more)

    return make_record


def _is_of_save(frames: TracebackType | None) -> bool:
    thread = threading.current_thread()
    if thread is threading.main_thread() or thread.name.startswith(_OWN_THREADS):
        return False
    while frames is not None:
        if _ORBAX.search(frames.tb_frame.f_code.co_filename):
            return True
        frames = frames.tb_next
    return False
