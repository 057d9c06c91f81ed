"""Whether JAX uses the GPUs that NVIDIA's driver shows, and whether driver, CUDA and plugin go together."""

from __future__ import annotations

from collections.abc import Iterator

from jaxrun.frontends.doctor.finding import Finding, failure, group_hosts, ok, warning
from jaxrun.frontends.doctor.observation import Observation
from jaxrun.protocol.probe_messages import HostFacts
from jaxrun.text import format_bytes, plural

_FIRST_DRIVERS = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}
_TAKEN = 0.05  # of a GPU's memory: more is not the driver's own


def check_devices(seen: Observation) -> Iterator[Finding]:
    found = [finding for host, facts in seen.hosts.items() for finding in _check_host(seen, host, facts)]
    drivers = {host: facts.nvidia_driver for host, facts in seen.hosts.items() if facts.gpus}
    groups = group_hosts(drivers)
    if len(groups) > 1:
        text = "; ".join(f"{driver} on {hosts}" for driver, hosts in groups.items())
        found.append(warning(f"NVIDIA's drivers differ: {text}", "install the same driver on all hosts"))
    yield from found
    if seen.devices and not found:
        shown = group_hosts({host: _describe(seen, host, facts) for host, facts in seen.hosts.items()})
        yield ok("; ".join(text if len(shown) == 1 else f"{text} on {hosts}" for text, hosts in shown.items()))


def _check_host(seen: Observation, host: str, facts: HostFacts) -> Iterator[Finding]:
    if facts.nvidia_trouble:
        yield warning(
            f"{host}: there is an NVIDIA driver, but {facts.nvidia_trouble}", "what does nvidia-smi say there?"
        )
    for index, (used, all_bytes) in enumerate(zip(facts.gpu_used_bytes, facts.gpu_bytes, strict=True)):
        if used > _TAKEN * all_bytes > 0:
            taken = f"{format_bytes(used)} of {format_bytes(all_bytes)}"
            text = f"{host}: {taken} of GPU {index} are taken by another process, and JAX wants 75 %"
            yield warning(text, "nvidia-smi there names it; jaxrun --env XLA_PYTHON_CLIENT_MEM_FRACTION=.2 takes less")
    for plugin, first in _FIRST_DRIVERS.items():
        if facts.gpus and plugin in facts.versions and int(facts.nvidia_driver.split(".")[0] or 0) < first:
            text = f"{host}: {plugin} needs NVIDIA's driver {first} or newer, and {facts.nvidia_driver} is installed"
            yield failure(text, "pip install 'jax[cuda12]', for older drivers; or a newer driver")
    devices = [seen.devices[rank] for rank in seen.ranks_on(host) if rank in seen.devices]
    used = sum(found.count for found in devices if found.platform == "gpu")
    if devices and used < len(facts.gpus):
        has_plugin = any(plugin in facts.versions for plugin in _FIRST_DRIVERS)
        text = f"{host}: NVIDIA's driver shows {plural(len(facts.gpus), 'GPU')}, and JAX uses {used or 'none'}"
        more = "-n or --processes-per-host for more; CUDA_VISIBLE_DEVICES?"
        yield warning(text, more if has_plugin else "pip install 'jax[cuda13]'")


def _describe(seen: Observation, host: str, facts: HostFacts) -> str:
    devices = [seen.devices[rank] for rank in seen.ranks_on(host) if rank in seen.devices]
    shown = dict.fromkeys(f"{found.count} x {', '.join(found.kinds)}" for found in devices)
    processes = f"{plural(len(devices), 'process')}{' on each host' if len(seen.hosts) > 1 else ''}"
    driver = f"; driver {facts.nvidia_driver}" if facts.gpus else ""
    return f"{processes}, with {' or '.join(shown)}{driver}"
