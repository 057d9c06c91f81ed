"""One worker from its first message to its exit status, in stages: start, join, prove, program, shutdown."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import time
import traceback
from collections.abc import Set
from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from jaxrun.errors import EXIT_SOFTWARE
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.flight_file import LOCKSTEP_OFF
from jaxrun.protocol.settings import CACHE_OFF, COMPILE_EACH, MAKE_MESH_JAXRUN
from jaxrun.protocol.worker_messages import Interrupted, Join, RankSecret, Run, StartCoordinator, WorkerStage
from jaxrun_runtime import (
    callback_errors,
    checkpoints,
    children,
    coordination_waits,
    coordinator_tls,
    debugger,
    debugpy_link,
    dump_files,
    exit_handlers,
    failure_report,
    future_errors,
    interrupts,
    jax_private,
    join,
    joint_calls,
    linux,
    nccl_network,
    own_frames,
    pool_workers,
    preemption,
    profiles,
    run_program,
    shutdown,
    signal_handlers,
    stack_dumps,
    stopping,
    this_rank,
    unsupported,
)
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected
from jaxrun_runtime.exceptions import DivergenceError, SnapshotError, SpentOrderError
from jaxrun_runtime.gloo import gloo_connections

if TYPE_CHECKING:
    from jaxrun_runtime.forkserver.preload import Preloader

_FORK_SERVER_POLL_INTERVAL_S = 0.001  # while the fork server, this worker's first parent, exits


def run_worker(
    env: WorkerEnv, argv: list[str], started: float, forked_by: int = 0, preloader: Preloader | None = None
) -> NoReturn:
    """Run the program `argv` as the worker that `env` describes. Never returns.

    started:    when this process started, in seconds since the epoch
    forked_by:  the fork server's process id; 0 in a fresh interpreter
    preloader:  has imported packages for the program, in the fork server
    """
    interrupts.hold()
    channel = AgentChannel(env.channel_fd)
    try:
        linux.set_process_title(f"jaxrun rank {env.rank}", f"jaxrun rank {env.rank}: {run_program.short_name(argv)}")
        _run_stages(env, argv, started, forked_by, channel, preloader)
    except AgentDisconnected:
        pass
    except BaseException:
        # A bug in jaxrun. Python's own exit would wait in JAX's exit barrier.
        traceback.print_exc()
    shutdown.exit_now(EXIT_SOFTWARE)


def _run_stages(
    env: WorkerEnv,
    argv: list[str],
    started: float,
    forked_by: int,
    channel: AgentChannel,
    preloader: Preloader | None,
) -> NoReturn:
    stage = WorkerStage.START
    try:
        cores = os.sched_getaffinity(0)
        _apply_host_settings(env)
        stack_dumps.write_on_signal(env.stacks_fd)
        _import_jax(env)
        unsupported.check_unused()
        key = coordinator_tls.make_key(env)
        channel.send(join.build_hello(env, argv, os.environ, started, key))
        stage = WorkerStage.JOIN
        _die_with_agent(channel, forked_by)
        dump_files.keep_apart(env, os.environ)
        _keep_compiled_programs(env, cores)
        order = channel.receive(StartCoordinator, Join)
        if secret := channel.poll(RankSecret):
            env = replace(env, rank_token=secret.token)
        this_rank.keep(env, os.environ)
        if env.keep_survivors:
            from jaxrun_runtime import collective_abort

            jax_private.enable_recoverability()
            os.environ.update(collective_abort.variables_for_survivors(os.environ))
        joined = join.join(env, channel, order, key)
        stage = WorkerStage.PROVE
        debugpy_link.DebugpyLink(env, channel)
        devices = join.report_devices(env, joined)
        channel.send(devices)
        gloo = gloo_connections.open_before_first_use(env)
        if env.keep_survivors:
            from jaxrun_runtime import live_ranks

            live_ranks.connect(env, channel, gloo)
        _install_lockstep(env, channel)
        _allow_mesh_over_hosts(env)
        channel.receive(Run)
        _watch_program(env, channel)
        nccl_network.watch(env, devices.platform)
        stage = WorkerStage.PROGRAM
        interrupts.raise_in_program(lambda: _report_interrupt(env, channel), blocked=env.interrupts_blocked)
        _run_program(env, argv, preloader)
    except AgentDisconnected:
        raise
    except BaseException as error:
        _handle_error(env, channel, stage, error)
    try:
        shutdown.exit_with_success(env, channel)
    except KeyboardInterrupt as error:
        _handle_error(env, channel, stage, error)
    shutdown.exit_now(failure_report.EXIT_INTERRUPTED)


def _run_program(env: WorkerEnv, argv: list[str], preloader: Preloader | None) -> None:
    from jaxrun_runtime.env_watch import EnvWatch

    children.tell_children(env, os.environ)
    # If the program imports jax before everything else, it sets no variable before that import.
    is_imported = preloader is not None and preloader.imports_jax
    watch = EnvWatch(functools.partial(_warn, env), size=env.size, jax_is_imported=is_imported)
    watch.start()
    if preloader is not None:
        preloader.begin_program()
    try:
        run_program.run(_own_words(env, argv))
    finally:
        watch.stop()
        if env.lockstep != LOCKSTEP_OFF:
            from jaxrun_runtime.lockstep import call_recorder

            call_recorder.end_profile()


def _own_words(env: WorkerEnv, argv: list[str]) -> list[str]:
    """Return the program and its arguments, in which --expand-args replaces placeholders."""
    if not env.expand_args:
        return argv
    from jaxrun.protocol.placeholders import fill_in

    first = run_program.count_own_words(argv)
    return [*argv[:first], *fill_in(argv[first:], env)]


def _report_interrupt(env: WorkerEnv, channel: AgentChannel) -> None:
    with contextlib.suppress(AgentDisconnected):
        channel.send(Interrupted(env.rank, time.time()))


def _handle_error(env: WorkerEnv, channel: AgentChannel, stage: WorkerStage, error: BaseException) -> None:
    """Report the error and exit, unless it is a sys.exit with status 0."""
    if not isinstance(error, SystemExit) or run_program.exit_status(error):
        interrupts.deactivate()
    if isinstance(error, (DivergenceError, SnapshotError, SpentOrderError, unsupported.ExecError)):
        from jaxrun_runtime.lockstep import call_sites

        call_sites.trim_to_user_frames(error)
    elif interrupt := interrupts.find_in_chain(error):
        from jaxrun_runtime.lockstep import call_sites

        call_sites.trim_internal_frames(interrupt)  # the frames of a library that was interrupted stay
    debugger.trim_debugger_frames(error)
    failure = failure_report.describe_failure(error, env.rank, stage)
    # The launcher shows and logs the failure. The program prints it, too, where plain Python would print differently.
    if sys.excepthook is not sys.__excepthook__ or isinstance(error, SystemExit) or not channel.in_owner_process():
        failure_report.print_error(error)
    if env.pdb and stage == "program" and debugger.can_debug(error):
        waiting = replace(failure, waits_for_debugger=True)
        shutdown.exit_with_failure(env, waiting, channel, lambda: debugger.post_mortem(error, channel))
    if env.debug_post_mortem and stage == "program" and debugger.can_debug(error):
        waiting = replace(failure, waits_for_debugger=True)
        shutdown.exit_with_failure(env, waiting, channel, lambda: debugpy_link.show_error(error, channel, env.rank))
    if failure.status:
        shutdown.exit_with_failure(env, failure, channel)


def _apply_host_settings(env: WorkerEnv) -> None:
    """Bind the process to its cores, and give it the identity of its simulated host."""
    if cores := os.sched_getaffinity(0) & set(env.cpus):  # --wrap numactl may have left some of them out
        os.sched_setaffinity(0, cores)
    if not env.simulated_boot_id:
        return
    try:
        linux.become_simulated_host(env.host, env.simulated_boot_id)
    except OSError as error:
        _warn(
            env,
            f"the simulated hosts share this machine's boot id, because it forbids namespaces ({error}); "
            "JAX will treat them as one host",
        )


def _import_jax(env: WorkerEnv) -> None:
    """Import jax, unless the fork server has imported it, and warn about features that it lacks."""
    if "jax" not in sys.modules:
        gc.disable()  # saves 60 ms of the import
        import jax  # noqa: F401

        gc.freeze()  # later collections need not look through jax's modules
        gc.enable()
    for line in jax_private.missing_features(env.lockstep):
        _warn(env, line)


def _keep_compiled_programs(env: WorkerEnv, cores: Set[int]) -> None:
    if env.compile_cache != CACHE_OFF:
        from jaxrun_runtime.compile_cache import set_up

        set_up.set_up(env, functools.partial(_warn, env))
    if env.compile != COMPILE_EACH:
        from jaxrun_runtime.compile_cache import compile_once

        compile_once.set_up(env, cores, functools.partial(_warn, env))


def _install_lockstep(env: WorkerEnv, channel: AgentChannel) -> None:
    """Install the lockstep hooks, while other workers still start JAX's backend."""
    if env.lockstep != LOCKSTEP_OFF:
        from jaxrun_runtime.lockstep import call_recorder

        call_recorder.install(env, channel)
    else:
        joint_calls.record(env)


