"""Runs one program as a job of jaxrun, and reads what its ranks saw and printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uses import Use

RANKS = 2
_LIMIT_S = 300
_FOREIGN = ("JAX_", "JAXRUN_", "XLA_", "OMPI_", "SLURM_")
_NUMBER = re.compile(r"\d+(\.\d+)?")
# Ends the leading block of imports; then the state is noted before anything else happens.
_PROGRAM = '''\
"""Imports a package, notes what it sees of its process, and uses the package."""

{imports}
LEADING_BLOCK_ENDS_HERE = True
import json, os, sys
sys.path.append({folder!r})
import process_state
state = process_state.read_state()
sys.path.remove({folder!r})

import contextlib, io, jax, traceback
printed = io.StringIO()
directory = os.path.join({out!r}, "rank-%d" % jax.process_index())
os.mkdir(directory)
os.chdir(directory)
try:
    with contextlib.redirect_stdout(printed):
        exec({code!r}, dict(globals()))
except BaseException:
    traceback.print_exc(file=printed)
state["what the use prints"] = {{"text": printed.getvalue()}}
with open(directory + ".json", "w") as file:
    json.dump(state, file)
'''


@dataclass(frozen=True)
class Run:
    """The states of the ranks of one job. `failed`: why there are none; empty if the job ran.

    preloaded:  the modules that the fork server imported for the program
    left_out:   modules that it did not import, with the reasons
    """

    ranks: Sequence[dict[str, Any]]
    failed: str
    preloaded: Sequence[str] = ()
    left_out: Sequence[str] = ()


def run(use: Use, python: str, words: Sequence[str], home: Path) -> Run:
    """Run a job of `jaxrun WORDS`. Its directory and temporary directory are empty, with the same paths in all runs."""
    with tempfile.TemporaryDirectory(prefix="preload-check-") as name:
        top = Path(name)
        work, temporary, out = (top / part for part in ("work", "tmp", "out"))
        for folder in (work, temporary, out):
            folder.mkdir()
        program = _PROGRAM.format(
            imports=use.imports,
            code=use.code,
            folder=str(Path(__file__).parent),
            out=str(out),
        )
        (work / "program.py").write_text(program)
        environ = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        environ |= {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "HOME": str(home), "TMPDIR": str(temporary)}
        command = [python, "-m", "jaxrun", "-n", str(RANKS), "--run-dir", "run", *words, "program.py", "--steps", "3"]
        try:
            done = subprocess.run(
                command,
                cwd=work,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return Run((), f"the job was still running after {_LIMIT_S} s")
        if done.returncode:
            return Run((), f"the job ended with {done.returncode}: {done.stdout.strip()[-600:]}")
        ranks = [json.loads((out / f"rank-{rank}.json").read_text().replace(name, "TOP")) for rank in range(RANKS)]
        output = {"output": _lines_of(done.stdout.replace(name, "TOP"))}
        return Run([state | output for state in ranks], "", *_preloaded(work / "run"))


def _preloaded(run_directory: Path) -> tuple[list[str], list[str]]:
    """Return the modules that the fork server imported, and those that it left out with reasons, from the event log."""
    names: list[str] = []
    left_out: list[str] = []
    for line in (run_directory / "events.jsonl").read_text().splitlines():
        event = json.loads(line).get("event", {})
        if event.get("type") == "Preloaded":
            names += event["names"]
            left_out += [f"{module}: {reason}" for module, reason in event["left_out"].items()]
    return names, left_out


def _lines_of(output: str) -> list[str]:
    """Return the output of ranks and other processes, without jaxrun's own lines and without numbers, which vary."""
    return [_NUMBER.sub("#", line) for line in output.splitlines() if line and not line.startswith("jaxrun:")]
