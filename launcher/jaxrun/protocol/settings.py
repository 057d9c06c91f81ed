"""The settings of every worker from the command line: the plain record that workers read, and its possible values.

The options that set it are declared in spec/job/options.py.
"""

from __future__ import annotations

from jaxrun.protocol.flight_file import LOCKSTEP_CHECK
from jaxrun.protocol.hidden_fields import HidesFields

MAKE_MESH_JAXRUN, MAKE_MESH_JAX = MAKE_MESH_MODES = ("jaxrun", "jax")  # what lays out a mesh over several hosts
# Which ranks of a host compile a program that they share: one of them if that is safe, or each.
COMPILE_AUTO, COMPILE_EACH = COMPILE_MODES = ("auto", "each")
STDIN_RANK_0, STDIN_NONE = "0", "none"  # values besides the number of a rank
TLS_AUTO, TLS_ON, TLS_OFF = TLS_MODES = ("auto", "on", "off")  # whether JAX's coordinator accepts only ranks of the job
CACHE_OFF, CACHE_AUTO = "off", "auto"  # values besides a directory for compiled programs


class WorkerSettings(HidesFields, frozen=True, kw_only=True):
    """Settings that every worker gets.

    compile_cache:  directory for compiled programs: an absolute path, "auto" or "off"
    stdin:          the rank that has jaxrun's standard input: a number, or "none"; "" while undecided
    init_timeout:   seconds within which every process must have joined
    """

    make_mesh: str = MAKE_MESH_JAXRUN
    stdin: str = ""
    torch_env: bool = False
    expand_args: bool = False
    compile: str = COMPILE_AUTO
    compile_cache: str = CACHE_OFF
    coordinator_tls: str = TLS_AUTO
    verbose: bool = False
    lockstep: str = LOCKSTEP_CHECK
    init_timeout: float = 120.0
    pdb: bool = False
    debug_post_mortem: bool = False
    keep_survivors: bool = False
