"""Whether all hosts have the same versions, and those that belong together."""

from __future__ import annotations

from collections.abc import Iterator

from jaxrun.frontends.doctor.finding import Finding, failure, group_hosts, ok, warning
from jaxrun.frontends.doctor.observation import Observation

_MISSING = "missing"


def check_versions(seen: Observation) -> Iterator[Finding]:
    hosts = seen.hosts
    if not hosts:
        return
    names = dict.fromkeys(name for facts in hosts.values() for name in facts.versions)
    same = []
    for name in names:
        groups = group_hosts({host: facts.versions.get(name, _MISSING) for host, facts in hosts.items()})
        usual = next(iter(groups))
        if len(groups) > 1:
            found = "; ".join(f"{version} on {where}" for version, where in groups.items())
            yield failure(f"{name} differs: {found}", _install(name, usual))
        elif usual == _MISSING:
            yield failure(f"{name} is not installed", _install(name, ""))
        else:
            same.append(f"{name} {usual}")
    yield from _check_plugins(seen)
    if same:
        yield ok(f"{', '.join(same)}{' on all hosts' if len(hosts) > 1 else ''}")


def _check_plugins(seen: Observation) -> Iterator[Finding]:
    """JAX leaves a plugin out whose version is not jaxlib's."""
    for host, facts in seen.hosts.items():
        jaxlib = facts.versions.get("jaxlib", "")
        for name, version in facts.versions.items():
            if name.endswith("-plugin") and not _goes_with(version, jaxlib):
                yield warning(f"{host}: {name} {version} does not go with jaxlib {jaxlib}", _install(name, jaxlib))


def _goes_with(plugin: str, jaxlib: str) -> bool:
    return plugin.split(".")[:3] == jaxlib.split(".")[:3]


def _install(name: str, version: str) -> str:
    if name == "Python":
        return f"start jaxrun with a Python {version} that all hosts have at the same path"
    wanted = f"{name}=={version}" if version not in ("", _MISSING) else name
    return f"pip install {wanted} there, or share one environment"
