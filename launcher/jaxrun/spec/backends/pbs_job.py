"""Jobs of OpenPBS and PBS Professional: their batch scripts, what becomes of them, and how agents start within one.

Agents are started by the site's mpiexec or mpirun, by pbsdsh, or by ssh: the first that is there. Made from PBS's
manual pages, and tried with stand-ins for its commands only:

    qsub -r y         PBS may start the job again, with the same number, after the loss of a host or a preemption
    qrerun            makes PBS start a job again; by default only its operators may
    walltime, qdel    SIGTERM to all processes of the job; SIGKILL after the server's kill_delay, 10 s by default
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from itertools import groupby

from msgspec.structs import replace

from jaxrun.errors import (
    EXIT_PREEMPTED,
    EXIT_SIGNAL_BASE,
    EXIT_UNAVAILABLE,
    UnavailableError,
    UsageError,
)
from jaxrun.protocol.agent_id import AgentId
from jaxrun.spec.backends import mpirun
from jaxrun.spec.backends.batch_script import (
    END_S,
    BatchPhase,
    BatchShape,
    BatchState,
    Scheduler,
    batch_shape,
    check_qsub_args,
    check_seconds,
    format_clock,
    qsub_script,
    run_command,
    with_save_time,
)
from jaxrun.spec.backends.mpi_hosts import named_hosts, place_on_hosts
from jaxrun.spec.backends.remote_plan import plan_remote
from jaxrun.spec.engines.grid_engine import read_lines
from jaxrun.spec.engines.pals import PALS
from jaxrun.spec.engines.pbs import NODEFILE
from jaxrun.spec.engines.pbs import PBS as ENGINE
from jaxrun.spec.engines.ssh import SSH, StarterCommand, find_ssh, plan_starter
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import AGENT_ARGV, LaunchCommand, Plan
from jaxrun.spec.job.rank_placement import UNPLACED
from jaxrun.terminal import print_notice

# Options of qsub that jaxrun must know itself, with the option of jaxrun to use instead.
_JAXRUN_OPTION = {"-q": "--queue", "-A": "--account", "-r": "--requeue"}
# Resources by which users choose chunks themselves, as sites demand it.
_CHUNKS = re.compile(r"(^|,)(select|nodes|ncpus|ngpus|mpiprocs)=")
_LONGEST_NAME = 230
_TASKS = "jaxrun.node.pbsdsh"
_OUT_OF_TIME = "walltime"


# ---- agents


def plan(job: Job, environ: Mapping[str, str], job_id: str) -> Plan:
    """Plan the agents of a PBS job. Raises UsageError outside of a job, UnavailableError if nothing can start them."""
    if not job.host_list and not job.hostfile:
        raise UsageError(
            f"--backend pbs starts processes in a PBS job, but this shell is not in one: {NODEFILE} is not set. Add "
            "--submit before the program to submit the job and follow it, or --qsub job.sh to write a batch script; or "
            f"begin with: qsub -I {' '.join(_requests(job, batch_shape(job)))}"
        )
    planned = _plan_agents(with_save_time(job), environ, job_id)
    return replace(planned, requeue_id=f"pbs {environ.get('PBS_JOBID', '')}") if job.requeue else planned


def _plan_agents(job: Job, environ: Mapping[str, str], job_id: str) -> Plan:
    """Plan the agents by the first command that is there; the title of the plan's command says which."""
    path = environ.get("PATH")
    mpiexec = shutil.which("mpiexec", path=path)
    if not job.mpirun and mpiexec and "/pals/" in os.path.realpath(mpiexec):
        return _plan_pals(job, environ, job_id, mpiexec)
    if job.mpirun or shutil.which("mpirun", path=path):
        return mpirun.plan(job, environ, job_id)
    pbsdsh = shutil.which("pbsdsh", path=path)
    if pbsdsh and environ.get(NODEFILE):
        return _plan_pbsdsh(job, environ, job_id, pbsdsh)
    if shutil.which("ssh", path=path):
        starter = StarterCommand(SSH, "ssh (neither mpirun nor pbsdsh is on PATH)", ("--ssh", find_ssh(environ)))
        return plan_starter(job, environ, job_id, UNPLACED, starter)
    raise UnavailableError(
        f"--backend pbs needs mpiexec, mpirun, pbsdsh or ssh, and none is on PATH ({path}); load an MPI: module avail"
    )


