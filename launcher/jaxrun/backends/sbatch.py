"""The batch script of a job: its text, from the request and the words of the command line, and nothing else.

It is meant to be read, kept and submitted again: what Slurm is asked for stands in its #SBATCH lines, and its last line
is the same jaxrun command, for the allocation that they bring.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Sequence

from jaxrun.errors import UsageError
from jaxrun.job.job import Job

SCRIPT_MARK = "# Written by jaxrun."
_MIN_SIGTERM_LEAD_S = 60  # seconds, at least, from the SIGTERM to the time limit
_SIGNAL_JITTER_S = 60  # Slurm may send a signal as many seconds sooner than asked

# Options of srun that sbatch does not know, or means another thing by: they are for the step.
_SRUN_ONLY_OPTIONS = {
    "--accel-bind", "--bcast", "--bcast-exclude", "--compress", "--cpu-bind", "--disable-status", "--epilog",
    "--exact", "--het-group", "--immediate", "--interactive", "--kill-on-bad-exit", "--label", "--mpi",
    "--msg-timeout", "--multi-prog", "--overlap", "--preserve-env", "--prolog", "--pty", "--quit-on-interrupt",
    "--relative", "--resv-ports", "--send-libs", "--slurmd-debug", "--task-epilog", "--task-prolog", "--threads",
    "--treewidth", "--unbuffered", "--wait", "--x11", "-E", "-I", "-K", "-T", "-W", "-X", "-l", "-r", "-u",
}  # fmt: skip
# What jaxrun must know itself, so that it cannot be said to Slurm behind its back.
_JAXRUN_OPTION = {
    "--ntasks": "-n", "-n": "-n", "--nodes": "-N", "-N": "-N", "--ntasks-per-node": "--processes-per-host",
    "--tasks-per-node": "--processes-per-host", "--cpus-per-task": "--cpus-per-process", "-c": "--cpus-per-process",
    "--gpus-per-node": "--gpus-per-host",
}  # fmt: skip
_DROPPED_WITH_VALUE = ("--sbatch", "--slurm-args", "--partition", "--time", "--account")


def has_option(words: Sequence[str], names: Sequence[str]) -> bool:
    """Whether one of the options `names`, long or short, is among `words`."""
    return any(_option_name(word) in names for word in words)


def check_slurm_args(slurm_args: Sequence[str]) -> None:
    """UsageError for words of --slurm-args that an option of jaxrun's own is for."""
    for word in slurm_args:
        if ours := _JAXRUN_OPTION.get(_option_name(word)):
            raise UsageError(f"--slurm-args {word}: jaxrun has to know it too; say it with {ours}")


