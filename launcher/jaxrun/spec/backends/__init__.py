"""The table of backends: everything that can start the processes of a job, for --backend, help and the pytest plugin.

A new backend is one file in this directory, whose `plan` turns a Job into a Plan, and one line in BACKENDS. A backend
that starts agents on other hosts fills in a LaunchCommand and lets remote_plan.plan_remote do the rest. planning.py
calls the `plan` of a job's backend.
"""

from __future__ import annotations

from msgspec import Struct

from jaxrun.spec.job.option_declaration import Option


class Backend(Struct, frozen=True):
    """One line of the table.

    module:   holds `plan(job, environ, job_id) -> Plan`; imported only when a job uses it; empty for `attach`. The
              `plan` of a backend with spare hosts also takes a Placement: what is decided of hosts already
    options:  groups of options (Option.needs) that this backend supports
    """

    module: str
    options: tuple[str, ...]


HOST_OPTIONS = ("hosts", "network")
_SPARES = "spares"
_REQUESTS = ("GPUs", "submit")  # requests to a scheduler

LOCAL, KUBERNETES = "local", "kubernetes"

BACKENDS = {
    LOCAL: Backend("jaxrun.spec.backends.local", ("simulated hosts",)),
    "mpirun": Backend("jaxrun.spec.backends.mpirun", (*HOST_OPTIONS, "host list", _SPARES, "fewer hosts", "mpirun")),
    "ssh": Backend("jaxrun.spec.backends.ssh", (*HOST_OPTIONS, "host list", _SPARES, "fewer hosts", "ssh")),
    "slurm": Backend("jaxrun.spec.backends.slurm", (*HOST_OPTIONS, _SPARES, "fewer hosts", "slurm", *_REQUESTS)),
    KUBERNETES: Backend("jaxrun.spec.backends.kubernetes", (*HOST_OPTIONS, "fewer hosts", "kubernetes", *_REQUESTS)),
}
ATTACH = "attach"  # `jaxrun attach`, whose processes mpirun, srun or a user has started
HOSTS = "hosts"  # one command per host; --host-rank numbers the hosts
_BY_HAND = {  # not accepted by --backend
    ATTACH: Backend("", ("network",)),
    HOSTS: Backend("jaxrun.spec.backends.manual", (*HOST_OPTIONS, "fewer hosts", "by hand")),
}


def places_ranks(backend: Backend) -> bool:
    """Whether its `plan` can start ranks on given hosts, and takes a Placement."""
    return _SPARES in backend.options


def understands(backend: str, option: Option) -> bool:
    return not option.needs or option.needs in backend_of(backend).options


def backends_with(option: Option) -> list[str]:
    """Return the values of --backend that support the option."""
    return [name for name in BACKENDS if understands(name, option)]


def backend_of(name: str) -> Backend:
    return _BY_HAND[name] if name in _BY_HAND else BACKENDS[name]
