"""What the command line says to every worker: the plain record that they read, and the values that it may have.

The options that set it are declared in spec/job/options.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxrun.protocol.flight_file import LOCKSTEP_RECORD

MAKE_MESH_JAXRUN, MAKE_MESH_JAX = MAKE_MESH_MODES = ("jaxrun", "jax")  # who lays a mesh over several hosts
# Who compiles a program that the ranks of a host have in common: one of them where that is safe, or each.
COMPILE_AUTO, COMPILE_EACH = COMPILE_MODES = ("auto", "each")
STDIN_RANK_0, STDIN_NONE = "0", "none"  # who has jaxrun's standard input, besides other numbers
TLS_AUTO, TLS_ON, TLS_OFF = TLS_MODES = ("auto", "on", "off")  # whether only ranks of the job reach JAX's coordinator
CACHE_OFF, CACHE_AUTO = "off", "auto"  # where compiled programs are kept, besides a directory


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What every worker is told.

    compile_cache:  where compiled programs are kept: an absolute path, "auto" or "off"
    stdin:          which rank has jaxrun's standard input: a number, or "none"; "" while that is undecided
    init_timeout:   seconds until every process must have joined
    """

    make_mesh: str = MAKE_MESH_JAXRUN
    stdin: str = ""
    torch_env: bool = False
    compile: str = COMPILE_AUTO
    compile_cache: str = CACHE_OFF
    coordinator_tls: str = TLS_AUTO
    verbose: bool = False
    lockstep: str = LOCKSTEP_RECORD
    init_timeout: float = 120.0
    pdb: bool = False
