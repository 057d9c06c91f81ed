"""`python -m jaxrun.agent`: the agent of one worker, as mpirun or srun starts it; ends as the head tells it."""

from __future__ import annotations

import os
import sys

from jaxrun.errors import JaxrunError


def main() -> int:
    from jaxrun.agent import remote
    from jaxrun.contract import AgentEnv
    from jaxrun.planning import surroundings

    try:
        env = AgentEnv.from_env(os.environ)
        place = surroundings.told(env.engine, os.environ)
        return remote.serve(env, place.rank, place.size, os.environ)
    except JaxrunError as error:
        print(f"jaxrun: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
