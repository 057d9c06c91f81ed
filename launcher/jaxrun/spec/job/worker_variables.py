"""The variables that jaxrun sets in all workers of a host. Pure: every environment is passed in."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.spec.job.environment import CPU_DEVICES_VARIABLE, PLATFORMS_VARIABLE, interpreter_variables
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.layout import Layout

_THREAD_COUNT_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_XLA_THREADS_VARIABLE = "NPROC"
_PROXY_VARIABLES = ("grpc_proxy", "http_proxy", "https_proxy")
_LOOPBACK = "127.0.0.1,localhost,::1"


def common_variables(environ: Mapping[str, str], *, cores: int, workers: int) -> dict[str, str]:
    """Return the variables for every worker, on any platform; `environ` has what the user gives.

    `workers` processes share the `cores` of the machine.
    """
    threads = str(max(1, cores // workers))
    values = {name: threads for name in _THREAD_COUNT_VARIABLES if name not in environ}
    return values | interpreter_variables(environ) | _no_proxy(environ)


def worker_variables(job: Job, layout: Layout, environ: Mapping[str, str], *, cores: int) -> dict[str, str]:
    """Return the variables for all workers of a host, which share its `cores`; `environ` has what the user gives."""
    values = common_variables(environ, cores=cores, workers=layout.processes)
    return values | _platform_variables(job, layout, environ) | _xla_threads(layout, cores, environ)


def _platform_variables(job: Job, layout: Layout, environ: Mapping[str, str]) -> dict[str, str]:
    """Return JAX's own variables for the platform and its simulated devices."""
    values = {}
    listed = [name.strip() for name in environ.get(PLATFORMS_VARIABLE, "").split(",")]
    if listed[0] != layout.platform:
        # If an accelerator is named, JAX fails if it cannot use it; the CPU stays usable for work on the host.
        values[PLATFORMS_VARIABLE] = "cpu" if layout.platform == "cpu" else f"{layout.platform},cpu"
    if layout.platform == "cpu" and job.devices_per_process is not None:
        values[CPU_DEVICES_VARIABLE] = str(job.devices_per_process)
    return values


def _xla_threads(layout: Layout, cores: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the size of XLA's thread pool, for several simulated CPU devices of one process that wait for each other.

    Measured with JAX 0.8 to 0.10: with fewer than two threads per device, a loop of collectives that reads no result
    hangs.
    """
    devices = layout.devices_per_process or 1
    if layout.platform != "cpu" or devices == 1 or _XLA_THREADS_VARIABLE in environ:
        return {}
    return {_XLA_THREADS_VARIABLE: str(max(cores, 2 * devices))}


def _no_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Keep gRPC from looking for the coordinator behind a proxy, where it would wait until its timeout."""
    if not any(environ.get(name) or environ.get(name.upper()) for name in _PROXY_VARIABLES):
        return {}
    given = next((environ[n] for n in ("no_grpc_proxy", "no_proxy", "NO_PROXY") if environ.get(n)), "")
    return {"no_grpc_proxy": f"{given},{_LOOPBACK}" if given else _LOOPBACK}
