"""The words of --slurm-args: which are for sbatch, which for srun, and for which jaxrun has options of its own."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrun.errors import UsageError

# Options of srun that sbatch does not have, or that mean another thing to it.
_SRUN_ONLY_OPTIONS = {
    "--accel-bind", "--bcast", "--bcast-exclude", "--compress", "--cpu-bind", "--disable-status", "--epilog",
    "--exact", "--het-group", "--immediate", "--interactive", "--kill-on-bad-exit", "--label", "--mpi",
    "--msg-timeout", "--multi-prog", "--overlap", "--preserve-env", "--prolog", "--pty", "--quit-on-interrupt",
    "--relative", "--resv-ports", "--send-libs", "--slurmd-debug", "--task-epilog", "--task-prolog", "--threads",
    "--treewidth", "--unbuffered", "--wait", "--x11", "-E", "-I", "-K", "-T", "-W", "-X", "-l", "-r", "-u",
}  # fmt: skip
# What jaxrun must know itself, by the option of jaxrun to give instead.
_JAXRUN_OPTION = {
    "--ntasks": "-n", "-n": "-n", "--nodes": "-N", "-N": "-N", "--ntasks-per-node": "--processes-per-host",
    "--tasks-per-node": "--processes-per-host", "--cpus-per-task": "--cpus-per-process", "-c": "--cpus-per-process",
    "--gpus-per-node": "--gpus-per-host",
}  # fmt: skip


def has_option(words: Sequence[str], names: Sequence[str]) -> bool:
    """Whether one of the options `names`, long or short, is among `words`."""
    return any(_option_name(word) in names for word in words)


def check_slurm_args(slurm_args: Sequence[str]) -> None:
    """Raise UsageError for a word that jaxrun has an option of its own for."""
    for word in slurm_args:
        if ours := _JAXRUN_OPTION.get(_option_name(word)):
            raise UsageError(f"--slurm-args {word}: jaxrun has to know it too; say it with {ours}")


def split_sbatch_srun(slurm_args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words for sbatch and those for srun alone; a word that is no option belongs to the one before it."""
    groups: tuple[list[str], list[str]] = ([], [])
    target = groups[0]
    for word in slurm_args:
        if word.startswith("-"):
            target = groups[_option_name(word) in _SRUN_ONLY_OPTIONS]
        target.append(word)
    return groups


def group_options(words: Sequence[str]) -> list[list[str]]:
    """Group each option with its value, if that is a word of its own."""
    options: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not options:
            options.append([])
        options[-1].append(word)
    return options


def _option_name(word: str) -> str:
    """Return `--mem` of `--mem=4G`, `-w` of `-wh1`; empty for a word that is no option."""
    if word.startswith("--"):
        return word.partition("=")[0]
    return word[:2] if word.startswith("-") else ""
