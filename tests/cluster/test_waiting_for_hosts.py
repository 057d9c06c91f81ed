"""A job that waits for its host (--wait-hosts): a host loses its power, and is back with another address.

JAXRUN_WAIT_ROUNDS is how often each host does so; without it once.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cluster_fixture import HOSTS, Bed
from harness import TIME_LIMIT, wait_until
from launch_modes import PYTHON
from state import Place, address

ROUNDS = int(os.environ.get("JAXRUN_WAIT_ROUNDS", "1"))
HEAD = "host0.job"
TOKEN = "0123456789abcdef0123456789abcdef"
# Each rank says in a file of its own when it begins and what it has done; it ends once there is a file "go".
STEPS = """
import json, os, sys, time
import jax, jax.numpy as jnp
import jaxrun_runtime as jr
from jax.experimental.multihost_utils import broadcast_one_to_all
from jax.sharding import NamedSharding, PartitionSpec

log = open(f"{sys.argv[1]}/rank-{jr.rank}.jsonl", "a", buffering=1)
mesh = jax.make_mesh((jax.device_count(),), ("data",))
state = {"x": jax.device_put(jnp.zeros(48), NamedSharding(mesh, PartitionSpec("data")))}
one_step = jax.jit(lambda state: {"x": state["x"] + jnp.sum(state["x"]) * 0 + 1})
found = jr.restore(state)
step, state = (found.step, found.state) if found else (0, state)
made = {"rank": jr.rank, "attempt": jr.attempt().number, "host": os.uname().nodename, "pid": os.getpid()}
log.write(json.dumps({**made, "from": step, "time": time.time()}) + "\\n")
while not broadcast_one_to_all(os.path.exists(f"{sys.argv[1]}/go")):  # the same step is the last one of all ranks
    state = one_step(state)
    step += 1
    assert float(jax.jit(jnp.min)(state["x"])) == step, (step, state)
    jr.snapshot(step, state)
    log.write(json.dumps({"step": step, "time": time.time()}) + "\\n")
    time.sleep(0.02)
    if jr.should_stop():
        break
    if float(jax.jit(jnp.max)(state["x"])) > 1e9:
        break
