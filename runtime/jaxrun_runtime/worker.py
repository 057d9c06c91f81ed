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

from jaxrun.errors import EXIT_SOFTWARE
from jaxrun.protocol.env import STACKS_SIGNAL, WorkerEnv
from jaxrun.protocol.flight_file import LOCKSTEP_OFF
from jaxrun.protocol.worker_messages import Join, Run, StartCoordinator
from jaxrun_runtime import DivergenceError, failure_report, hello, linux, program, shutdown
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected

_POLL_INTERVAL_S = 0.001


def run_worker(env: WorkerEnv, argv: list[str], started: float, forked_by: int = 0) -> NoReturn:
    """Be the worker `env` describes and run the program `argv`; never returns.

    `started` is when this process began (seconds since the epoch), `forked_by` the fork server's process id.
    """
    link = AgentChannel(env.channel_fd)
    try:
        _register_stack_dumps(env.stacks_fd)
        _run_stages(env, argv, started, forked_by, link)
    except AgentDisconnected:
        pass
    except BaseException:
        # A bug of ours; to leave it to Python's own end would mean to wait in JAX's exit barrier.
        traceback.print_exc()
    shutdown.exit_now(EXIT_SOFTWARE)


def _run_stages(env: WorkerEnv, argv: list[str], started: float, forked_by: int, link: AgentChannel) -> NoReturn:
    stage = "start"
    try:
        _apply_host_settings(env)
        _import_jax(env)
        link.send(hello.build_hello(env, argv, os.environ, started))
        stage = "join"
        from jaxrun_runtime import join

        order = link.receive(StartCoordinator, Join)
        _die_with_agent(link, forked_by)
        joined = join.join(env, link, order)
        stage = "prove"
        link.send(join.report_devices(env, joined))
        _install_lockstep(env, link)
        link.receive(Run)
        failure_report.report_thread_failures(link, env.rank)
        stage = "program"
        program.run(argv)
    except AgentDisconnected:
        raise
    except BaseException as error:
        _handle_error(env, link, stage, error)
    with contextlib.suppress(KeyboardInterrupt):
        shutdown.exit_with_success(env, link)
    shutdown.exit_now(failure_report.EXIT_INTERRUPTED)


def _handle_error(env: WorkerEnv, link: AgentChannel, stage: str, error: BaseException) -> None:
    """End the worker, unless the error is a sys.exit with success."""
    if isinstance(error, DivergenceError):
        from jaxrun_runtime.lockstep import call_sites

        call_sites.trim_to_user_frames(error)
    words = failure_report.describe_failure(error, env.rank, stage)
    # The launcher shows the words and logs them; what the program wants to print itself, it still prints.
    if sys.excepthook is not sys.__excepthook__ or isinstance(error, SystemExit) or not link.in_owner_process():
        failure_report.print_error(error)
    if words.status:
        shutdown.exit_with_failure(env, words, link)


def _apply_host_settings(env: WorkerEnv) -> None:
    if env.cpus:
        os.sched_setaffinity(0, env.cpus)
    if not env.simulated_boot_id:
        return
    try:
        linux.become_simulated_host(env.host, env.simulated_boot_id)
    except OSError as error:
        _warn(
            env,
            f"the simulated hosts share this machine's boot id, because it forbids namespaces ({error}); "
            "what JAX does differently across hosts will not be seen",
        )


def _import_jax(env: WorkerEnv) -> None:
    """Import jax if that has not been done before a fork."""
    from jaxrun_runtime import jax_private

    if "jax" not in sys.modules:
        gc.disable()  # 60 ms less for the import
        import jax  # noqa: F401

        gc.freeze()  # nor does anybody need to look through it again
        gc.enable()
    for line in jax_private.missing_features(env.lockstep):
        _warn(env, line)


def _install_lockstep(env: WorkerEnv, link: AgentChannel) -> None:
    """While the others prove themselves."""
    if env.lockstep != LOCKSTEP_OFF:
        from jaxrun_runtime.lockstep import call_recorder

        call_recorder.install(env, link)


def _warn(env: WorkerEnv, text: str) -> None:
    if env.rank == 0:  # it is the same on all
        print(f"jaxrun: {text}", file=sys.stderr)


def _die_with_agent(link: AgentChannel, forked_by: int) -> None:
    """End when the agent ends. To be called when all workers exist."""
    # The fork server leaves now, and its end must not count as the parent's.
    while os.getppid() == forked_by and not link.is_agent_gone():
        time.sleep(_POLL_INTERVAL_S)
    linux.die_with_parent()
    if link.is_agent_gone():
        raise AgentDisconnected


def _register_stack_dumps(fd: int) -> None:
    """Write all threads' stacks to `fd` at a fatal signal or STACKS_SIGNAL, even while C++ holds the GIL."""
    os.set_inheritable(fd, False)
    faulthandler.enable(fd, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, fd, all_threads=True)
