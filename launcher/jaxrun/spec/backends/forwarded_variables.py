"""Which variables of the launcher's environment go to other hosts: all except what belongs to one host or login."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxrun.protocol.env import AgentEnv
from jaxrun.spec.engines import ENGINES
from jaxrun.spec.job.environment import inherited_job_variables

# Other names are a shell's own, and mpirun might read them as patterns.
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOST_VARIABLES = frozenset(
    {"HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "HOSTNAME", "TMPDIR", "DISPLAY", "LS_COLORS", "SHLVL", "_"}
)
_LOGIN_PREFIXES = ("SSH_", "XDG_", "DBUS_", "BASH_FUNC_")


def forwarded_variables(environ: Mapping[str, str], set_env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the variables that must reach every process.

    These are all of `environ`, except variables that belong to a host, a login or an engine's own processes; and all
    that the user sets or the agents need.
    """
    left_out = {*_HOST_VARIABLES, *inherited_job_variables(environ)}
    prefixes = (*_LOGIN_PREFIXES, *(prefix for row in ENGINES.values() for prefix in row.kept))
    kept = {
        name
        for name in environ
        if name not in left_out and not name.startswith(prefixes) and _VARIABLE_NAME.fullmatch(name)
    }
    return tuple(sorted({*kept, *set_env, *AgentEnv.variable_names()}))
