"""Real mpiruns across the hosts of a testbed: do ranks, variables and input arrive as they were planned?

Run as a program, in a host, this file makes a plan there and starts it, with a probe in the agent's place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from launch_modes import MPI, Engine

from jaxrun.backends import mpirun
from jaxrun.job.job import Job
from jaxrun.job.plan import AGENT_ARGV
from jaxrun.protocol.env import AgentEnv

if TYPE_CHECKING:
    import cluster_fixture

TESTBED = Path(__file__).parents[2] / "scripts" / "testbed"
# As bytes: not every value is text.
VALUES = {
    "JRTB_WORDS": b"two  words",
    "JRTB_COMMAS": b"--xla_a=1,2;b=c",
    "JRTB_QUOTES": b'it\'s "so" `x` $HOME \\ %s',
    "JRTB_LINES": b"one\ntwo\r\n",
    "JRTB_EMPTY": b"",
    "JRTB_BYTES": b"\xff\xfe",
    "JRTB_LAST": b"=x=",
}
PROBE = """
import json, os, select, sys
rank, size = (os.environ.get(f"OMPI_COMM_WORLD_{name}") or os.environ[f"PMI_{name}"] for name in ("RANK", "SIZE"))
words = os.read(0, 100) if select.select([0], [], [], 5 if rank == "0" else 0)[0] else b""
found = {
    "size": int(size), "host": os.uname().nodename, "directory": os.getcwd(), "input": words.decode(),
    "cores": sorted(os.sched_getaffinity(0)),
    "values": {name: repr(os.environb.get(name.encode())) for name in sys.argv[2:]},
}
with open(os.path.join(sys.argv[1], f"rank-{rank}.json"), "x") as file:
    json.dump(found, file)
"""
SALLOC = ("salloc", "--quiet", "--time=1", "--nodelist=h1,h2")
# A step that stays on all hosts while its first task runs the command.
STEP = ("srun", "--ntasks-per-node=1", "sh", "-c", 'if [ "$SLURM_PROCID" = 0 ]; then "$@"; else sleep 2; fi', "sh")

pytestmark = pytest.mark.extended


@pytest.mark.parametrize("engine", MPI, ids=lambda engine: engine.label)
@pytest.mark.parametrize(
    ("host", "before", "request_", "expected"),
    [
        ("h1", (), {"host_list": "h1:2,h2:2"}, "h1 h1 h2 h2"),
        ("h1", (), {"host_list": "h3:1,h2:2,h1:1"}, "h3 h2 h2 h1"),
        ("h1", (), {"processes": 3}, "h1 h1 h1"),
        ("ctl", SALLOC, {}, "h1 h2"),
        ("ctl", SALLOC, {"processes": 3}, "h1 h1 h2"),
        ("ctl", SALLOC, {"host_list": "h2:2,h1:1"}, "h2 h2 h1"),
        ("ctl", (*SALLOC, *STEP), {"processes_per_host": 2}, "h1 h1 h2 h2"),
    ],
    ids=["alike", "uneven", "here", "salloc", "salloc uneven", "salloc other order", "in a step"],
)
def test_every_rank_runs_where_it_was_planned_with_all_it_was_given(
    bed: cluster_fixture.Bed,
    engine: Engine,
    host: str,
    before: tuple[str, ...],
    request_: dict[str, object],
    expected: str,
    tmp_path: Path,
) -> None:
    if reason := engine.missing():
        pytest.skip(reason)
    fields = json.dumps({"mpirun": engine.mpirun, **request_})
    command = [TESTBED, "exec", host, "--", *before, sys.executable, __file__, str(tmp_path), fields]
    values = {os.fsencode(name): os.fsencode(value) for name, value in os.environ.items()}
    values[b"JAXRUN_TESTBED_DIR"] = os.fsencode(bed.root)
    environ = {**values, **{name.encode(): value for name, value in VALUES.items()}}
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = expected.split()
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(len(ranks))]
    assert [rank["host"] for rank in found] == ranks
    assert [rank["input"] for rank in found] == ["words\n", *[""] * (len(ranks) - 1)]
    for rank in found:
        assert rank["size"] == len(ranks)
        assert rank["values"] == {name: repr(value) for name, value in VALUES.items()}
        assert rank["directory"] == os.getcwd()
        assert rank["cores"] == sorted(os.sched_getaffinity(0))


def start(directory: str, fields: str) -> int:
    """Plan a job as jaxrun would here, and start it; every rank leaves a file in the directory."""
    job = Job(program=("p",), backend="mpirun", env={"JRTB_LAST": os.environ["JRTB_LAST"]}, **json.loads(fields))
    made = mpirun.plan(job, os.environ, "ab" * 16)
    command = made.launch_command
    assert command is not None
    probe = Path(directory, "probe.py")
    probe.write_text(PROBE)
    words = "\0".join(command.argv).replace(
        "\0".join(AGENT_ARGV), "\0".join([sys.executable, str(probe), directory, *VALUES])
    )
    unset = dict.fromkeys(AgentEnv.variable_names(), "-")
    environ = {**made.base_env(os.environ), **unset, **command.set_env}
    status = subprocess.run(words.split("\0"), env=environ, input=b"words\n", timeout=40).returncode
    hosts = [worker.host for worker in made.workers]
    found = [json.loads(Path(directory, f"rank-{rank}.json").read_text())["host"] for rank in range(len(hosts))]
    assert hosts == found or not (job.host_list or "SLURM_JOB_ID" in os.environ), f"{hosts} planned, {found} found"
    return status


if __name__ == "__main__":
    sys.exit(start(*sys.argv[1:]))
