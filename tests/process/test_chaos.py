"""Fault injection: into a job, and by the control line."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from harness import MISBEHAVE, jaxrun, started

from jaxrun.protocol.names import CONTROL_FD


def seconds_after(words: str, text: str) -> float:
    """The number that follows `words` in a text: on a busy machine a fault comes later than asked, never sooner."""
    return float(text.split(words, 1)[1].split()[0])


def test_a_killed_rank_ends_the_job_as_if_it_had_died_by_itself(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "2", "--chaos", "kill:1@300ms", MISBEHAVE)
    assert result.code == 137, result
    assert result.err.splitlines()[0].endswith(" · --chaos kill:1@0.3s")
    headline = str(result.verdict()["headline"])
    assert headline.startswith("rank 1 of 2 was killed by SIGKILL (9), as --chaos asked, ")
    assert seconds_after("as --chaos asked, ", headline) >= 0.3
    assert result.verdict()["culprits"] == [1]
    (note,) = result.events("InjectFault")
    assert (note["kind"], note["to"]) == ("kill", [1])
    assert json.loads((result.run_dir / "job.json").read_text())["chaos"] == ["kill:1@0.3s"]


def test_a_paused_rank_holds_the_others_up_and_is_named(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "2", "--chaos", "pause:1@300ms", "--stall-timeout", "3", MISBEHAVE)
    assert result.code == 124, result
    assert "rank 1 was stopped by SIGSTOP (19), as --chaos asked, " in result.err
    assert "rank 1 is stopped by a signal, and rank 0 waits for it" in result.err


INTERRUPTED = """
import os, time
descriptors = os.listdir("/proc/self/fd")
links = [os.readlink(f"/proc/self/fd/{{name}}") for name in descriptors if os.path.islink(f"/proc/self/fd/{{name}}")]
try:
    print("ready", {name!r} in os.environ, {link!r} in links, flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
time.sleep(600)
"""


def test_the_control_line_interrupts_breaks_and_ends(tmp_path: Path, script) -> None:
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    program = script(INTERRUPTED.format(name=CONTROL_FD, link=os.readlink(f"/proc/self/fd/{number}")))
    environ = {CONTROL_FD: str(number)}
    with ours, theirs, started(tmp_path, "-n", "2", str(program), env=environ, pass_fds=[number]) as job:
        job.wait_for_output("ready False False", 2)
        ours.sendall(b'{"signal": 2}\n')
        job.wait_for_output("interrupted", 2)
        ours.sendall(b'{"fault": "pause", "ranks": [1]}\n{"fault": "kill", "ranks": []}\nwhat?\n')
        ours.close()
        result = job.result()
        assert job.processes() == []
    assert result.code == 129, result
    assert "rank 1 was stopped by SIGSTOP (19), as its gang asked" in result.err
    assert "sent what is not understood: 'what?'" in result.err
    assert result.err.count("process that started it") == 1
