"""The backends, all that can start the processes of a job, for --backend, help and the pytest plugin.

A backend is an engine whose row in the table (spec/engines) has options; or this machine; or mpirun, whichever engine's
that is. Its `plan` turns a Job into a Plan; planning.py calls it. The `plan` of a backend that starts agents on other
hosts fills in a LaunchCommand and lets remote_plan.plan_remote do the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from jaxrun.spec.engines import ENGINES, HOST_LIST, HOST_OPTIONS, SPARES, EngineRow
from jaxrun.spec.job.option_declaration import Option


class Backend(Struct, frozen=True):
    """What --backend names.

    module:   holds its `plan` (engines.EngineRow.plan); imported only when a job uses it; empty for `attach`
    options:  groups of options (Option.needs) that this backend supports
    """

    module: str
    options: tuple[str, ...]


LOCAL, MPIRUN, KUBERNETES = "local", "mpirun", "kubernetes"


def backends_of(rows: Mapping[str, EngineRow]) -> dict[str, Backend]:
    """Return those of these rows that --backend accepts."""
    return {key: Backend(row.plan or row.module, row.options) for key, row in rows.items() if row.options is not None}


BACKENDS = {
    LOCAL: Backend("jaxrun.spec.backends.local", ("simulated hosts",)),
    MPIRUN: Backend("jaxrun.spec.backends.mpirun", (*HOST_OPTIONS, HOST_LIST, SPARES, "fewer hosts", "mpirun")),
    **backends_of(ENGINES),
}
ATTACH = "attach"  # `jaxrun attach`, whose processes mpirun, srun or a user has started
HOSTS = "hosts"  # one command per host; --host-rank numbers the hosts
_BY_HAND = {  # not accepted by --backend
    ATTACH: Backend("", ("network",)),
    HOSTS: Backend("jaxrun.spec.engines.by_hand", (*HOST_OPTIONS, "fewer hosts", "by hand")),
}


def places_ranks(backend: Backend) -> bool:
    """Whether its `plan` can start ranks on given hosts, and takes a Placement."""
    return SPARES in backend.options


def understands(backend: str, option: Option) -> bool:
    return not option.needs or option.needs in backend_of(backend).options


def backends_with(option: Option) -> list[str]:
    """Return the values of --backend that support the option."""
    return [name for name in BACKENDS if understands(name, option)]


def backend_of(name: str) -> Backend:
    return _BY_HAND[name] if name in _BY_HAND else BACKENDS[name]
