"""Writes batch scripts, and hands them to Slurm."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.protocol.whole_file import write_whole_file
from jaxrun.spec.backends.sbatch import SCRIPT_MARK

_ALLOCATION_VARIABLE = re.compile(r"SLURM_(?!CONF$|CLUSTERS$)")


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
    try:
        if path.exists() and SCRIPT_MARK not in path.read_text(errors="replace"):
            raise UsageError(f"--sbatch {path} is a file already, and no batch script of jaxrun's; give another name")
        write_whole_file(path, text.encode("utf-8", "surrogateescape"), 0o700)
    except OSError as error:
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
