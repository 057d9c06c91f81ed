"""The batch script of a job: its text, how it is written, and how it is handed to Slurm.

The script is meant to be read, kept and submitted again: its #SBATCH lines say what Slurm is asked for, and its last
line is the same jaxrun command, for the allocation that they bring.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from jaxrun.backends.slurm_args import check_slurm_args, group_options, has_option, split_sbatch_srun
from jaxrun.errors import UnavailableError, UsageError
from jaxrun.job.env_options import mask_secret
from jaxrun.job.job import Job

SCRIPT_MARK = "# Written by jaxrun."
_NEW_SCRIPT = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MIN_SIGTERM_LEAD_S = 60  # from the SIGTERM to the time limit
_SIGNAL_JITTER_S = 60  # Slurm may send a signal this much sooner than asked
_ALLOCATION_VARIABLE = re.compile(r"SLURM_(?!CONF$|CLUSTERS$)")
# Options of jaxrun that the #SBATCH lines stand for.
_DROPPED_WITH_VALUE = ("--sbatch", "--slurm-args", "--partition", "--time", "--account")


def sbatch_options(job: Job) -> list[str]:
    """Return the options for sbatch or salloc, quoted for a shell and for a line of #SBATCH alike."""
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
    return [*words, *map(shlex.join, group_options(split_sbatch_srun(job.slurm_args)[0]))]


def sbatch_script(job: Job, words: Sequence[str], *, directory: str, file: str) -> str:
    """Return the text of the script that is to be at `file`; `words` are those of the command line after `jaxrun`."""
    for text in (*words, directory, file):
        if "\n" in text:
            raise UsageError(f"a batch script cannot hold {text!r}: Slurm reads its options line by line")
    secrets = find_secrets(job, words)
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
        *(f"# Set {name} in that shell: its value looks secret, and does not stand here." for name in secrets),
        "",
        "# Slurm may start it again after the loss of a node or a preemption; to do so by hand: scontrol requeue JOB.",
        "# The output then goes on in the same file.",
        *_unless(job, "#SBATCH --requeue", "--no-requeue", "--requeue"),
        *_unless(job, "#SBATCH --open-mode=append", "--open-mode"),
        *_sigterm_before_limit(job),
        "",
        "# jaxrun calls srun to start the processes. It takes the place of this shell, to get Slurm's signals itself.",
        f"exec {shlex.join([sys.executable, '-m', 'jaxrun', *_jaxrun_words(job, words, secrets)])}",
    ]
    return "\n".join(lines) + "\n"


def find_secrets(job: Job, words: Sequence[str]) -> dict[str, str]:
    """Return the values of --env among `words` that look secret, by name: those that the script leaves out.

    The job gets them from the environment that it is submitted with, so none are left out where --slurm-args have an
    --export of their own, which may keep the environment from it.
    """
    if has_option(job.slurm_args, ("--export",)):
        return {}
    options = words[: len(words) - len(job.program)]
    given = [following for word, following in pairwise(options) if word == "--env"]
    given += [word.removeprefix("--env=") for word in options if word.startswith("--env=")]
    pairs = [text.partition("=")[::2] for text in given]
    return {name: value for name, value in pairs if mask_secret(name, value) != value}


def _jaxrun_words(job: Job, words: Sequence[str], secrets: Mapping[str, str]) -> list[str]:
    """Return the same command without what the #SBATCH lines say, but with the words that are for srun alone.

    Of an assignment of `secrets`, its name is kept.
    """
    end = len(words) - len(job.program)
    kept: list[str] = []
    options = iter([_without_secret(word, before, secrets) for before, word in pairwise(["", *words[:end]])])
    for word in options:
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-")  # as the command line reads it
        if name in _DROPPED_WITH_VALUE and not equals:
            next(options, None)
        elif name not in ("--submit", *_DROPPED_WITH_VALUE):
            kept.append(word)
    step = split_sbatch_srun(job.slurm_args)[1]
    if step:
        kept = [f"--slurm-args={shlex.join(step)}", *kept]
    return [*kept, *words[end:]]


