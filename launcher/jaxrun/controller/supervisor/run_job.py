"""Entry into the supervisor: prepares a planned job, and first starts the part that takes longest.

That is importing jax, so the fork server, which imports it, is started before the rest of the launcher is imported.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.controller.supervisor.job_terminal import resolve_stdin
from jaxrun.controller.supervisor.sidecars import check_live, listen_for_metrics, serve_metrics, start_screen
from jaxrun.errors import UnavailableError, UsageError
from jaxrun.node.agent.guard import Guard, job_marker
from jaxrun.node.forkserver import prestart
from jaxrun.node.forkserver.prestart import PrestartedServer
from jaxrun.protocol.addresses import loopback_address
from jaxrun.protocol.settings import CACHE_OFF
from jaxrun.records.rundir import rundir
from jaxrun.spec.job.plan import Plan
from jaxrun.terminal import print_notice

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.attempts import AttemptRunner
    from jaxrun.controller.supervisor.earlier_head import BegunJob
    from jaxrun.controller.supervisor.job_history import JobHistory
    from jaxrun.controller.supervisor.launcher_staging import Staged
    from jaxrun.controller.supervisor.remote_job import Endpoint
    from jaxrun.controller.supervisor.supervision import Supervision
    from jaxrun.node.channel.event_loop import EventLoop
    from jaxrun.node.forkserver.client import ForkServer
    from jaxrun.records.output.screen import HeldScreen


def run(
    plan: Plan,
    environ: Mapping[str, str],
    prestarted: PrestartedServer | None = None,
    endpoint: Endpoint | None = None,
) -> int:
    """Run the job to its end; returns the exit status of `jaxrun`. `endpoint` is where remote agents connect."""
    started = time.time()
    if plan.job.live:
        check_live()
    plan = replace(plan, job=resolve_stdin(plan.job, plan.launch_command), ends_at=_find_end(plan, environ, started))
    check_limits(plan)
    begun = (
        _begin_here(plan, environ, started, prestarted) if plan.reports else _begin_on_hosts(plan, started, endpoint)
    )
    if isinstance(begun, int):
        return begun
    from jaxrun.controller.supervisor.attempts import supervise, supervision

    with supervision(
        begun.plan, environ, begun.directory, begun.guard, begun.history, begun.loop, begun.held
    ) as shared:
        return supervise(begun.plan, shared, begun.runner(shared))


class BegunRun(Struct, frozen=True):
    """What a job has before its first attempt.

    held:    the screen, if another process has it
    runner:  makes what runs the attempts
    """

    plan: Plan
    directory: rundir.RunDir
    history: JobHistory
    guard: Guard
    loop: EventLoop
    held: HeldScreen | None
    runner: Callable[[Supervision], AttemptRunner]


def _begin_here(
    plan: Plan, environ: Mapping[str, str], started: float, prestarted: PrestartedServer | None
) -> BegunRun:
    """Begin a job whose agents are in this process."""
    address = loopback_address()  # if there is none, nothing is created
    staged = _stage(plan)
    _check_compile_cache(plan, environ)
    listener = listen_for_metrics(plan.job)
    directory = _open_run_dir(plan)
    held = _start_sidecars(plan, directory, listener)
    guard = Guard(job_marker(plan.job_id), job_id=plan.job_id)  # forks, so it comes before any thread
    fork_server = _start_fork_server(plan, environ, prestarted, staged)

    from jaxrun.clock import Clock
    from jaxrun.controller.supervisor.job_history import JobHistory
    from jaxrun.controller.supervisor.local_job import LocalJob
    from jaxrun.node.channel.event_loop import EventLoop

    def runner(shared: Supervision) -> AttemptRunner:
        return LocalJob(shared, plan, address, fork_server, staged)

    return BegunRun(plan, directory, JobHistory(started, started), guard, EventLoop(Clock()), held, runner)


def _begin_on_hosts(plan: Plan, started: float, endpoint: Endpoint | None) -> BegunRun | int:
    """Begin a job whose agents connect, or continue one; returns the exit status of a job that has ended meanwhile."""
    from jaxrun.node.channel.host_addresses import list_addresses, select_addresses

    # An --interface that this host lacks is refused before anything is created.
    addresses = select_addresses(list_addresses(), plan.job.interface)
    staged = _stage(plan)  # by threads, which have ended when a process forks
    from jaxrun.clock import Clock
    from jaxrun.controller.supervisor.earlier_head import EndedEarlyError, begin_or_continue
    from jaxrun.controller.supervisor.remote_job import HeadPort, RemoteJob
    from jaxrun.node.channel.event_loop import EventLoop

    listener = listen_for_metrics(plan.job)
    loop = EventLoop(Clock())
    port = HeadPort.open(loop, plan.job.interface, addresses, endpoint, expected=len(plan.placement.agents))
    try:
        begun = begin_or_continue(plan, port, loop, started)
        of_job, directory, history = _open_job_dir(begun)
        held = _start_sidecars(of_job, directory, listener)
        sigterm = of_job.launch_command is None or of_job.launch_command.sigterm_at_start
        # For no agent: each has a guard of its own.
        guard = Guard(launch_mark=job_marker(of_job.job_id), sigterm=sigterm)
        if endpoint is not None:
            endpoint.on_listening()
    except EndedEarlyError as end:
        port.close()
        return end.status
    except BaseException:
        port.close()
        raise

    def runner(shared: Supervision) -> AttemptRunner:
        return RemoteJob(shared, of_job, port, staged, begun.agents)

    return BegunRun(of_job, directory, history, guard, loop, held, runner)


def _stage(plan: Plan) -> Staged | None:
    """Copy what --stage names to this host; None without it."""
    if not plan.job.stage:
        return None
    from jaxrun.controller.supervisor.launcher_staging import stage_directories

    return stage_directories(plan.job)


def _start_fork_server(
    plan: Plan, environ: Mapping[str, str], prestarted: PrestartedServer | None, staged: Staged | None
) -> ForkServer | None:
    """Start the process that imports jax for the workers of this machine, if they are forked."""
    argv: tuple[str, ...] = plan.argv
    of_ranks: Mapping[str, str] = plan.base_env(environ)
    if plan.device_names or staged is not None:
        from jaxrun.node.agent.spawn import WorkerSetup, with_own_variables

        setup = WorkerSetup(argv, with_own_variables(of_ranks), ())
        setup = setup if staged is None else staged.start_from_copies(setup)
        argv, of_ranks = setup.argv, setup.environ
    fork_server = prestart.server_for(argv, of_ranks, prestarted, fork=plan.fork)
    if fork_server is not None:
        prestart.preload(fork_server, plan.job.preload, argv, torch_env=plan.job.torch_env)
    return fork_server


def _open_job_dir(begun: BegunJob) -> tuple[Plan, rundir.RunDir, JobHistory]:
    """Return the plan of the next attempt, the run directory, and the attempts so far.

    A job that continues has its own run directory, where it is still there.
    """
    plan, record = begun.plan, begun.record
    if record is None:
        return _continue_in_run_dir(plan, begun.history)
    from jaxrun.job_events.events import AttemptEnded
    from jaxrun.records.event_log.event_log import LoggedEvent
    from jaxrun.records.rundir.recorded_files import continue_job, read_plan

    path = Path(record.run_dir) if record.run_dir else None
    if path is not None and read_plan(path).job_id == record.job_id:
        directory, attempt, _ = continue_job(path)
        if _may_be_contested(plan):
            directory.claim()  # its agents have left an earlier head that may still have it
        lost = begun.history.verdicts[-1]
        end = AttemptEnded(lost.outcome, lost.exit_code, lost.headline, lost.log)
        directory.record(LoggedEvent(time.time(), end, lost.attempt))
        plan = replace(plan, attempt=max(attempt, plan.attempt))
    else:
        continued, directory, _ = _continue_in_run_dir(plan, begun.history, agents_wait=True)
        plan = replace(plan, attempt=max(continued.attempt, plan.attempt))
    return plan, directory, begun.history


def _start_sidecars(plan: Plan, directory: rundir.RunDir, listener: socket.socket | None) -> HeldScreen | None:
    """Start the frontends that the job asks for; returns the screen, held by another process, with --live."""
    if listener is not None:
        print_notice(f"metrics at {serve_metrics(listener, directory)}")
    return start_screen(directory) if plan.job.live else None


def _find_end(plan: Plan, environ: Mapping[str, str], now: float) -> float | None:
    """Return when a scheduler ends the job, if --save-time needs that. Raises UsageError if less time is left."""
    save_time = plan.job.save_time
    if save_time is None:
        return None
    from jaxrun.spec.engines.lookup import end_of_allocation

    ends_at = end_of_allocation(environ, now)
    if ends_at is not None and ends_at - save_time <= now:
        left = max(0.0, ends_at - now)
        raise UsageError(
            f"--save-time {save_time:g} is more than the {left:.0f} s that the scheduler leaves this job; ask for more "
            "--time"
        )
    return ends_at


def _check_compile_cache(plan: Plan, environ: Mapping[str, str]) -> None:
    """Raise UsageError if this host cannot keep compiled programs in the directory of --compile-cache."""
    if plan.job.compile_cache == CACHE_OFF:
        return
    from jaxrun.files.compiled_programs import cache_directory, make_cache_directory

    directory = cache_directory(plan.job.compile_cache, environ)
    try:
        make_cache_directory(directory)
    except OSError as error:
        raise UsageError(f"--compile-cache cannot use {directory}: {error.strerror}; name another directory") from None


def _open_run_dir(plan: Plan) -> rundir.RunDir:
    job = plan.job
    if job.no_run_dir:
        return rundir.RunDir(None)
    directory = rundir.create(job.run_dir, base=Path.cwd(), name=job.name, now=datetime.now())
    if _may_be_contested(plan):
        directory.claim()
    return directory


def _continue_in_run_dir(
    plan: Plan, history: JobHistory, *, agents_wait: bool = False
) -> tuple[Plan, rundir.RunDir, JobHistory]:
    """Return the plan of the next attempt, the run directory, and the attempts so far of a job that may continue there.

    It does if an earlier launcher began it: in Slurm with --requeue, and in a new pod with --run-dir in a volume that
    outlives pods.

    history:      of a job that begins
    agents_wait:  agents have left an earlier head, which may still have the directory, and wait for this one

    Raises UnavailableError while that job runs, and UsageError if it ends well meanwhile.
    """
    if not plan.requeue_id:
        return plan, _open_run_dir(plan), history
    from jaxrun.controller.supervisor.job_history import JobHistory
    from jaxrun.records.rundir.recorded_files import continue_job, find_requeued

    path = find_requeued(plan.job.run_dir, Path.cwd(), plan.requeue_id, plan.job.program)
    if path is None:
        return plan, _open_run_dir(plan), history
    if _may_be_contested(plan) and agents_wait:
        directory, attempt, earlier = continue_job(path, claim=rundir.RunDir.claim)
    elif _may_be_contested(plan):
        wait = partial(_wait_until_unused, path, plan.job.init_timeout)
        directory, attempt, earlier = continue_job(path, claim=wait)
    else:  # Slurm runs a job once; a lock of a node that is lost might outlive it
        directory, attempt, earlier = continue_job(path)
    reason = earlier[-1].headline.partition("\n")[0] if earlier else "its launcher was killed"
    print_notice(f"the job in {path} continues with attempt {attempt}: {reason}")
    plan = replace(plan, attempt=attempt, restart_reason=reason)
    return plan, directory, JobHistory.of_verdicts(history.started, earlier)


def _may_be_contested(plan: Plan) -> bool:
    """Whether two launchers may want to continue the same job: pods that have the same token and the same claim."""
    return bool(plan.requeue_id) and plan.is_started_by_hand


def _wait_until_unused(path: Path, timeout: float, directory: rundir.RunDir) -> None:
    """Wait until no other process has the directory.

    Raises UnavailableError after `timeout` seconds, and UsageError if the job in it has ended well meanwhile.
    """
    from jaxrun.records.rundir.recorded_files import has_ended_well, read_plan

    until, is_said = time.monotonic() + timeout, False
    while not directory.claim():
        launcher = read_plan(path).launcher
        text = f"the job in {path} runs: process {launcher.pid} on {launcher.host} has the directory"
        if time.monotonic() >= until:
            raise UnavailableError(f"{text}; end that one, or name another --run-dir")
        if not is_said:
            print_notice(f"{text}; waiting until it has ended")
        is_said = True
        time.sleep(_CLAIM_POLL_S)
    if has_ended_well(path):
        raise UsageError(f"the job in {path} has ended well meanwhile; name another --run-dir to run it again")


_CLAIM_POLL_S = 0.2  # the lock goes with its process, and no event says so
_FILES_PER_WORKER = 12  # two pipes, a channel, stacks and two logs, and twice the first while it is being started
_FILES_PER_RUNNING_WORKER = 7  # the minimum
_FILES_PER_AGENT = 3  # a connection, and two logs if its host cannot write them
_FILES_PER_CONNECTION = 1
_FILES_OF_LAUNCHER = 64
_THREADS_PER_WORKER = 4  # at least: the main thread, and those of gRPC and XLA
_SYSTEM_LIMITS = ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max")


def check_limits(plan: Plan) -> None:
    """Let this process open as many files as the job needs. Raises UsageError if a limit forbids the job."""
    count = len(plan.workers)
    if plan.launch_command is not None:
        _raise_open_file_limit(f"{count} agents take", count * _FILES_PER_AGENT, count * _FILES_PER_CONNECTION)
        return
    _check_threads(count)
    _raise_open_file_limit(f"-n {count} takes", count * _FILES_PER_WORKER, count * _FILES_PER_RUNNING_WORKER)


def _check_threads(count: int) -> None:
    needed = count * _THREADS_PER_WORKER
    with contextlib.suppress(OSError, ValueError):
        allowed = min(int(Path(name).read_text()) for name in _SYSTEM_LIMITS)
        if needed > allowed:
            raise UsageError(
                f"-n {count} takes {needed} threads at least, but this machine runs no more than {allowed}; "
                "-n is the number of processes: start fewer"
            )


def _raise_open_file_limit(what: str, wanted: int, needed: int) -> None:
    """Raise the soft limit to what `wanted` files take, as far as the hard limit allows; that must allow `needed`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least, most = _FILES_OF_LAUNCHER + needed, _FILES_OF_LAUNCHER + wanted
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    if hard != resource.RLIM_INFINITY and hard < least:
        raise UsageError(
            f"{what} {least} open files at least, but only {hard} are allowed here; start fewer, or raise the limit: "
            "ulimit -Hn, or /etc/security/limits.conf"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