def _allow_mesh_over_hosts(env: WorkerEnv) -> None:
    if env.make_mesh == MAKE_MESH_JAXRUN and env.local_size < env.size:
        from jaxrun_runtime import make_mesh

        is_first = env.attempt == 1  # later attempts have been told
        make_mesh.allow_several_hosts(functools.partial(_warn, env) if is_first else lambda text: None)


def _watch_program(env: WorkerEnv, channel: AgentChannel) -> None:
    """Watch the program's threads, exit handlers, signal handlers, forks, debuggers, checkpoints and waits."""
    coordination_waits.watch()
    callback_errors.shorten_log()
    failure_report.report_thread_failures(channel, env.rank)
    pool_workers.report_deaths(channel, env.rank)
    future_errors.watch()
    exit_handlers.name_native_handlers()
    signal_handlers.watch_forks()
    signal_handlers.report_signal_handlers(channel, env.rank)
    debugger.relay_debuggers(channel, env.rank)
    stopping.connect(env, channel)
    preemption.watch(env, channel)
    checkpoints.connect(env, channel)
    unsupported.explain(env, channel)
    own_frames.hide()
    profiles.keep_apart(env)


def _warn(env: WorkerEnv, text: str) -> None:
    if env.rank == 0:  # all ranks have the same warnings
        print(f"jaxrun: {text}", file=sys.stderr)


def _die_with_agent(channel: AgentChannel, forked_by: int) -> None:
    """Make the kernel kill this worker when its agent dies.

    The fork server exits as soon as it has forked all workers. Only then is the agent this worker's parent.
    """
    while forked_by and os.getppid() == forked_by and not channel.is_agent_gone():
        time.sleep(_FORK_SERVER_POLL_INTERVAL_S)
    # With --wrap the parent is a wrapper. It may start its child in a thread that ends, and the kernel would take the
    # end of that thread for the death of the parent.
    if os.getppid() == channel.agent_pid != 0:
        linux.die_with_parent()
    if channel.is_agent_gone():
        raise AgentDisconnected
