"""The life of one worker, from its first message to its exit status; design: hello, join, prove, run, end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from typing import NoReturn

from jaxrun.contract import STACKS_SIGNAL, Run, WorkerEnv

from . import finish, greeting, kernel, lastwords, program
from .link import AgentGone, Link

_LOST = 70


def live(env: WorkerEnv, argv: list[str], started: float) -> NoReturn:
    """Be the worker `env` describes and run the program `argv`; never returns."""
    link = Link(env.channel_fd)
    try:
        _serve_stacks(env.stacks_fd)
        _live(env, argv, started, link)
    except AgentGone:
        os._exit(_LOST)


def _live(env: WorkerEnv, argv: list[str], started: float, link: Link) -> NoReturn:
    stage = "start"
    try:
        _settle_in(env)
        link.send(greeting.hello(env, argv, os.environ, started))
        stage = "join"
        from . import join

        joined = join.join(env, link)
        _tie_to_agent(link)
        stage = "prove"
        link.send(join.prove(env, joined))
        link.receive(Run)
        lastwords.watch_threads(link, env.rank)
        stage = "program"
        program.run(argv)
    except AgentGone:
        raise
    except BaseException as error:
        if not isinstance(error, SystemExit) or program.exit_status(error):
            _fail(env, link, stage, error)
        lastwords.print_error(error)
    with contextlib.suppress(KeyboardInterrupt):
        finish.succeed(env, link)
    finish.leave(130)


def _fail(env: WorkerEnv, link: Link, stage: str, error: BaseException) -> NoReturn:
    words = lastwords.describe(error, env.rank, stage)
    # The launcher shows the words and logs them; what the program itself wants to print of them, it still prints.
    if sys.excepthook is not sys.__excepthook__ or isinstance(error, SystemExit):
        lastwords.print_error(error)
    finish.fail(words, link)


def _settle_in(env: WorkerEnv) -> None:
    if env.cpus:
        os.sched_setaffinity(0, env.cpus)
    if env.simulated_boot_id:
        try:
            kernel.become_simulated_host(env.host, env.simulated_boot_id)
        except OSError as error:
            if env.rank == 0:
                print(
                    f"jaxrun: the simulated hosts share this machine's boot id, because it forbids namespaces ({error}); "
                    "what JAX does differently across hosts will not be seen",
                    file=sys.stderr,
                )


def _tie_to_agent(link: Link) -> None:
    # Not earlier: a forked worker changes parents when the fork server leaves, which would count as the parent's death.
    kernel.die_with_parent()
    if link.agent_gone():
        raise AgentGone


def _serve_stacks(fd: int) -> None:
    """Write the stacks of all threads to `fd` when a fatal signal or STACKS_SIGNAL comes, even while C++ holds the GIL."""
    os.set_inheritable(fd, False)
    faulthandler.enable(fd, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, fd, all_threads=True)
