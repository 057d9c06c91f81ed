"""`python -m jaxrun.agent [RANK SIZE]`: the agent of one worker, as mpirun or srun starts it; ends as the head says.

Where the two numbers are not given, the variables of the engine that AgentEnv names tell them.
"""

from __future__ import annotations

import os
import sys

from jaxrun.errors import JaxrunError


def main() -> int:
    from jaxrun.agent import remote
    from jaxrun.job import cluster_env
    from jaxrun.protocol.env import AgentEnv

    try:
        env = AgentEnv.from_env(os.environ)
        if len(sys.argv) == 3:
            rank, size = map(int, sys.argv[1:])
        else:
            place = cluster_env.read_rank_info(env.engine, os.environ)
            rank, size = place.rank, place.size
        return remote.run_from_env(env, rank, size, os.environ)
    except JaxrunError as error:
        print(f"jaxrun: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
