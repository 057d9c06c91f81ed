"""Fault injection, and the control line, with real processes."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from harness import MISBEHAVE, extended, jaxrun, started

from jaxrun.protocol.names import CONTROL_FD

INTERRUPTED = """
import os, time
descriptors = os.listdir("/proc/self/fd")
links = [os.readlink(f"/proc/self/fd/{{name}}") for name in descriptors if os.path.islink(f"/proc/self/fd/{{name}}")]
print("ready", {name!r} in os.environ, {link!r} in links, flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
time.sleep(60)
"""


def seconds_after(words: str, text: str) -> float:
    """The number that follows `words` in a text: on a busy machine a fault comes later than asked, never sooner."""
    return float(text.split(words, 1)[1].split()[0])


@pytest.mark.parametrize("rank", [extended(0), 1])
def test_a_killed_rank_ends_the_job_as_if_it_had_died_by_itself(tmp_path: Path, rank: int) -> None:
    result = jaxrun(tmp_path, "-n", "3", "--chaos", f"kill:{rank}@300ms", MISBEHAVE)
    assert result.code == 137, result
    assert result.err.splitlines()[0].endswith(f" · --chaos kill:{rank}@0.3s")
    assert f"jaxrun: rank {rank} is killed by SIGKILL (9), as --chaos asked\n" in result.err
    assert f"rank {rank} of 3 was killed by SIGKILL (9), as --chaos asked, " in str(result.verdict()["headline"])
    assert seconds_after("as --chaos asked, ", str(result.verdict()["headline"])) >= 0.3
    assert result.verdict()["culprits"] == [rank]
    (note,) = result.events("chaos")
    assert (note["fault"], note["ranks"]) == ("kill", [rank])
    assert json.loads((result.run_dir / "job.json").read_text())["chaos"] == [f"kill:{rank}@0.3s"]


@pytest.mark.parametrize(
    ("rank", "flags"),
    [
        (0, ("--pause", "0")),  # in a collective
        extended(1, ("--hang", "--rank", "-1")),  # between two
        extended(1, ("--pause", "0")),
        extended(0, ("--hang", "--rank", "-1")),
    ],
)
def test_a_rank_that_is_cut_off_is_the_cause_of_what_breaks(tmp_path: Path, rank: int, flags: tuple[str, ...]) -> None:
    result = jaxrun(tmp_path, "-n", "3", "--chaos", f"cut:{rank}@300ms", MISBEHAVE, *flags)
    assert result.code in (1, 134), result
    headline = str(result.verdict()["headline"])
    assert f"rank {rank} of 3 was cut off from the network, as --chaos asked, " in headline
    assert seconds_after("as --chaos asked, ", headline) >= 0.3
    assert result.verdict()["culprits"] == [rank]


def test_a_paused_rank_holds_the_others_up_and_is_named(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "3", "--chaos", "pause:1@300ms", "--stall-timeout", "2", MISBEHAVE)
    assert result.code == 124, result
    assert "rank 1 was stopped by SIGSTOP (19), as --chaos asked, " in result.err
    assert seconds_after("as --chaos asked, ", result.err) >= 0.3
    assert "rank 1 is stopped by a signal, and ranks 0, 2 wait for it" in result.err


def test_a_job_may_be_over_before_its_fault(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "2", "--chaos", "kill:1@60s", MISBEHAVE, "--steps", "3")
    assert result.code == 0 and "jaxrun: the job was over before --chaos kill:1@60s\n" in result.err


@pytest.mark.parametrize("how", ["by death", extended("by order")])
def test_the_control_line_interrupts_breaks_and_ends(tmp_path: Path, how: str) -> None:
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    program = tmp_path / "interrupted.py"
    program.write_text(INTERRUPTED.format(name=CONTROL_FD, link=os.readlink(f"/proc/self/fd/{number}")))
    environ = {CONTROL_FD: str(number)}
    with ours, theirs, started(tmp_path, "-n", "2", str(program), env=environ, pass_fds=[number]) as job:
        job.wait_for_output("ready False False", 2)
        ours.sendall(b'{"signal": 2}\n')
        job.wait_for_output("interrupted", 2)
        ours.sendall(b'{"fault": "pause", "ranks": [1]}\n{"fault": "kill", "ranks": []}\nwhat?\n')
        if how == "by order":
            ours.sendall(b'{"end": true}\n')
        else:
            ours.close()
        result = job.result(timeout=10)
        assert job.processes() == []
    assert result.code == 129, result
    assert "rank 1 was stopped by SIGSTOP (19), as its gang asked" in result.err
    assert "sent what is not understood: 'what?'" in result.err
    assert result.err.count("process that started it") == 1


@pytest.mark.extended
def test_a_rank_that_is_killed_by_the_control_line_is_one_that_died(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    environ = {CONTROL_FD: str(number)}
    with ours, theirs, started(tmp_path, "-n", "2", MISBEHAVE, env=environ, pass_fds=[number]) as job:
        job.wait_for_output("ready", 2)
        ours.sendall(b'{"fault": "kill", "ranks": [1]}\n')
        result = job.result()
    assert result.code == 137
    assert "rank 1 of 2 was killed by SIGKILL (9), as its gang asked" in str(result.verdict()["headline"])


def test_an_invalid_control_line_is_reported(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "2", MISBEHAVE, env={CONTROL_FD: "77"})
    assert result.code == 2 and f"{CONTROL_FD}='77' names no open descriptor" in result.err
