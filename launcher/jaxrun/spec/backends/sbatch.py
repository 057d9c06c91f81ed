"""Slurm's batch scripts: their text, and the environment for sbatch."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from jaxrun.errors import UsageError
from jaxrun.spec.backends.batch_script import (
    IN_DIRECTIVES,
    Scheduler,
    batch_shape,
    check_lines,
    find_secrets,
    group_options,
    has_option,
    jaxrun_command,
    job_name,
    mention_secrets,
    option_name,
    parse_time_limit,
)
from jaxrun.spec.backends.generated_files import MARK
from jaxrun.spec.backends.quarantine import excluded_hosts
from jaxrun.spec.backends.slurm_job import end_of_allocation, query_batch_state, run_requeued
from jaxrun.spec.job.job import Job

_MIN_SIGTERM_LEAD_S = 60  # from the SIGTERM to the time limit
_MIN_REQUEUE_LEAD_S = 15  # from the end of the grace to the time limit, to end the job and have it started again
_ALLOCATION_VARIABLE = re.compile(r"SLURM_(?!CONF$|CLUSTERS$)")
_SIGNAL_JITTER_S = 60  # Slurm may send a signal this much sooner than asked
# Options of srun that sbatch lacks, or that mean something else to sbatch.
_SRUN_ONLY_OPTIONS = {
    "--accel-bind", "--bcast", "--bcast-exclude", "--compress", "--cpu-bind", "--disable-status", "--epilog",
    "--exact", "--het-group", "--immediate", "--interactive", "--kill-on-bad-exit", "--label", "--mpi",
    "--msg-timeout", "--multi-prog", "--overlap", "--preserve-env", "--prolog", "--pty", "--quit-on-interrupt",
    "--relative", "--resv-ports", "--send-libs", "--slurmd-debug", "--task-epilog", "--task-prolog", "--threads",
    "--treewidth", "--unbuffered", "--wait", "--x11", "-E", "-I", "-K", "-T", "-W", "-X", "-l", "-r", "-u",
}  # fmt: skip
# Options of Slurm that jaxrun must know itself, with the option of jaxrun to use instead.
_JAXRUN_OPTION = {
    "--ntasks": "-n", "-n": "-n", "--nodes": "-N", "-N": "-N", "--ntasks-per-node": "--processes-per-host",
    "--tasks-per-node": "--processes-per-host", "--cpus-per-task": "--cpus-per-process", "-c": "--cpus-per-process",
    "--gpus-per-node": "--gpus-per-host",
}  # fmt: skip


def sbatch_options(job: Job) -> list[str]:
    """Return the options for sbatch or salloc, quoted both for a shell and for a #SBATCH line."""
    check_slurm_args(job.slurm_args)
    shape = batch_shape(job)
    values = (
        ("nodes", shape.hosts),
        ("ntasks", shape.tasks),
        ("ntasks-per-node", shape.each),
        ("cpus-per-task", job.cpus_per_process),
        ("gpus-per-node", job.gpus_per_host),
        ("partition", job.partition),
        ("time", job.time_limit),
        ("account", job.account),
        ("exclude", ",".join(excluded_hosts(job))),
    )
    words = [f"--{name}={shlex.quote(str(value))}" for name, value in values if value]
    if job.max_restarts:
        words.append("--no-kill")  # the job survives the loss of a node
    return [*words, *map(shlex.join, group_options(_split_sbatch_srun(job.slurm_args)[0]))]


