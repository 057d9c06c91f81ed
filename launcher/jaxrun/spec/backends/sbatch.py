"""The text of a job's batch script. submit.py passes the script to Slurm.

The script is meant to be read, kept and submitted again: its #SBATCH lines request resources from Slurm, and its last
line is the same jaxrun command, for the allocation that they provide.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Sequence

from msgspec.structs import replace

from jaxrun.errors import UsageError
from jaxrun.spec.backends.generated_files import MARK
from jaxrun.spec.backends.quarantine import excluded_hosts
from jaxrun.spec.backends.slurm_job import parse_time_limit
from jaxrun.spec.job.env_options import mask_secret
from jaxrun.spec.job.job import Job

_MIN_SIGTERM_LEAD_S = 60  # from the SIGTERM to the time limit
_MIN_REQUEUE_LEAD_S = 15  # from the end of the grace to the time limit, to end the job and have it started again
_SIGNAL_JITTER_S = 60  # Slurm may send a signal this much sooner than asked
# Fields of the job whose options the #SBATCH lines replace.
_IN_DIRECTIVES = ("sbatch", "submit", "partition", "time_limit", "account")
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
    each = job.processes_per_host
    if not each and job.processes is None and job.gpus_per_host and job.platform != "cpu":
        each = max(1, job.gpus_per_host // (job.devices_per_process or 1))
    if not each and job.processes and job.hosts and job.processes % job.hosts == 0:
        each = job.processes // job.hosts
    hosts = job.hosts and job.hosts + job.spares
    if each and not hosts and job.processes:
        hosts = math.ceil(job.processes / each) + job.spares
    values = (
        ("nodes", hosts),
        ("ntasks", (each * hosts if job.spares and each and hosts else job.processes) or (hosts or 1) * (each or 1)),
        ("ntasks-per-node", each),
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
    return [*words, *map(shlex.join, _group_options(_split_sbatch_srun(job.slurm_args)[0]))]


def sbatch_script(job: Job, *, directory: str, file: str) -> str:
    """Return the text of the script for `file`, which runs in `directory`."""
    secrets, words = find_secrets(job), _jaxrun_words(job)
    for text in (*words, directory, file):
        if "\n" in text:
            raise UsageError(f"a batch script cannot hold {text!r}: Slurm reads its options line by line")
    name = job.tag or re.sub(r".*/|\.py$", "", job.program[0])
    lines = [
        "#!/bin/bash",
        f"{MARK} Submit it to Slurm, as often as you like, with:  sbatch {shlex.quote(file)}",
        "# Options on that command line override those below, for example:  sbatch --time=2:00:00 ...",
        "",
        "# The job's resources. The command at the end repeats the job's shape: change both.",
        _directive("--job-name", name),
        *(f"#SBATCH {option}" for option in sbatch_options(job)),
        "",
        "# Where it runs, and where its output goes; %j is the number of the job.",
        _directive("--chdir", directory),
        *_unless(job, "#SBATCH --output=jaxrun-%j.out", "--output", "-o"),
        "# It gets the environment of the shell that submits it.",
        *_unless(job, "#SBATCH --export=ALL", "--export"),
        *(f"# Set {name} in that shell: its value looks secret, so it is not written here." for name in secrets),
        "",
        *_says_who_starts_it_again(job),
        "# The output then continues in the same file.",
        *_unless(job, "#SBATCH --requeue", "--no-requeue", "--requeue"),
        *_unless(job, "#SBATCH --open-mode=append", "--open-mode"),
        *_signal_before_limit(job),
        "",
        "# jaxrun calls srun to start the processes. It replaces this shell, so it receives Slurm's signals itself.",
        f"exec {shlex.join([sys.executable, '-m', 'jaxrun', *words])}",
    ]
    return "\n".join(lines) + "\n"


def find_secrets(job: Job) -> dict[str, str]:
    """Return the values of --env that look secret, by name: the script leaves them out.

    The job gets them from the environment in which it is submitted. So none are left out if --slurm-args have their own
    --export, which may keep the environment from the job.
    """
    if has_option(job.slurm_args, ("--export",)):
        return {}
    pairs = [text.partition("=")[::2] for text in job.assignments]
    return {name: value for name, value in pairs if mask_secret(name, value) != value}


def _jaxrun_words(job: Job) -> list[str]:
    """Return the words of the same job without the options that the #SBATCH lines replace; of a secret, only its name.

    Of --slurm-args, the words for srun alone are kept.
    """
    secrets = find_secrets(job)
    named = ((text.partition("=")[0], text) for text in job.assignments)
    assignments = tuple(name if name in secrets else text for name, text in named)
    step = tuple(_split_sbatch_srun(job.slurm_args)[1])
    return replace(job, assignments=assignments, slurm_args=step).command_words(without=_IN_DIRECTIVES)


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


def has_option(words: Sequence[str], names: Sequence[str]) -> bool:
    """Whether one of the options `names`, long or short, is among `words`."""
    return any(_option_name(word) in names for word in words)


def check_slurm_args(slurm_args: Sequence[str]) -> None:
    """Raise UsageError for a word for which jaxrun has an option of its own."""
    for word in slurm_args:
        if ours := _JAXRUN_OPTION.get(_option_name(word)):
            raise UsageError(f"--slurm-args {word}: jaxrun needs to know this, too; use {ours}")


def _split_sbatch_srun(slurm_args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (words for sbatch, words for srun alone); a word that is not an option belongs to the word before it."""
    groups: tuple[list[str], list[str]] = ([], [])
    target = groups[0]
    for word in slurm_args:
        if word.startswith("-"):
            target = groups[_option_name(word) in _SRUN_ONLY_OPTIONS]
        target.append(word)
    return groups


def _group_options(words: Sequence[str]) -> list[list[str]]:
    """Group each option with its value, if that is a word of its own."""
    options: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not options:
            options.append([])
        options[-1].append(word)
    return options


def _option_name(word: str) -> str:
    """Return `--mem` for `--mem=4G`, `-w` for `-wh1`; empty for a word that is not an option."""
    if word.startswith("--"):
        return word.partition("=")[0]
    return word[:2] if word.startswith("-") else ""
