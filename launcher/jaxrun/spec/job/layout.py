"""The layout of a job on one machine: the platform, the number of processes, and the devices of each process."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from jaxrun.errors import UsageError
from jaxrun.protocol.probe_messages import Gpus, Machine
from jaxrun.spec.job.environment import CPU_DEVICES_VARIABLE, PLATFORMS_VARIABLE
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.nvml import NO_DRIVER
from jaxrun.spec.job.options import PLATFORMS

_GPU_PLATFORMS = ("cuda", "rocm")
_XLA_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
# By the source of Gpus: why it lists no GPU, if no setting hides them.
_NO_CARDS = {"NVML": "NVIDIA's driver lists none", "kfd": "the kernel lists no AMD GPU"}
FORKED_PLATFORMS = ("cpu", "cuda")  # platforms on which workers are known to work after a fork


class Layout(Struct, frozen=True):
    """The decided layout.

    devices_per_process:  None if only JAX can tell
    gpus:                 empty on CPU and TPU
    notes:                remarks on the decision for the user
    """

    platform: str
    processes: int
    devices_per_process: int | None
    gpus: Gpus
    notes: tuple[str, ...] = ()


def wanted_platforms(job: Job, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the platforms to look for, best first: the one of --platform or JAX_PLATFORMS, else all."""
    if job.platform != "auto":
        return _GPU_PLATFORMS if job.platform == "gpu" else (job.platform,)
    first = environ.get(PLATFORMS_VARIABLE, "").split(",")[0].strip()
    if not first:
        return ("cuda", "rocm", "tpu", "cpu")
    if first == "gpu":
        return _GPU_PLATFORMS
    if first not in PLATFORMS:
        known = ", ".join(PLATFORMS[1:])
        raise UsageError(f"{PLATFORMS_VARIABLE} names {first!r}; give one of {known} with --platform")
    return (first,)


def decide_layout(job: Job, machine: Machine, environ: Mapping[str, str]) -> Layout:
    """Decide platform, processes and devices. Raises UsageError if the machine lacks what was asked for."""
    wanted = wanted_platforms(job, environ)
    for platform in wanted:
        if platform == "cpu":
            break
        if platform == "tpu" and machine.tpu:
            return _on_tpu(job)
        gpus = machine.gpus.get(platform)
        if gpus is None or not gpus.names:
            continue
        if platform == "cuda" and "cpu" in wanted and not machine.cuda_plugin:
            continue
        return _on_gpus(job, platform, gpus)
    if "cpu" not in wanted:
        raise UsageError(_no_device_message(job, wanted, machine))
    layout = _on_cpu(job, environ)
    return _with_unused_gpus(layout, machine) if len(wanted) > 1 else layout


def _on_cpu(job: Job, environ: Mapping[str, str]) -> Layout:
    processes = _process_count(job, default=max(1, job.simulated_hosts))
    forced = _XLA_DEVICES.findall(environ.get("XLA_FLAGS", ""))
    if forced and job.devices_per_process not in (None, int(forced[-1])):
        raise UsageError(
            f"-d {job.devices_per_process} contradicts XLA_FLAGS, where "
            f"--xla_force_host_platform_device_count={forced[-1]}; leave one of them out"
        )
    # As in JAX, its own variable takes precedence over the XLA flag.
    given = [
        job.devices_per_process or 0,
        _number(environ.get(CPU_DEVICES_VARIABLE, "")),
        *map(int, forced[-1:]),
    ]
    return Layout("cpu", processes, next(filter(None, given), 1), Gpus())


def _on_gpus(job: Job, platform: str, gpus: Gpus) -> Layout:
    there, per_process, hosts = len(gpus.names), job.devices_per_process or 1, max(1, job.simulated_hosts)
    processes = _process_count(job, default=max(1, there // per_process // hosts) * hosts)
    needed = processes * per_process
    if needed > there:
        limit = f", {gpus.visible}" if gpus.visible else ""
        raise UsageError(
            f"-n {processes} x -d {per_process} takes {needed} GPUs, but {there} "
            f"{'is' if there == 1 else 'are'} visible (counted by {gpus.source}{limit}); "
            "lower -n or -d, or make more of them visible"
        )
    idle = there - needed
    notes = (f"{idle} of {there} visible GPUs stay idle; -n and -d choose how many to use",) if idle else ()
    return Layout(platform, processes, per_process, gpus, notes)


def _on_tpu(job: Job) -> Layout:
    processes = _process_count(job, default=max(1, job.simulated_hosts))
    if processes > 1 or job.devices_per_process is not None:
        raise UsageError("on a TPU host jaxrun starts one process, with all chips; leave out -n and -d")
    return Layout("tpu", 1, None, Gpus())


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _process_count(job: Job, default: int) -> int:
    processes = job.processes or default
    hosts = job.simulated_hosts
    if hosts and processes % hosts:
        raise UsageError(
            f"-n {processes} processes cannot be divided equally among --simulate-hosts {hosts}; "
            f"give a multiple of {hosts}, such as -n {(processes // hosts + 1) * hosts}"
        )
    return processes


def _with_unused_gpus(layout: Layout, machine: Machine) -> Layout:
    cuda = machine.gpus.get("cuda", Gpus())
    there = "1 NVIDIA GPU is" if len(cuda.names) == 1 else f"{len(cuda.names)} NVIDIA GPUs are"
    if cuda.names:
        note = f"running on CPU: {there} visible, but JAX's plugin for CUDA is not installed (pip: jax[cuda13])"
    elif cuda.trouble and cuda.trouble != NO_DRIVER:
        note = f"running on CPU: there is an NVIDIA driver, but {cuda.trouble}"
    else:
        return layout
    return Layout(layout.platform, layout.processes, layout.devices_per_process, layout.gpus, (*layout.notes, note))


def _no_device_message(job: Job, wanted: tuple[str, ...], machine: Machine) -> str:
    asked = f"--platform {job.platform}" if job.platform != "auto" else f"{PLATFORMS_VARIABLE}={wanted[0]}"
    if wanted == ("tpu",):
        return f"{asked} asks for a TPU, but this machine shows none (no /dev/accel*); try --platform cpu"
    found = [machine.gpus[platform] for platform in wanted if platform in machine.gpus]
    reasons = "; ".join(gpus.trouble or gpus.visible or _NO_CARDS.get(gpus.source, gpus.source) for gpus in found)
    return f"{asked} asks for GPUs, but none is visible ({reasons}); make one visible, or try --platform cpu"
