"""`python -m jaxrun.node.agent [RANKS SIZE]`: an agent, as mpirun or srun starts it; the head decides its exit status.

RANKS are those that it has at first, such as 4-7. Without the two words they are in AGENT_RANKS, or there is one rank,
which is read from the variables of the launch command that AgentEnv names. Until an agent has found its head it watches
its parent, the launch command or that one's daemon: if jaxrun is killed while it starts, nobody else tells the agent.

A launch command that loses a host ends, and with it all that it has started. Where the job is to go on with the others,
an agent that has found its head leaves its place to a process that only waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxrun.errors import EXIT_SIGNAL_BASE, EXIT_UNAVAILABLE, JaxrunError, UnavailableError, describe_shortage
from jaxrun.msgspec_import import import_msgspec
from jaxrun.node import early_signals

if TYPE_CHECKING:
    from jaxrun.protocol.addresses import Address

_parent = os.getppid()  # before all that takes time
if __name__ == "__main__":
    early_signals.begin()
_PR_SET_PDEATHSIG = 1


def main() -> int:
    import_msgspec()
    from jaxrun.node.agent import agent_process
    from jaxrun.node.agent.agent_process import AgentStart, WayToHead
    from jaxrun.protocol.addresses import parse_addresses
    from jaxrun.protocol.connect import HeadAddress
    from jaxrun.protocol.env import AgentEnv
    from jaxrun.protocol.names import AGENT_RANKS, CARRIED_LOCK, HEAD_TUNNEL
    from jaxrun.text import parse_ranks

    if CARRIED_LOCK in os.environ:
        os.set_inheritable(int(os.environ[CARRIED_LOCK]), False)
    try:
        env = AgentEnv.from_env(os.environ)
        tunnel = parse_addresses(os.environ[HEAD_TUNNEL]) if HEAD_TUNNEL in os.environ else ()
        addresses = _addresses_by_round(parse_addresses(env.head_addresses), tunnel)
        words = sys.argv[1:] or os.environ.get(AGENT_RANKS, "").split()
        if len(words) == 2:
            ranks = [rank for part in parse_ranks(words[0], "an agent") for rank in part]
            size = int(words[1])
        else:
            from jaxrun.spec.engines.rank_info import read_rank_info

            info = read_rank_info(env.engine, os.environ)
            ranks, size = [info.rank], info.size
        way = WayToHead(
            lambda: HeadAddress(env.token, next(addresses)),
            env.init_timeout,
            check=_check_parent,
            on_found=lambda: _on_found(leaves_place=env.stays),
            tunnel=tunnel[0] if tunnel else None,
        )
        return agent_process.run(AgentStart(ranks, size, os.environ), way).status
    except JaxrunError as error:
        print(f"jaxrun: {error}", file=sys.stderr)
        return error.exit_code
    except (OSError, RuntimeError) as error:
        text = describe_shortage(error)
        if not text:
            raise
        print(f"jaxrun: on {os.uname().nodename}: {text}", file=sys.stderr)
        return EXIT_UNAVAILABLE


def _addresses_by_round(head: tuple[Address, ...], tunnel: tuple[Address, ...]) -> Iterator[tuple[Address, ...]]:
    """Yield where to look for the head: directly at first, then through the tunnel as well."""
    yield head
    while True:
        yield tuple(dict.fromkeys((*head, *tunnel)))


def _on_found(*, leaves_place: bool) -> None:
    """Tell the starter of the ssh backend that the head is found, and leave this place where the agent outlives it."""
    from jaxrun.protocol.names import AGENT_RANKS
    from jaxrun.protocol.ssh_start import FOUND

    if AGENT_RANKS in os.environ:
        with contextlib.suppress(OSError):
            os.write(1, f"{FOUND}\n".encode())
    if leaves_place:
        _leave_place()


def _check_parent() -> None:
    """Raise UnavailableError if what has started this process is gone."""
    if os.getppid() != _parent or _is_adopted(_parent):
        raise UnavailableError("the process that started this agent ended before the head of the job was found")


def _is_adopted(parent: int) -> bool:
    """Whether `parent` is not what has started this process: its session is another, and this one begins none."""
    own = os.getsid(0)
    with contextlib.suppress(OSError):
        return own != os.getpid() and own != os.getsid(parent)
    return False


def _leave_place() -> None:
    """Go on as a child in a session of its own; the process that the launch command knows ends as the child does.

    The launch command signals, and kills, only that process. A stopped child is then continued, so that it can end.
    """
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else EXIT_SIGNAL_BASE - status)
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