def _plan_pals(job: Job, environ: Mapping[str, str], job_id: str, mpiexec: str) -> Plan:
    """Plan an agent for each rank, by the mpiexec of PALS."""
    hosts = place_on_hosts(job, named_hosts(job), None)
    words = ("--line-buffer", "--envall", "--cpu-bind", "none", "-n", str(len(hosts)), "--hosts", ",".join(hosts))
    command = LaunchCommand(
        engine=PALS,
        title="mpiexec of PALS",
        argv=(mpiexec, *words, *job.mpi_args, *AGENT_ARGV),
        agent_hosts=hosts,
        size=len(hosts),
    )
    return plan_remote(job, environ, job_id, command, hosts)


def _plan_pbsdsh(job: Job, environ: Mapping[str, str], job_id: str, pbsdsh: str) -> Plan:
    """Plan one agent on each host, by one pbsdsh for each (node/pbsdsh)."""
    hosts = place_on_hosts(job, named_hosts(job), None)
    lines = [line.strip() for line in read_lines(NODEFILE, environ[NODEFILE])]
    ranks_of = {host: [rank for rank, _ in group] for host, group in groupby(enumerate(hosts), lambda pair: pair[1])}
    if unknown := [host for host in ranks_of if host not in lines]:
        raise UsageError(f"{unknown[0]} is not a host of this PBS job; its hosts are {', '.join(dict.fromkeys(lines))}")
    words = [f"{lines.index(host)}={ranks[0]}-{ranks[-1]}" for host, ranks in ranks_of.items()]
    command = LaunchCommand(
        engine=ENGINE,
        title="pbsdsh",
        argv=(sys.executable, "-m", _TASKS, pbsdsh, str(len(hosts)), *words, "--", *AGENT_ARGV),
        agent_hosts=hosts,
        size=len(hosts),
        agents={AgentId(ranks[0]): tuple(ranks) for ranks in ranks_of.values()},
    )
    return plan_remote(job, environ, job_id, command, hosts)


# ---- batch scripts


def pbs_script(job: Job, directory: str, file: str) -> str:
    """Return the text of the script for `file`, which runs in `directory`."""
    check_qsub_args(job.qsub_args, _JAXRUN_OPTION)
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", job.tag or job.name)[:_LONGEST_NAME]
    lines = [
        f"-N {name if name[:1].isalpha() else f'j{name}'}",
        *_requests(job, batch_shape(job)),
        "-j oe",
        "-V",
        f"-r {'y' if job.requeue else 'n'}",
    ]
    output = f"exec >>{shlex.quote(f'{directory}/jaxrun-')}${{PBS_JOBID%%.*}}.out 2>&1"
    return qsub_script(job, PBS, "#PBS", lines, directory, file, [output])


def _requests(job: Job, shape: BatchShape) -> list[str]:
    """Return the options of qsub that request resources."""
    limit = check_seconds(job)
    values = [word.removeprefix("-l") for word in job.qsub_args]
    chunks = [] if any(map(_CHUNKS.search, values)) else _chunks(job, shape)
    return [
        *chunks,
        *([f"-l walltime={format_clock(limit)}"] if limit else []),
        *([f"-q {shlex.quote(job.queue)}"] if job.queue else []),
        *([f"-A {shlex.quote(job.account)}"] if job.account else []),
    ]


def _chunks(job: Job, shape: BatchShape) -> list[str]:
    """Return a chunk for each host or, if the hosts do not matter, for each process."""
    each = (shape.each or 1) if shape.hosts else 1
    cpus, gpus = job.cpus_per_process or 1, job.gpus_per_host
    chunk = f"{shape.hosts or shape.tasks}:ncpus={each * cpus}:mpiprocs={each}"
    return [f"-l select={chunk}{f':ngpus={gpus}' if gpus else ''}", *(["-l place=scatter"] if shape.hosts else [])]


def _output(text: str, number: str) -> str:
    found = re.search(r"(?m)^exec >>(.+)\$\{PBS_JOBID%%\.\*\}\.out 2>&1$", text)
    return f"{shlex.split(found[1])[0]}{number.partition('.')[0]}.out" if found else ""


