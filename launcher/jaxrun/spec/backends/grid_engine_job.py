"""Grid Engine's jobs: their batch scripts, what becomes of them, and how agents start within one.

Agents are started by `qrsh -inherit`, if the job's parallel environment lets a job start processes on its hosts
(control_slaves TRUE), else by ssh. Tried with Grid Engine 8.1.9:

    qdel, h_rt        SIGKILL to all processes of the job, on all hosts. With -notify all of them get SIGUSR2 before,
                      which ends ranks that do not handle it, so jaxrun stops a job by itself before its limit
    exit status 99    Grid Engine starts the job again, with the same number, unless it was deleted
    a qrsh is killed  Grid Engine ends the whole job
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import datetime

from msgspec.structs import replace

from jaxrun.errors import EXIT_PREEMPTED, EXIT_SIGNAL_BASE, EXIT_TIMEOUT, UnavailableError, UsageError
from jaxrun.spec.backends.batch_script import (
    END_S,
    BatchPhase,
    BatchState,
    Scheduler,
    batch_shape,
    check_qsub_args,
    check_seconds,
    format_clock,
    has_option,
    qsub_script,
    run_command,
    with_save_time,
)
from jaxrun.spec.backends.mpi_hosts import parse_host_list
from jaxrun.spec.engines.grid_engine import GRID_ENGINE as ENGINE
from jaxrun.spec.engines.ssh import SSH, StarterCommand, find_ssh, plan_starter
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import Plan
from jaxrun.spec.job.rank_placement import UNPLACED
from jaxrun.terminal import print_notice

EXIT_AGAIN = 99  # Grid Engine starts a job again that ends with it
_ACCOUNTING_S, _ACCOUNTING_POLL_S = 30.0, 1.0  # Grid Engine writes how a job has ended up to 15 s later
_OVER_LIMIT = 37  # in the accounting: "qmaster enforced h_rt, h_cpu, or h_vmem limit"
_INTERACTIVE = ("QRSH", "QLOGIN", "QRLOGIN", "QSH", "INTERACTIVE")  # values of JOB_SCRIPT
# Options of qsub that jaxrun must know itself, with the option of jaxrun to use instead.
_JAXRUN_OPTION = {"-pe": "--pe", "-q": "--queue", "-P": "--account"}
_LONGEST_NAME = 128


# ---- agents


def plan(job: Job, environ: Mapping[str, str], job_id: str) -> Plan:
    """Plan one agent on each host of the job of Grid Engine. Raises UsageError outside of a job."""
    if not job.host_list and not job.hostfile:
        raise UsageError(_no_job_message(job, environ))
    number, slots = environ.get("JOB_ID", ""), ENGINE.slots(environ)
    if job.cpus_per_process and slots and job.host_list == slots:
        job = replace(job, host_list=_room_for_ranks(slots, job.cpus_per_process))
    planned = plan_starter(with_save_time(job), environ, job_id, UNPLACED, _starter(environ, slots))
    task = environ.get("SGE_TASK_ID", "undefined")
    requeue_id = f"sge {environ.get('SGE_ROOT', '')} {environ.get('SGE_CELL', '')} {number}"
    requeue_id += "" if task == "undefined" else f".{task}"
    return replace(planned, requeue_id=requeue_id) if job.requeue else planned


def _starter(environ: Mapping[str, str], slots: str) -> StarterCommand:
    """Choose between qrsh and ssh; the title says which, and why. Raises UnavailableError if there is neither."""
    number, qrsh, name = (
        environ.get("JOB_ID", ""),
        shutil.which("qrsh", path=environ.get("PATH")),
        environ.get("PE", ""),
    )
    if not slots:
        why = "outside of Grid Engine"
    elif qrsh is None:
        why = "qrsh is not on PATH"
    elif not _controls_tasks(name, environ):
        why = f"the parallel environment {name} has control_slaves FALSE"
    else:
        here = parse_host_list(slots)[0].name
        return StarterCommand(ENGINE, f"qrsh in Grid Engine's job {number}", ("--qrsh", qrsh, "--here", here))
    return StarterCommand(SSH, f"ssh ({why})", ("--ssh", find_ssh(environ)))


def _controls_tasks(name: str, environ: Mapping[str, str]) -> bool:
    """Whether qrsh -inherit may start processes in this parallel environment, as far as anybody may know."""
    done = run_command(["qconf", "-sp", name], environ)
    return done is None or done.returncode != 0 or not re.search(r"(?m)^control_slaves\s+FALSE", done.stdout)


def _room_for_ranks(slots: str, cpus: int) -> str:
    """Return how many ranks with so many slots each fit each host. Raises UsageError if none fits."""
    rooms = {host.name: (host.slots or 1) // cpus for host in parse_host_list(slots)}
    text = ",".join(f"{name}:{room}" for name, room in rooms.items() if room)
    if not text:
        raise UsageError(f"--cpus-per-process {cpus}, but no host of the job has so many slots: {slots}; lower it")
    return text


def _no_job_message(job: Job, environ: Mapping[str, str]) -> str:
    if "JOB_ID" in environ and "SGE_JOB_SPOOL_DIR" in environ:
        return (
            f"--backend sge needs the hosts of a parallel environment, and job {environ['JOB_ID']} was submitted "
            "without one: qsub -pe NAME SLOTS (qconf -spl lists the names)"
        )
    return (
        "--backend sge starts processes in a job of Grid Engine, but this shell is not in one: PE_HOSTFILE is not set. "
        "Add --submit --pe NAME before the program to submit the job and follow it, or --qsub job.sh to write a batch "
        "script; qconf -spl lists the names of parallel environments"
    )


# ---- batch scripts


def grid_engine_script(job: Job, directory: str, file: str) -> str:
    """Return the text of the script for `file`, which runs in `directory`."""
    check_qsub_args(job.qsub_args, _JAXRUN_OPTION)
    shape = batch_shape(job)
    limit = check_seconds(job)
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", job.tag or job.name)[:_LONGEST_NAME]
    lines = [
        f"-N {name if name[:1].isalpha() else f'j{name}'}",
        "-S /bin/bash",
        f"-pe {shlex.quote(job.parallel_environment)} {shape.tasks * (job.cpus_per_process or 1)}",
        *([f"-l h_rt={format_clock(limit)}"] if limit else []),
        *([f"-q {shlex.quote(job.queue)}"] if job.queue else []),
        *([f"-P {shlex.quote(job.account)}"] if job.account else []),
        f"-wd {shlex.quote(directory)}",
        *([] if has_option(job.qsub_args, ("-o",)) else ["-o jaxrun-$JOB_ID.out"]),
        "-j y",
        "-V",
        f"-r {'y' if job.requeue else 'n'}",
    ]
    return qsub_script(job, GRID_ENGINE, "#$", lines, directory, file)


def _output(text: str, number: str) -> str:
    """Return the path of the output file that a script asks for; empty if it is not known."""
    directory, files = re.search(r"(?m)^#\$ -wd (.*)$", text), re.findall(r"(?m)^#\$ -o (.*)$", text)
    if directory is None or not files:
        return ""
    file = shlex.split(files[-1])[0].replace("$JOB_ID", number)
    return "" if "$" in file or ":" in file else f"{shlex.split(directory[1])[0]}/{file}" if file[0] != "/" else file


# ---- what becomes of a job


def query(job: str, environ: Mapping[str, str]) -> BatchState | None:
    """Ask for the state of a job; None if Grid Engine does not answer.

    Raises UnavailableError if Grid Engine knows nothing of it.
    """
    done = run_command(["qstat", "-xml", "-s", "prs"], environ)
    if done is None or done.returncode:
        return None
    found = parse_queue(done.stdout, job)
    return found or _find_end(job, environ)


def _find_end(job: str, environ: Mapping[str, str]) -> BatchState | None:
    """Read from the accounting how a job has ended, once it is written there."""
    until = time.monotonic() + _ACCOUNTING_S
    while True:
        done = run_command(["qacct", "-j", job], environ)
        if done is not None and (found := parse_accounting(done.stdout)):
            return found
        if time.monotonic() >= until:
            raise UnavailableError(f"Grid Engine has no job {job}, and qacct -j {job} does not say how it ended")
        time.sleep(_ACCOUNTING_POLL_S)


def parse_queue(text: str, job: str) -> BatchState | None:
    """Parse the output of `qstat -xml`; None if the job is not in it."""
    from xml.etree import ElementTree

    with contextlib.suppress(ElementTree.ParseError):
        for each in ElementTree.fromstring(text).iter("job_list"):
            if each.findtext("JB_job_number") == job:
                state = each.findtext("state", "")
                running = each.get("state") == "running" and state.lstrip("R") in ("r", "t")
                return BatchState(
                    phase=BatchPhase.RUNNING if running else _PHASES.get(each.get("state", ""), BatchPhase.BETWEEN),
                    name=state,
                    reason=f"{state}; qstat -j {job} says why" if "E" in state else state,
                    nodes=each.findtext("queue_name", ""),
                    restarts=int("R" in state),
                )
    return None


_PHASES = {"pending": BatchPhase.PENDING}


def parse_accounting(text: str) -> BatchState | None:
    """Parse the output of `qacct -j`, of which the last record counts; None if there is none."""
    codes = re.findall(r"(?m)^exit_status\s+(\d+)", text)
    failures = re.findall(r"(?m)^failed\s+(\d+)\s*(?::\s*(.*\S))?", text)
    if not codes or not failures:
        return None
    number, words = int(failures[-1][0]), failures[-1][1]
    status = EXIT_TIMEOUT if number == _OVER_LIMIT else int(codes[-1]) or (EXIT_SIGNAL_BASE + 9 if number else 0)
    name = f"failed ({words})" if words else f"failed ({number})"
    return BatchState(phase=BatchPhase.OVER, name=name, exit_status=status, is_plain=number == 0)


def end_of_job(environ: Mapping[str, str], now: float) -> float | None:
    """When the job of `environ` must have ended, in seconds since the epoch; None without a limit."""
    job = environ.get("JOB_ID", "")
    shown, queue = (run_command(words, environ) for words in (["qstat", "-j", job], ["qstat", "-xml", "-s", "rs"]))
    limit = re.search(r"(?m)^hard resource_list:.*\bh_rt=(\d+)", shown.stdout) if shown is not None else None
    if limit is None or queue is None:
        return None
    started = re.search(
        rf"<JB_job_number>{re.escape(job)}</JB_job_number>.*?<JAT_start_time>([^<]+)<", queue.stdout, re.DOTALL
    )
    return datetime.fromisoformat(started[1]).timestamp() + int(limit[1]) - END_S if started else None


def run_requeued(environ: Mapping[str, str], run: Callable[[], int]) -> int:
    """Run the job, and end so that Grid Engine starts it again if it was preempted; returns the exit status."""
    number = environ.get("JOB_ID", "")
    if environ.get("JOB_SCRIPT", "") in _INTERACTIVE:
        raise UsageError(
            f"--requeue is for a batch job, which Grid Engine can start again, and job {number} is an interactive one; "
            "leave it out, or submit the job with --submit"
        )
    status = run()
    if status != EXIT_PREEMPTED:
        return status
    print_notice(f"Grid Engine will start job {number} again (exit status {EXIT_AGAIN}), unless it was deleted")
    return EXIT_AGAIN


GRID_ENGINE = Scheduler(
    title="Grid Engine",
    option="--qsub",
    suffix=".qsub",
    write=grid_engine_script,
    shares_env=lambda job: True,
    submit=("qsub", "-terse"),
    number=r"(?s).*?([0-9]+)",
    submission_env=lambda text, environ: dict(environ),
    query=query,
    output=_output,
    cancel="qdel",
    ends_at=end_of_job,
    run_requeued=run_requeued,
)
