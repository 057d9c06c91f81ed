"""Whether JAX uses the GPUs that nvidia-smi shows, and whether driver, CUDA and plugin go together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxrun.frontends.doctor.finding import Finding, failure, group_hosts, ok, warning
from jaxrun.frontends.doctor.observation import Observation
from jaxrun.protocol.probe_messages import HostFacts
from jaxrun.text import format_bytes, plural

_FIRST_DRIVERS = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}
_TAKEN = 0.05  # of a GPU's memory: more is not the driver's own


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """A line of nvidia-smi; memory in MiB."""

    name: str
    driver: str
    memory: float
    used: float


def parse_gpus(facts: HostFacts) -> tuple[NvidiaGpu, ...]:
    """The GPUs of a host; a line that says "[N/A]" counts, and its memory is not known."""
    gpus = []
    for line in facts.gpus:
        name, driver, *memory = (word.strip() for word in line.split(","))
        total, used = (float(word) if word.replace(".", "").isdigit() else 0.0 for word in (*memory, "", "")[:2])
        gpus.append(NvidiaGpu(name, driver, total, used))
    return tuple(gpus)


def check_devices(seen: Observation) -> Iterator[Finding]:
    found = [finding for host, facts in seen.hosts.items() for finding in _check_host(seen, host, facts)]
    drivers = {host: gpus[0].driver for host, facts in seen.hosts.items() if (gpus := parse_gpus(facts))}
    groups = group_hosts(drivers)
    if len(groups) > 1:
        text = "; ".join(f"{driver} on {hosts}" for driver, hosts in groups.items())
        found.append(warning(f"NVIDIA's drivers differ: {text}", "install the same driver on all hosts"))
    yield from found
    if seen.devices and not found:
        shown = group_hosts({host: _describe(seen, host, facts) for host, facts in seen.hosts.items()})
        yield ok("; ".join(text if len(shown) == 1 else f"{text} on {hosts}" for text, hosts in shown.items()))


def _check_host(seen: Observation, host: str, facts: HostFacts) -> Iterator[Finding]:
    gpus = parse_gpus(facts)
    for index, gpu in enumerate(gpus):
        if gpu.used > _TAKEN * gpu.memory > 0:
            taken = f"{format_bytes(int(gpu.used * 2**20))} of {format_bytes(int(gpu.memory * 2**20))}"
            text = f"{host}: {taken} of GPU {index} are taken by another process, and JAX wants 75 %"
            yield warning(text, "nvidia-smi there names it; jaxrun --env XLA_PYTHON_CLIENT_MEM_FRACTION=.2 takes less")
    for plugin, first in _FIRST_DRIVERS.items():
        if gpus and plugin in facts.versions and int(gpus[0].driver.split(".")[0] or 0) < first:
            text = f"{host}: {plugin} needs NVIDIA's driver {first} or newer, and {gpus[0].driver} is installed"
            yield failure(text, "pip install 'jax[cuda12]', for older drivers; or a newer driver")
    devices = [seen.devices[rank] for rank in seen.ranks_on(host) if rank in seen.devices]
    used = sum(found.count for found in devices if found.platform == "gpu")
    if devices and used < len(gpus):
        has_plugin = any(plugin in facts.versions for plugin in _FIRST_DRIVERS)
        text = f"{host}: nvidia-smi shows {plural(len(gpus), 'GPU')}, and JAX uses {used or 'none'}"
        more = "-n or --processes-per-host for more; CUDA_VISIBLE_DEVICES?"
        yield warning(text, more if has_plugin else "pip install 'jax[cuda13]'")


def _describe(seen: Observation, host: str, facts: HostFacts) -> str:
    devices = [seen.devices[rank] for rank in seen.ranks_on(host) if rank in seen.devices]
    shown = dict.fromkeys(f"{found.count} x {', '.join(found.kinds)}" for found in devices)
    processes = f"{plural(len(devices), 'process')}{' on each host' if len(seen.hosts) > 1 else ''}"
    gpus = parse_gpus(facts)
    driver = f"; driver {gpus[0].driver}" if gpus else ""
    return f"{processes}, with {' or '.join(shown)}{driver}"
