"""launch: a job for one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrun.frontends.gang.call import Results
from jaxrun.frontends.gang.gang import Gang
from jaxrun.protocol.flight_file import LOCKSTEP_RECORD


def launch(
    fn: Callable[..., Any],
    *args: Any,
    processes: int | None = None,
    devices: int | None = None,
    hosts: int | None = None,
    backend: str = "local",
    platform: str = "auto",
    env: Mapping[str, str] | None = None,
    lockstep: str = LOCKSTEP_RECORD,
    run_dir: str | os.PathLike[str] | None = None,
    options: str | Sequence[str] = (),
    timeout: float | None = None,
    **kwargs: Any,
) -> Results:
    """Call `fn(*args, **kwargs)` on every rank of a job that is started for it, and ends with it.

    The job is described as for Gang, the call as for Gang.run.
    """
    with Gang(
        processes,
        devices,
        hosts=hosts,
        backend=backend,
        platform=platform,
        env=env,
        lockstep=lockstep,
        run_dir=run_dir,
        options=options,
    ) as gang:
        return gang.run(fn, *args, timeout=timeout, **kwargs)
