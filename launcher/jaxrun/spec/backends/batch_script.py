"""What batch scripts of all schedulers have in common: a Scheduler writes one, hands it in, and says what became of it.

A script is meant to be read, kept and submitted again: its directives request resources, and its last line is the same
jaxrun command, for the allocation that they provide. submit.py hands scripts in and follows their jobs.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, auto

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.errors import UsageError
from jaxrun.spec.backends.generated_files import MARK
from jaxrun.spec.job.env_options import mask_secret
from jaxrun.spec.job.job import Job

# Fields of the job whose options the directives replace, for every scheduler.
IN_DIRECTIVES = ("sbatch", "qsub", "submit", "partition", "queue", "time_limit", "account")


class BatchPhase(Enum):
    PENDING = auto()
    RUNNING = auto()
    BETWEEN = auto()  # suspended, being set up, ending
    OVER = auto()


class BatchState(Struct, frozen=True, kw_only=True):
    """What a scheduler says of one job.

    name:         the scheduler's own word for the state
    reason:       why the job is pending
    nodes:        where it runs, as the scheduler writes it; empty until it runs
    output:       the file with its output; empty if nobody knows
    restarts:     how many times the scheduler has started it again
    exit_status:  of a command that represents the job, once it is over
    is_plain:     whether the exit status alone says how it ended
    """

    phase: BatchPhase
    name: str
    reason: str = ""
    nodes: str = ""
    output: str = ""
    restarts: int = 0
    exit_status: int = 0
    is_plain: bool = True

    @property
    def is_over(self) -> bool:
        return self.phase is BatchPhase.OVER


class Scheduler(Struct, frozen=True, kw_only=True):
    """A product that runs batch scripts.

    title:           its name for people
    option:          the option that names the file of a script
    suffix:          of a script's file, if nobody names it
    write:           returns the text of the script of a job, which runs in `directory`, for `file`
    shares_env:      whether a job with these options gets the environment of the shell that submits it
    submit:          the command that submits a script, whose path is appended
    number:          what it prints: the group is the job's number
    submission_env:  the environment for that command, from the text of the script and the environment of this process
    query:           returns the state of a job by its number, None if the scheduler does not answer. Raises
                     UnavailableError if it does not know the job
    output:          the path of the output file, from the text of the script and the job's number, where `query` does
                     not say it; empty if nobody knows
    cancel:          the command that cancels a job
    ends_at:         when the scheduler ends the job of an environment, in seconds since the epoch; None if it does not
    run_requeued:    runs a job, and has it started again if it was preempted; returns the exit status of `jaxrun`
    """

    title: str
    option: str
    suffix: str
    write: Callable[[Job, str, str], str]
    shares_env: Callable[[Job], bool]
    submit: tuple[str, ...]
    number: str
    submission_env: Callable[[str, Mapping[str, str]], dict[str, str]]
    query: Callable[[str, Mapping[str, str]], BatchState | None]
    cancel: str
    ends_at: Callable[[Mapping[str, str], float], float | None]
    run_requeued: Callable[[Mapping[str, str], Callable[[], int]], int]
    output: Callable[[str, str], str] = lambda text, number: ""

    def find_secrets(self, job: Job) -> dict[str, str]:
        """Return the values of --env that look secret, by name: the script leaves them out.

        The job gets them from the environment in which it is submitted. So none are left out if the user's own options
        may keep the environment from the job.
        """
        return find_secrets(job) if self.shares_env(job) else {}


def find_secrets(job: Job) -> dict[str, str]:
    """Return the values of --env that look secret, by name."""
    pairs = [text.partition("=")[::2] for text in job.assignments]
    return {name: value for name, value in pairs if mask_secret(name, value) != value}


class BatchShape(Struct, frozen=True):
    """What a script requests: hosts, and processes on each, None if that does not matter; processes in all."""

    hosts: int | None
    each: int | None
    tasks: int


def batch_shape(job: Job) -> BatchShape:
    each = job.processes_per_host
    if not each and job.processes is None and job.gpus_per_host and job.platform != "cpu":
        each = max(1, job.gpus_per_host // (job.devices_per_process or 1))
    if not each and job.processes and job.hosts and job.processes % job.hosts == 0:
        each = job.processes // job.hosts
    hosts = job.hosts and job.hosts + job.spares
    if each and not hosts and job.processes:
        hosts = math.ceil(job.processes / each) + job.spares
    tasks = (each * hosts if job.spares and each and hosts else job.processes) or (hosts or 1) * (each or 1)
    return BatchShape(hosts, each, tasks)


def job_name(job: Job) -> str:
    return job.tag or re.sub(r".*/|\.py$", "", job.program[0])


def jaxrun_command(job: Job, secrets: Collection[str], replaced: Sequence[str]) -> list[str]:
    """Return the command of the same job without options that directives replace; of a secret, only its name.

    replaced:  the fields of these options
    """
    named = ((text.partition("=")[0], text) for text in job.assignments)
    assignments = tuple(name if name in secrets else text for name, text in named)
    words = replace(job, assignments=assignments).command_words(without=replaced)
    return [sys.executable, "-m", "jaxrun", *words]


def check_lines(texts: Sequence[str], title: str) -> None:
    """Raise UsageError for a text that one line of a script cannot hold."""
    for text in texts:
        if "\n" in text:
            raise UsageError(f"a batch script cannot hold {text!r}: {title} reads its options line by line")


def mention_secrets(secrets: Collection[str]) -> list[str]:
    return [f"# Set {name} in that shell: its value looks secret, so it is not written here." for name in secrets]


def parse_time_limit(limit: str) -> int | None:
    """Return the seconds in "90", "90:00", "1:30:00", "1-12" or "1-12:30:00", as Slurm reads them; None for others."""
    match = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", limit)
    if match is None:
        return None
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1] or match[4]:
        return ((days * 24 + first) * 60 + second) * 60 + third
    return first * 60 + second


# ---- the user's own words for a scheduler's command


def has_option(words: Sequence[str], names: Sequence[str]) -> bool:
    """Whether one of the options `names`, long or short, is among `words`."""
    return any(option_name(word) in names for word in words)


def option_name(word: str) -> str:
    """Return `--mem` for `--mem=4G`, `-w` for `-wh1`; empty for a word that is not an option."""
    if word.startswith("--"):
        return word.partition("=")[0]
    return word[:2] if word.startswith("-") else ""


def group_options(words: Sequence[str]) -> list[list[str]]:
    """Group each option with its values, if these are words of their own."""
    options: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not options:
            options.append([])
        options[-1].append(word)
    return options


# ---- qsub, of PBS and of Grid Engine

END_S = 10  # before the time limit, for jaxrun to end the job by itself, and to have it started again
_SAVE_S = 30.0  # until then, for the program to save its work, if --requeue needs that and nobody gave --save-time


def with_save_time(job: Job) -> Job:
    """Return the job as it runs: with --requeue, it stops by itself before the time limit."""
    return replace(job, save_time=_SAVE_S) if job.requeue and job.save_time is None else job


def qsub_script(
    job: Job,
    scheduler: Scheduler,
    prefix: str,
    options: Iterable[str],
    directory: str,
    file: str,
    before: Sequence[str] = (),
) -> str:
    """Return the text of a script for qsub.

    prefix:   begins each line with an option of qsub
    options:  the lines, to which those of --qsub-args are added
    before:   what the script does in its directory before jaxrun begins
    """
    secrets = scheduler.find_secrets(job)
    command = jaxrun_command(job, secrets, (*IN_DIRECTIVES, "parallel_environment", "qsub_args"))
    check_lines((*command, directory, file), scheduler.title)
    lines = [
        "#!/bin/bash",
        f"{MARK} Submit it to {scheduler.title}, as often as you like, with:  qsub {shlex.quote(file)}",
        "# Options on that command line override those below.",
        "",
        "# The job's resources. The command at the end repeats the job's shape: change both.",
        *(f"{prefix} {line}" for line in options),
        *(f"{prefix} {shlex.join(group)}" for group in group_options(job.qsub_args)),
        *_says_when_it_is_started_again(job, scheduler.title),
        "# It gets the environment of the shell that submits it.",
        *mention_secrets(secrets),
        "",
        f"cd {shlex.quote(directory)} || exit",
        *before,
        "# It replaces this shell, so it receives the scheduler's signals itself.",
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def _says_when_it_is_started_again(job: Job, title: str) -> list[str]:
    if not job.requeue:
        return []
    save_time = with_save_time(job).save_time or 0.0
    return [
        f"# {save_time + END_S:g} s before the limit, the program is asked to stop (should_stop, SIGTERM), and it has",
        f"# {save_time:g} s to save its work (--save-time). {title} then starts the job again, until it is done.",
    ]


def check_qsub_args(words: Sequence[str], jaxrun_options: Mapping[str, str]) -> None:
    """Raise UsageError for a word of --qsub-args for which jaxrun has an option of its own."""
    for word in words:
        if ours := jaxrun_options.get(word):
            raise UsageError(f"--qsub-args {word}: jaxrun needs to know this, too; use {ours}")


def check_seconds(job: Job) -> int | None:
    """Return the seconds of --time; None without it.

    Raises UsageError for what nobody can read, and if a job with --requeue would have no time left.
    """
    seconds = parse_time_limit(job.time_limit) if job.time_limit else None
    if job.time_limit and not seconds:
        raise UsageError(f"--time {job.time_limit} is not a time limit such as 90 (minutes), 1:30:00 or 2-12:00:00")
    save_time = with_save_time(job).save_time or 0.0
    if seconds and job.requeue and seconds <= save_time + END_S:
        raise UsageError(
            f"--time {job.time_limit} is too short for --requeue: the job would be stopped {save_time + END_S:g} s "
            "before the limit; give more time, or a shorter --save-time"
        )
    return seconds


def format_clock(seconds: int) -> str:
    """Write "1:30:00", as PBS and Grid Engine read it."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


# ---- commands of schedulers

_ANSWER_S = 30.0


def run_command(words: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str] | None:
    """Run a command of a scheduler; None if it does not exist, or does not answer."""
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        return subprocess.run(
            words,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
        )
    return None