def _without_secret(word: str, before: str, secrets: Mapping[str, str]) -> str:
    """Return `word`, which comes after `before`; only the name of it if it assigns one of `secrets`."""
    for option in ("", "--env="):
        name = word.removeprefix(option).partition("=")[0]
        if (before == "--env" or option) and word.startswith(option) and name in secrets:
            return option + name
    return word


def _sigterm_before_limit(job: Job) -> list[str]:
    """Ask for a SIGTERM before the time limit, where that leaves the job most of its time."""
    if has_option(job.slurm_args, ("--signal",)):
        return []
    early = max(_MIN_SIGTERM_LEAD_S, math.ceil(job.signal_grace) + _MIN_SIGTERM_LEAD_S // 2)
    limit = parse_time_limit(job.time_limit)
    if limit is not None and limit < 4 * (early + _SIGNAL_JITTER_S):
        return []
    return [
        "",
        f"# SIGTERM to jaxrun, {early} to {early + _SIGNAL_JITTER_S} s before the time limit, as JAX's notice of "
        "preemption.",
        "# (Slurm's own line in the output says CANCELLED, but nothing else has happened yet.) The program then has",
        f"# {job.signal_grace:g} seconds to save its work; for more, raise both --grace, below, and the number here.",
        f"#SBATCH --signal=B:TERM@{early}",
    ]


def parse_time_limit(limit: str) -> int | None:
    """Return the seconds of "90", "90:00", "1:30:00", "1-12" or "1-12:30:00", as Slurm reads them; None for others."""
    match = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", limit)
    if match is None:
        return None
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1] or match[4]:
        return ((days * 24 + first) * 60 + second) * 60 + third
    return first * 60 + second


def _directive(option: str, value: str) -> str:
    return f"#SBATCH {option}={shlex.quote(value)}"


def _unless(job: Job, line: str, *names: str) -> list[str]:
    """Return `line`, unless --slurm-args have one of `names`."""
    return [] if has_option(job.slurm_args, names) else [line]


def submission_env(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for sbatch: no variable that overrides a #SBATCH line of the script `text`.

    The variables of an allocation that this shell may be in are left out too: sbatch would hand them to the job.
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


def write_script(path: Path, text: str) -> None:
    """Write a batch script that its owner alone can read, as its command line may hold what is secret.

    Raises UsageError rather than overwrite a file that jaxrun has not written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and SCRIPT_MARK not in path.read_text(errors="replace"):
            raise UsageError(f"--sbatch {path} is a file already, and no batch script of jaxrun's; give another name")
        draft.unlink(missing_ok=True)
        with open(os.open(draft, _NEW_SCRIPT, 0o700), "w", encoding="utf-8", errors="surrogateescape") as file:
            os.fchmod(file.fileno(), 0o700)
            file.write(text)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise UsageError(f"the batch script cannot be written to {path}: {error.strerror}") from None


def submit(text: str, keep_at: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """Write the script `text` to `keep_at` and hand it to Slurm; returns the job's number and what sbatch remarked.

    Raises UnavailableError where Slurm does not take the job; the script is kept.
    """
    write_script(keep_at, text)
    script = shlex.quote(str(keep_at))
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(keep_at)],
            env=submission_env(text, environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise UnavailableError(
            f"--submit needs sbatch, which is not on PATH; the script is kept, for a machine that has: sbatch {script}"
        ) from None
    remarks = done.stderr.strip()
    number = re.match(r"[0-9]+", done.stdout)
    if done.returncode or number is None:
        reason = remarks or done.stdout.strip() or f"exit status {done.returncode}"
        raise UnavailableError(f"sbatch refused the job: {reason}\nthe script is kept: sbatch {script}")
    return number[0], remarks
