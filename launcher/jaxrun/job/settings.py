"""What the workers of one host find in their environment because of how the job lies on it."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.job.environment import CPU_DEVICES_VARIABLE, PLATFORMS_VARIABLE, common_settings
from jaxrun.job.job import Job
from jaxrun.job.layout import Layout

_XLA_THREADS = "NPROC"


def worker_settings(job: Job, layout: Layout, given: Mapping[str, str], *, cores: int) -> dict[str, str]:
    """The variables for all workers of a host, which share `cores`; `given` is what the user gives them."""
    values = common_settings(given, cores=cores, workers=layout.processes)
    return values | _platform(job, layout, given) | _xla_threads(layout, cores, given)


def _platform(job: Job, layout: Layout, given: Mapping[str, str]) -> dict[str, str]:
    """JAX's own variables for the platform and its simulated devices."""
    values = {}
    listed = [name.strip() for name in given.get(PLATFORMS_VARIABLE, "").split(",")]
    if listed[0] != layout.platform:
        # With an accelerator named, JAX fails if it cannot use it; CPU stays usable for work on the host.
        values[PLATFORMS_VARIABLE] = "cpu" if layout.platform == "cpu" else f"{layout.platform},cpu"
    if layout.platform == "cpu" and job.devices_per_process is not None:
        values[CPU_DEVICES_VARIABLE] = str(job.devices_per_process)
    return values


def _xla_threads(layout: Layout, cores: int, given: Mapping[str, str]) -> dict[str, str]:
    """The size of XLA's thread pool on CPU, where several simulated devices wait in one process for each other.

    Measured with JAX 0.8 to 0.10: with fewer than two threads a device, a loop of collectives that reads no result
    hangs.
    """
    devices = layout.devices_per_process or 1
    if layout.platform != "cpu" or devices == 1 or _XLA_THREADS in given:
        return {}
    return {_XLA_THREADS: str(max(cores, 2 * devices))}