"""


@dataclass
class Round:
    """A job of one command on each host, and what its ranks have written."""

    bed: Bed
    directory: Path
    words: tuple[str, ...] = ()
    commands: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    logs: list[Path] = field(default_factory=list)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, number: int, on: str = "") -> float:
        """Type the command of a host, there or on another one; returns when."""
        words = [
            "--hosts",
            str(len(HOSTS)),
            "--host-rank",
            str(number),
            "--head",
            f"{HEAD}:7788",
            "-n",
            str(len(HOSTS)),
        ]
        words += ["--platform", "cpu", "--max-restarts", "3", *self.words, "steps.py", str(self.directory)]
        self.logs.append(self.directory / f"host-{number}-{len(self.logs)}.txt")
        environ = {**os.environ, "JAXRUN_TOKEN": TOKEN, "JAX_PLATFORMS": "cpu"}
        with open(self.logs[-1], "w") as log:
            self.commands[number] = self.bed.start(
                *("exec", on or HOSTS[number], "--", PYTHON, "-m", "jaxrun", *words),
                cwd=self.directory,
                env=environ,
                stdout=log,
                stderr=log,
            )
        self.started.append(self.commands[number])
        return time.time()

    def lines(self, rank: int) -> list[dict[str, Any]]:
        text = ""
        with suppress(FileNotFoundError):
            text = (self.directory / f"rank-{rank}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def starts(self, rank: int) -> list[dict[str, Any]]:
        return [line for line in self.lines(rank) if "from" in line]

    def steps(self, rank: int) -> list[dict[str, Any]]:
        return [line for line in self.lines(rank) if "step" in line]

    def wait_for_steps(self, attempt: int, count: int = 3) -> None:
        """Until all ranks have made some steps in this attempt."""

        def have_come() -> bool:
            assert all(one.poll() is None for one in self.commands.values()), self.said()
            starts = [self.starts(rank) for rank in range(len(HOSTS))]
            if not all(len(each) >= attempt for each in starts):
                return False
            return all(
                len([step for step in self.steps(rank) if step["time"] > starts[rank][attempt - 1]["time"]]) >= count
                for rank in range(len(HOSTS))
            )

        try:
            wait_until(have_come, f"attempt {attempt}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def end(self) -> list[int]:
        (self.directory / "go").touch()
        return [self.commands[number].wait(TIME_LIMIT) for number in range(len(HOSTS))]

    def said(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self.logs)


@contextmanager
def renamed(bed: Bed) -> Iterator[Path]:
    """The file in which all hosts of the testbed look names up; it is as before afterwards."""
    names = Place(bed.root).etc / "hosts"
    before = names.read_text()
    try:
        yield names
    finally:
        names.write_text(before)


@contextmanager
def job(bed: Bed, directory: Path, *words: str) -> Iterator[Round]:
    """The commands of all hosts, running; whatever the test does, none of them runs on."""
    directory.mkdir(exist_ok=True)
    (directory / "steps.py").write_text(STEPS)
    made = Round(bed, directory, words)
    with renamed(bed) as names, ExitStack() as stack:
        names.write_text(f"{names.read_text()}{address('h1')} {HEAD}\n")
        stack.callback(end_all, made)
        for number in range(len(HOSTS)):
            made.start(number)
        yield made


def end_all(made: Round) -> None:
    for one in made.started:
        one.kill()
        one.wait()
    for left in made.bed.job_processes():
        with suppress(ProcessLookupError):
            os.kill(left.pid, 9)


def turn_off_and_on(bed: Bed, number: int) -> None:
    """The host of this number loses its power, and has it again, and another address."""
    host, other = HOSTS[number], f"10.77.0.{60 + number}"
    bed.run("off", host)
    bed.turn_on_elsewhere(host, other)
    if number == 0:
        names = Place(bed.root).etc / "hosts"
        names.write_text(re.sub(rf"\S+ {HEAD}", f"{other} {HEAD}", names.read_text()))


def check(made: Round, number: int, there_at: float) -> str:
    """Same ranks, none started twice, at most one step lost, the next one soon; returns the figures."""
    lost, late = [], []
    for rank in range(len(HOSTS)):
        starts, steps = made.starts(rank), made.steps(rank)
        assert [start["attempt"] for start in starts] == [1, 2], (starts, made.said())
        assert [start["host"] for start in starts] == [HOSTS[rank]] * 2, starts
        before = [step["step"] for step in steps if step["time"] < starts[1]["time"]]
        after = [step for step in steps if step["time"] >= starts[1]["time"]]
        lost.append(max(before) - (after[0]["step"] - 1))
        late.append(after[0]["time"] - there_at)
    figures = f"host {number}: {max(lost)} steps repeated, next step after {max(late):.2f} s"
    assert max(lost) <= 1, figures
    return figures


@pytest.mark.extended
@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("number", [2, 0])
def test_a_host_that_is_there_again_with_another_address_has_its_ranks_again(
    bed: Bed, tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for round_number in range(ROUNDS):
        with job(bed, tmp_path / str(round_number), "--wait-hosts", "60") as made:
            made.wait_for_steps(1)
            turn_off_and_on(bed, number)
            there_at = made.start(number)
            made.wait_for_steps(2)
            statuses = made.end()
            assert statuses == [0, 0, 0], made.said()
            figures = check(made, number, there_at)
            with capsys.disabled():
                print(f"\n{figures}")
                if os.environ.get("JAXRUN_WAIT_SHOW"):
                    print(made.said())
        bed.run("off", HOSTS[number])
        bed.run("up")
        bed.moved.clear()


@pytest.mark.extended
@pytest.mark.usefixtures("mended")
def test_a_host_that_was_given_up_is_refused_once_another_has_its_place(bed: Bed, tmp_path: Path) -> None:
    with job(bed, tmp_path / "job", "--wait-hosts", "60") as made:
        made.wait_for_steps(1)
        bed.run("cut", HOSTS[2])
        cut_off = made.commands[2]
        wait_until(lambda: "waiting for h3 (rank 2)" in made.logs[0].read_text(), "the wait for h3")
        made.start(2, on=HOSTS[1])
        made.wait_for_steps(2)
        bed.run("mend", HOSTS[2])
        assert cut_off.wait(TIME_LIMIT) == 69, made.said()
        assert "this job runs already: its rank 2 is another process, on h2" in made.logs[2].read_text(), made.said()
        assert made.end() == [0, 0, 0], made.said()
    assert "h2 takes the place of h3 (rank 2)" in made.logs[0].read_text()
