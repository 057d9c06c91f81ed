"""The life of one worker, from its first message to its exit status; design: hello, join, prove, run, end."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys
import time
import traceback
from typing import NoReturn

from jaxrun.contract import STACKS_SIGNAL, Join, Lead, Run, WorkerEnv
from jaxrun.contract.flight import OFF
from jaxrun.errors import EXIT_SOFTWARE

from . import DivergenceError, finish, greeting, kernel, lastwords, program
from .link import AgentGone, Link

_PAUSE = 0.001


def live(env: WorkerEnv, argv: list[str], started: float, forked_by: int = 0) -> NoReturn:
    """Be the worker `env` describes and run the program `argv`; never returns.

    `started` is when this process began (seconds since the epoch), `forked_by` the fork server's process id.
    """
    link = Link(env.channel_fd)
    try:
        _serve_stacks(env.stacks_fd)
        _live(env, argv, started, forked_by, link)
    except AgentGone:
        pass
    except BaseException:
        # A bug of ours; to leave it to Python's own end would mean to wait in JAX's exit barrier.
        traceback.print_exc()
    finish.leave(EXIT_SOFTWARE)


def _live(env: WorkerEnv, argv: list[str], started: float, forked_by: int, link: Link) -> NoReturn:
    stage = "start"
    try:
        _settle_in(env)
        _import_jax(env)
        link.send(greeting.hello(env, argv, os.environ, started))
        stage = "join"
        from . import join

        order = link.receive(Lead, Join)
        _tie_to_agent(link, forked_by)
        joined = join.join(env, link, order)
        stage = "prove"
        link.send(join.prove(env, joined))
        _keep_in_step(env, link)
        link.receive(Run)
        lastwords.watch_threads(link, env.rank)
        stage = "program"
        program.run(argv)
    except AgentGone:
        raise
    except BaseException as error:
        _on_error(env, link, stage, error)
    with contextlib.suppress(KeyboardInterrupt):
        finish.succeed(env, link)
    finish.leave(lastwords.INTERRUPTED)


def _on_error(env: WorkerEnv, link: Link, stage: str, error: BaseException) -> None:
    """End the worker, unless the error is a sys.exit with success."""
    if isinstance(error, DivergenceError):
        from . import callsites

        callsites.end_at_users_line(error)
    words = lastwords.describe(error, env.rank, stage)
    # The launcher shows the words and logs them; what the program wants to print itself, it still prints.
    if sys.excepthook is not sys.__excepthook__ or isinstance(error, SystemExit) or not link.is_mine():
        lastwords.print_error(error)
    if words.status:
        finish.fail(env, words, link)


def _settle_in(env: WorkerEnv) -> None:
    if env.cpus:
        os.sched_setaffinity(0, env.cpus)
    if not env.simulated_boot_id:
        return
    try:
        kernel.become_simulated_host(env.host, env.simulated_boot_id)
    except OSError as error:
        _warn(
            env,
            f"the simulated hosts share this machine's boot id, because it forbids namespaces ({error}); "
            "what JAX does differently across hosts will not be seen",
        )


def _import_jax(env: WorkerEnv) -> None:
    """Import jax if that has not been done before a fork."""
    from . import jaxprivate

    if "jax" not in sys.modules:
        gc.disable()  # 60 ms less for the import
        import jax  # noqa: F401

        gc.freeze()  # nor does anybody need to look through it again
        gc.enable()
    for line in jaxprivate.missing(env.lockstep):
        _warn(env, line)


def _keep_in_step(env: WorkerEnv, link: Link) -> None:
    """While the others prove themselves."""
    if env.lockstep != OFF:
        from . import lockstep

        lockstep.install(env, link)


def _warn(env: WorkerEnv, text: str) -> None:
    if env.rank == 0:  # it is the same on all
        print(f"jaxrun: {text}", file=sys.stderr)


def _tie_to_agent(link: Link, forked_by: int) -> None:
    """End when the agent ends. To be called when all workers exist."""
    # The fork server leaves now, and its end must not count as the parent's.
    while os.getppid() == forked_by and not link.agent_gone():
        time.sleep(_PAUSE)
    kernel.die_with_parent()
    if link.agent_gone():
        raise AgentGone


def _serve_stacks(fd: int) -> None:
    """Write all threads' stacks to `fd` at a fatal signal or STACKS_SIGNAL, even while C++ holds the GIL."""
    os.set_inheritable(fd, False)
    faulthandler.enable(fd, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, fd, all_threads=True)