def sbatch_options(job: Job) -> list[str]:
    """What sbatch or salloc is asked for: options, quoted for a shell and for a line of #SBATCH alike."""
    check_slurm_args(job.slurm_args)
    each = job.processes_per_host
    if not each and job.processes is None and job.gpus_per_host and job.platform != "cpu":
        each = max(1, job.gpus_per_host // (job.devices_per_process or 1))
    if not each and job.processes and job.hosts and job.processes % job.hosts == 0:
        each = job.processes // job.hosts
    hosts = job.hosts
    if each and not hosts and job.processes:
        hosts = math.ceil(job.processes / each)
    values = (
        ("nodes", hosts),
        ("ntasks", job.processes or (hosts or 1) * (each or 1)),
        ("ntasks-per-node", each),
        ("cpus-per-task", job.cpus_per_process),
        ("gpus-per-node", job.gpus_per_host),
        ("partition", job.partition),
        ("time", job.time_limit),
        ("account", job.account),
    )
    words = [f"--{name}={shlex.quote(str(value))}" for name, value in values if value]
    return [*words, *map(shlex.join, _group_options(_split_sbatch_srun(job.slurm_args)[0]))]


def sbatch_script(job: Job, words: Sequence[str], *, directory: str, file: str) -> str:
    """The text of the script that is to lie at `file`; `words` are those of the command line after `jaxrun`."""
    for text in (*words, directory, file):
        if "\n" in text:
            raise UsageError(f"a batch script cannot hold {text!r}: Slurm reads its options line by line")
    name = job.tag or re.sub(r".*/|\.py$", "", job.program[0])
    lines = [
        "#!/bin/bash",
        f"{SCRIPT_MARK} Hand it to Slurm, as often as you like, with:  sbatch {shlex.quote(file)}",
        "# Options on that command line win over those below, as in:  sbatch --time=2:00:00 ...",
        "",
        "# What the job gets. Its shape stands also in the command at the end: change both.",
        _directive("--job-name", name),
        *(f"#SBATCH {option}" for option in sbatch_options(job)),
        "",
        "# Where it runs, and where its output goes; %j is the number of the job.",
        _directive("--chdir", directory),
        *_unless(job, "#SBATCH --output=jaxrun-%j.out", "--output", "-o"),
        "# It gets the environment of the shell that submits it.",
        *_unless(job, "#SBATCH --export=ALL", "--export"),
        "",
        "# Slurm may start it again after the loss of a node or a preemption; to do so by hand: scontrol requeue JOB.",
        "# The output then goes on in the same file.",
        *_unless(job, "#SBATCH --requeue", "--no-requeue", "--requeue"),
        *_unless(job, "#SBATCH --open-mode=append", "--open-mode"),
        *_sigterm_before_limit(job),
        "",
        "# jaxrun calls srun to start the processes. It takes the place of this shell, to get Slurm's signals itself.",
        f"exec {shlex.join([sys.executable, '-m', 'jaxrun', *_jaxrun_words(job, words)])}",
    ]
    return "\n".join(lines) + "\n"


def _jaxrun_words(job: Job, words: Sequence[str]) -> list[str]:
    """The same command without what the #SBATCH lines say, and with those words for srun that sbatch does not know."""
    end = len(words) - len(job.program)
    kept: list[str] = []
    options = iter(words[:end])
    for word in options:
        if word in _DROPPED_WITH_VALUE:
            next(options, None)
        elif word != "--submit" and word.partition("=")[0] not in _DROPPED_WITH_VALUE:
            kept.append(word)
    step = _split_sbatch_srun(job.slurm_args)[1]
    if step:
        kept = [f"--slurm-args={shlex.join(step)}", *kept]
    return [*kept, *words[end:]]


def _sigterm_before_limit(job: Job) -> list[str]:
    """A SIGTERM before the time limit, where that leaves the job most of its time."""
    if has_option(job.slurm_args, ("--signal",)):
        return []
    early = max(_MIN_SIGTERM_LEAD_S, math.ceil(job.grace) + _MIN_SIGTERM_LEAD_S // 2)
    limit = parse_time_limit(job.time_limit)
    if limit is not None and limit < 4 * (early + _SIGNAL_JITTER_S):
        return []
    return [
        "",
        f"# SIGTERM to jaxrun, {early} to {early + _SIGNAL_JITTER_S} s before the time limit, as JAX's notice of "
        "preemption.",
        "# (Slurm's own line in the output says CANCELLED, but nothing else has happened yet.) The program then has",
        f"# {job.grace:g} seconds to save its work; for more, raise both --grace, below, and the number here.",
        f"#SBATCH --signal=B:TERM@{early}",
    ]


def parse_time_limit(limit: str) -> int | None:
    """A time limit as Slurm writes it: "90", "90:00", "1:30:00", "1-12", "1-12:30:00"; None for anything else."""
    match = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", limit)
    if match is None:
        return None
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1] or match[4]:
        return ((days * 24 + first) * 60 + second) * 60 + third
    return first * 60 + second


def _split_sbatch_srun(slurm_args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for sbatch, and those for srun alone; a word that is no option belongs to the one before it."""
    groups: tuple[list[str], list[str]] = ([], [])
    target = groups[0]
    for word in slurm_args:
        if word.startswith("-"):
            target = groups[_option_name(word) in _SRUN_ONLY_OPTIONS]
        target.append(word)
    return groups


def _group_options(words: Sequence[str]) -> list[list[str]]:
    """Each option with its value, if that is a word of its own."""
    options: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not options:
            options.append([])
        options[-1].append(word)
    return options


def _option_name(word: str) -> str:
    """`--mem` of `--mem=4G`, `-w` of `-wh1`; empty for a word that is no option."""
    if word.startswith("--"):
        return word.partition("=")[0]
    return word[:2] if word.startswith("-") else ""


def _directive(option: str, value: str) -> str:
    return f"#SBATCH {option}={shlex.quote(value)}"


def _unless(job: Job, line: str, *names: str) -> list[str]:
    """`line`, unless --slurm-args say it otherwise."""
    return [] if has_option(job.slurm_args, names) else [line]
