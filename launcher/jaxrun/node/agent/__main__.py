"""`python -m jaxrun.node.agent [RANK SIZE]`: the agent of one worker, started by mpirun or srun; ends as the head says.

With FIRST-LAST for RANK: the agents of all those ranks. Without the two words, they are read from the variables of the
launch command that AgentEnv names. Until an agent has found its head it watches its parent, the launch command or that
one's daemon: if jaxrun is killed while it starts, nobody else tells the agent.
"""

from __future__ import annotations

import contextlib
import os
import sys

from jaxrun.errors import EXIT_UNAVAILABLE, JaxrunError, UnavailableError, describe_shortage

_parent = os.getppid()  # before all that takes time


def main() -> int:
    from jaxrun.node.agent import remote
    from jaxrun.protocol.addresses import parse_addresses
    from jaxrun.protocol.connect import HeadAddress
    from jaxrun.protocol.env import AgentEnv
    from jaxrun.spec.job import cluster_env

    try:
        env = AgentEnv.from_env(os.environ)
        address = HeadAddress(env.token, parse_addresses(env.head))
        if len(sys.argv) == 3 and "-" in sys.argv[1]:
            from jaxrun.node.agent import host_agents

            first, last = map(int, sys.argv[1].split("-"))
            status, said = host_agents.run(
                lambda: address, range(first, last + 1), int(sys.argv[2]), env.init_timeout, os.environ
            )
            for text in said:
                print(f"jaxrun: {text}", file=sys.stderr)
            return status
        if len(sys.argv) == 3:
            rank, size = map(int, sys.argv[1:])
        else:
            info = cluster_env.read_rank_info(env.engine, os.environ)
            rank, size = info.rank, info.size
        return remote.run(lambda: address, rank, size, env.init_timeout, os.environ, check=_check_parent)
    except JaxrunError as error:
        print(f"jaxrun: {error}", file=sys.stderr)
        return error.exit_code
    except (OSError, RuntimeError) as error:
        text = describe_shortage(error)
        if not text:
            raise
        print(f"jaxrun: on {os.uname().nodename}: {text}", file=sys.stderr)
        return EXIT_UNAVAILABLE


def _check_parent() -> None:
    """Raise UnavailableError if what has started this process is gone."""
    if os.getppid() != _parent or _is_adopted(_parent):
        raise UnavailableError("what started this agent has ended before the head of the job was found")


def _is_adopted(parent: int) -> bool:
    """Whether `parent` is not what has started this process: its session is another, and this one begins none."""
    own = os.getsid(0)
    with contextlib.suppress(OSError):
        return own != os.getpid() and own != os.getsid(parent)
    return False


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