def sbatch_script(job: Job, *, directory: str, file: str) -> str:
    """Return the text of the script for `file`, which runs in `directory`."""
    secrets = find_secrets(job) if _shares_env(job) else {}
    step = replace(job, slurm_args=tuple(_split_sbatch_srun(job.slurm_args)[1]))  # the words for srun alone
    command = jaxrun_command(step, secrets, IN_DIRECTIVES)
    check_lines((*command, directory, file), "Slurm")
    lines = [
        "#!/bin/bash",
        f"{MARK} Submit it to Slurm, as often as you like, with:  sbatch {shlex.quote(file)}",
        "# Options on that command line override those below, for example:  sbatch --time=2:00:00 ...",
        "",
        "# The job's resources. The command at the end repeats the job's shape: change both.",
        _directive("--job-name", job_name(job)),
        *(f"#SBATCH {option}" for option in sbatch_options(job)),
        "",
        "# Where it runs, and where its output goes; %j is the number of the job.",
        _directive("--chdir", directory),
        *_unless(job, "#SBATCH --output=jaxrun-%j.out", "--output", "-o"),
        "# It gets the environment of the shell that submits it.",
        *_unless(job, "#SBATCH --export=ALL", "--export"),
        *mention_secrets(secrets),
        "",
        *_says_who_starts_it_again(job),
        "# The output then continues in the same file.",
        *_unless(job, "#SBATCH --requeue", "--no-requeue", "--requeue"),
        *_unless(job, "#SBATCH --open-mode=append", "--open-mode"),
        *_signal_before_limit(job),
        "",
        "# jaxrun calls srun to start the processes. It replaces this shell, so it receives Slurm's signals itself.",
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def submission_env(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for sbatch, without variables that would override a #SBATCH line of the script `text`.

    The variables of an allocation around this shell are left out, too, because sbatch would pass them to the job.
    """
    stated = re.findall(r"^#SBATCH --([a-z-]+)", text, re.MULTILINE)
    names = {f"SBATCH_{option.upper().replace('-', '_')}" for option in stated}
    names |= {"SBATCH_ARRAY_INX", "SBATCH_NO_REQUEUE", "SBATCH_WAIT"}
    if "time" in stated:
        names.add("SBATCH_TIMELIMIT")
    inside = "SLURM_JOB_ID" in environ
    return {
        name: value
        for name, value in environ.items()
        if name not in names and not (inside and _ALLOCATION_VARIABLE.match(name))
    }


def _shares_env(job: Job) -> bool:
    return not has_option(job.slurm_args, ("--export",))


def _says_who_starts_it_again(job: Job) -> list[str]:
    if job.requeue:
        return ["# After a preemption, and before the time limit, jaxrun makes Slurm start it again, until it is done."]
    return [
        "# Slurm may start it again after the loss of a node or a preemption; to do so by hand: scontrol requeue JOB."
    ]


def _signal_before_limit(job: Job) -> list[str]:
    """Request a signal before the time limit, if that leaves the job most of its time.

    Raises UsageError if a job with --requeue would have no time left.
    """
    if has_option(job.slurm_args, ("--signal",)):
        return []
    early = max(_MIN_SIGTERM_LEAD_S, math.ceil(job.signal_grace) + _MIN_SIGTERM_LEAD_S // 2)
    limit = parse_time_limit(job.time_limit)
    if job.requeue:
        early = math.ceil(job.signal_grace) + _MIN_REQUEUE_LEAD_S
        if limit is not None and limit <= early + _SIGNAL_JITTER_S:
            raise UsageError(
                f"--time {job.time_limit} is too short for --requeue: Slurm's signal may come "
                f"{early + _SIGNAL_JITTER_S} s before the limit; give more time, or a shorter --grace "
                f"({job.signal_grace:g} s to save the work)"
            )
        return [
            "",
            f"# SIGUSR2 to jaxrun, {early} to {early + _SIGNAL_JITTER_S} s before the time limit. The program then has",
            f"# {job.signal_grace:g} s to save its work; for more, raise both --grace, below, and the number here.",
            f"#SBATCH --signal=B:USR2@{early}",
        ]
    if limit is not None and limit < 4 * (early + _SIGNAL_JITTER_S):
        return []
    return [
        "",
        f"# SIGTERM to jaxrun, {early} to {early + _SIGNAL_JITTER_S} s before the time limit, as JAX's notice of "
        "preemption.",
        "# (Slurm's own line in the output says CANCELLED, but nothing else has happened yet.) The program then has",
        f"# {job.signal_grace:g} s to save its work; for more, raise both --grace, below, and the number here.",
        f"#SBATCH --signal=B:TERM@{early}",
    ]


def _directive(option: str, value: str) -> str:
    return f"#SBATCH {option}={shlex.quote(value)}"


def _unless(job: Job, line: str, *names: str) -> list[str]:
    """Return `line` in a list, or an empty list if --slurm-args have one of `names`."""
    return [] if has_option(job.slurm_args, names) else [line]


# ---- the words of --slurm-args


def check_slurm_args(slurm_args: Sequence[str]) -> None:
    """Raise UsageError for a word for which jaxrun has an option of its own."""
    for word in slurm_args:
        if ours := _JAXRUN_OPTION.get(option_name(word)):
            raise UsageError(f"--slurm-args {word}: jaxrun needs to know this, too; use {ours}")


def _split_sbatch_srun(slurm_args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (words for sbatch, words for srun alone); a word that is not an option belongs to the word before it."""
    groups: tuple[list[str], list[str]] = ([], [])
    target = groups[0]
    for word in slurm_args:
        if word.startswith("-"):
            target = groups[option_name(word) in _SRUN_ONLY_OPTIONS]
        target.append(word)
    return groups


SLURM = Scheduler(
    title="Slurm",
    option="--sbatch",
    suffix=".sbatch",
    write=lambda job, directory, file: sbatch_script(job, directory=directory, file=file),
    shares_env=_shares_env,
    submit=("sbatch", "--parsable"),
    number=r"([0-9]+)",
    submission_env=submission_env,
    query=query_batch_state,
    cancel="scancel",
    ends_at=end_of_allocation,
    run_requeued=run_requeued,
)