# ---- what becomes of a job


def query(job: str, environ: Mapping[str, str]) -> BatchState | None:
    """Ask for the state of a job; None if PBS does not answer. Raises UnavailableError if it does not know the job."""
    done = run_command(["qstat", "-x", "-f", job], environ)
    if done is not None and re.search(r"Unknown Job|Job has finished", done.stderr):
        raise UnavailableError(f"PBS does not know job {job}")
    return parse_job(done.stdout) if done is not None and done.returncode == 0 else None


def parse_attributes(text: str) -> dict[str, str]:
    """Parse the output of `qstat -f`, in which a tab continues a line."""
    lines = text.replace("\n\t", "").splitlines()
    return {name.strip(): value for line in lines for name, _, value in [line.partition(" = ")] if value}


def parse_job(text: str) -> BatchState | None:
    """Parse the output of `qstat -x -f`; None if it has no state."""
    values = parse_attributes(text)
    state, comment = values.get("job_state", ""), values.get("comment", "")
    if not state:
        return None
    phases = {"R": BatchPhase.RUNNING, "F": BatchPhase.OVER, "X": BatchPhase.OVER, "E": BatchPhase.BETWEEN}
    pending = {letter: BatchPhase.PENDING for letter in "QHWT"}
    code = int(values.get("Exit_status", "0"))
    return BatchState(
        phase=(phases | pending).get(state, BatchPhase.BETWEEN),
        name=f"{state} ({comment})" if comment else state,
        reason=comment or state,
        nodes=re.sub(r"/[0-9*]+|\*[0-9]+", "", values.get("exec_host", "")),
        restarts=max(0, int(values.get("run_count", "1")) - 1),
        # By the manual: a signal ended the job if it is 256 or more, and PBS could not run the job if it is negative.
        exit_status=EXIT_SIGNAL_BASE + code - 256 if code >= 256 else EXIT_UNAVAILABLE if code < 0 else code,
        is_plain=0 <= code < 256,
    )


def end_of_job(environ: Mapping[str, str], now: float) -> float | None:
    """When the job of `environ` must have ended, in seconds since the epoch; None without a limit."""
    job = environ.get("PBS_JOBID", "")
    done = run_command(["qstat", "-f", job], environ) if job else None
    values = parse_attributes(done.stdout) if done is not None else {}
    limit = re.fullmatch(r"(\d+):(\d+):(\d+)", values.get(f"Resource_List.{_OUT_OF_TIME}", ""))
    if limit is None or "stime" not in values:
        return None
    hours, minutes, seconds = map(int, limit.groups())
    try:
        started = time.mktime(time.strptime(values["stime"], "%a %b %d %H:%M:%S %Y"))
    except ValueError:
        return None
    return started + (hours * 60 + minutes) * 60 + seconds - END_S


def run_requeued(environ: Mapping[str, str], run: Callable[[], int]) -> int:
    """Run the job, and have PBS start it again if it was preempted; returns the exit status of `jaxrun`."""
    job = environ.get("PBS_JOBID", "")
    if environ.get("PBS_ENVIRONMENT") == "PBS_INTERACTIVE":
        raise UsageError(
            f"--requeue is for a batch job, which PBS can start again, and job {job} is an interactive one; leave it "
            "out, or submit the job with --submit"
        )
    status = run()
    if status == EXIT_PREEMPTED:
        done = run_command(["qrerun", job], environ)
        words = "qrerun is missing" if done is None else done.stderr.strip()
        refused = f"PBS does not start job {job} again ({words}); its operators can: qrerun {job}"
        is_accepted = done is not None and done.returncode == 0
        print_notice(f"PBS will start job {job} again" if is_accepted else refused)
    return status


PBS = Scheduler(
    title="PBS",
    option="--qsub",
    suffix=".qsub",
    write=pbs_script,
    shares_env=lambda job: True,
    submit=("qsub",),
    number=r"(\S+)",
    submission_env=lambda text, environ: dict(environ),
    query=query,
    output=_output,
    cancel="qdel",
    ends_at=end_of_job,
    run_requeued=run_requeued,
)
