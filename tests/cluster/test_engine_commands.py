"""Real mpiruns, srun and sbatch: do ranks, variables and input arrive as they were planned?

A plan is made on a host and started there, with a probe in the agent's place, and in that of `jaxrun` in batch scripts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_fixture import Bed
from harness import TIME_LIMIT
from launch_modes import MPI, OPEN_MPI_5, Engine

pytestmark = pytest.mark.extended

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
# An mpirun may leave the input of others open, srun does not.
PROBE = """
import json, os, select, sys
env = os.environ
rank = env.get("OMPI_COMM_WORLD_RANK") or env.get("PMI_RANK") or env["SLURM_PROCID"]
by_mpi = "SLURM_PROCID" not in env or "PMI_RANK" in env or "OMPI_COMM_WORLD_RANK" in env
ready = not by_mpi or select.select([0], [], [], 60 if rank == "0" else 0)[0]
found = {
    "size": int(env.get("OMPI_COMM_WORLD_SIZE") or env.get("PMI_SIZE") or env["SLURM_NTASKS"]),
    "host": os.uname().nodename, "directory": os.getcwd(), "input": os.read(0, 100).decode() if ready else "",
    "cores": sorted(os.sched_getaffinity(0)), "cpus": env.get("SLURM_CPUS_PER_TASK"),
    "values": {name: repr(os.environb.get(name.encode())) for name in sys.argv[2:]},
}
with open(os.path.join(sys.argv[1], f"rank-{rank}.json"), "x") as file:
    json.dump(found, file)
"""
# Makes the plan as the launcher would where it runs, starts it with the probe, and prints what was planned.
STARTS = """
import json, os, subprocess, sys
from jaxrun.errors import JaxrunError
from jaxrun.spec.backends.planning import make_plan
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import AGENT_ARGV
from jaxrun.protocol.env import AgentEnv
directory, probe, backend, fields, *names = sys.argv[1:]
env = {"JRTB_LAST": os.environ["JRTB_LAST"]}
try:
    job = Job(program=("p",), backend=backend, env=env, **json.loads(fields))
    made = make_plan(job, os.environ, "ab" * 16)
except JaxrunError as error:
    sys.exit(str(error))
command = made.launch_command
agent = [sys.executable, "-c", probe, directory, *names]
argv = chr(0).join(command.argv).replace(chr(0).join(AGENT_ARGV), chr(0).join(agent)).split(chr(0))
environ = {**made.base_env(os.environ), **dict.fromkeys(AgentEnv.variable_names(), "-"), **command.set_env}
environ = {name: value for name, value in environ.items() if name not in command.unset_env or name in command.set_env}
status = subprocess.run(argv, env=environ, input=b"words").returncode
planned = [worker.host for worker in made.workers]
print(json.dumps([planned, command.set_env.get("SRUN_CPUS_PER_TASK")]))
sys.exit(status)
"""
# Submits the batch script of a job, with the command given in place of jaxrun.
SUBMITS = """
import ast, os, re, sys
from pathlib import Path
from jaxrun.spec.backends import sbatch
from jaxrun.errors import JaxrunError
from jaxrun.spec.job.job import Job
from jaxrun.spec.backends.submit import submit_and_follow
job = Job(program=("p",), backend="slurm", **ast.literal_eval(sys.argv[1]))
text = sbatch.sbatch_script(job, directory=os.getcwd(), file="job.sh")
text = re.sub("(?m)^exec .*$", lambda _: "exec " + sys.argv[2], text)
try:
    sys.exit(submit_and_follow(sbatch.SLURM, text, Path("job.sh"), os.environ))
except JaxrunError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def inside(bed: Bed, host: str, directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **{name: os.fsdecode(value) for name, value in VALUES.items()}}
    started = bed.start("exec", host, "--", *words, cwd=directory, env=environ)
    output, errors = started.communicate(timeout=TIME_LIMIT)
    return subprocess.CompletedProcess(words, started.returncode, output, errors)


def starts(directory: Path, backend: str, request: dict[str, object]) -> list[str]:
    return [sys.executable, "-c", STARTS, str(directory), PROBE, backend, json.dumps(request), *VALUES]


def check_ranks(directory: Path, hosts: list[str], reader: str = "0") -> list[dict[str, object]]:
    """What each rank found, which was planned on these hosts; `reader` is the rank that has the input."""
    found = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(len(hosts))]
    assert [one["host"] for one in found] == hosts
    assert [one["input"] for one in found] == ["words" * (reader == str(rank)) for rank in range(len(hosts))]
    for one in found:
        assert one["size"] == len(hosts)
        assert one["values"] == {name: repr(value) for name, value in VALUES.items()}
        assert one["directory"] == str(directory)
    return found


SALLOC = ("salloc", "--quiet", "--nodelist=h1,h2")
# A step that stays on all hosts while its first task runs the command.
STEP = ("srun", "--ntasks-per-node=1", "sh", "-c", 'if [ "$SLURM_PROCID" = 0 ]; then "$@"; else sleep 2; fi', "sh")
PLACEMENTS = {
    "uneven": ("h1", (), {"host_list": "h3:1,h2:2,h1:1"}, "h3 h2 h2 h1"),
    "here": ("h1", (), {"processes": 3}, "h1 h1 h1"),
    "salloc uneven": ("ctl", SALLOC, {"processes": 3}, "h1 h1 h2"),
    "in a step": ("ctl", (*SALLOC, *STEP), {"processes_per_host": 2}, "h1 h1 h2 h2"),
    "alike": ("h1", (), {"host_list": "h1:2,h2:2"}, "h1 h1 h2 h2"),
    "salloc": ("ctl", SALLOC, {}, "h1 h2"),
    "salloc other order": ("ctl", SALLOC, {"host_list": "h2:2,h1:1"}, "h2 h2 h1"),
}


@pytest.mark.parametrize(
    ("engine", "placement"),
    [
        pytest.param(engine, placement, id=f"{engine.label} {placement}")
        for engine in MPI
        for placement in list(PLACEMENTS)[: 7 if engine is OPEN_MPI_5 else 4]
    ],
)
def test_mpirun_puts_every_rank_where_it_was_planned_with_all_it_was_given(
    bed: Bed, tmp_path: Path, engine: Engine, placement: str
) -> None:
    if reason := engine.missing():
        pytest.skip(reason)
    host, before, request, expected = PLACEMENTS[placement]
    done = inside(bed, host, tmp_path, *before, *starts(tmp_path, "mpirun", {"mpirun": engine.mpirun, **request}))
    assert done.returncode == 0, done
    planned, _ = json.loads(done.stdout.splitlines()[-1])
    assert planned == expected.split() or placement == "here"
    for one in check_ranks(tmp_path, expected.split()):
        assert one["cores"] == sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("salloc", "request_", "hosts"),
    [
        ("-N3 -n3 -c4", {}, "h1 h2 h3"),
        ("-N3 -n3 -c4", {"processes": 5}, "h1 h1 h2 h2 h3"),
        ("-N3 -n3 -c4", {"hosts": 2, "processes_per_host": 2}, "h1 h1 h2 h2"),
        ("-N3 -n3 -c4", {"processes": 13, "slurm_args": ("--overcommit",)}, ""),
        ("-N3 -n5 -c1", {"hosts": 2}, ""),
        ("-N2 --ntasks-per-node=2", {}, "h1 h1 h2 h2"),
        ("-N2 -n2 -c4", {"stdin": "1"}, "h1 h2"),
        ("-N2 --ntasks-per-node=1 -c3 srun -N1 -n1 --input=none", {}, "h1 h2"),
    ],
)
def test_srun_puts_every_rank_where_it_was_planned_with_all_it_was_given(
    bed: Bed, tmp_path: Path, salloc: str, request_: dict[str, object], hosts: str
) -> None:
    options = salloc.split()
    words = ("salloc", *options[:3], "--quiet", "--nodelist=h1", *options[3:])
    leaks = ("env", "SLURM_LABELIO=1", "SLURM_NO_KILL=1", "SLURM_EXPORT_ENV=NONE")
    done = inside(bed, "ctl", tmp_path, *words, *leaks, *starts(tmp_path, "slurm", request_))
    assert (done.returncode, done.stderr) == (0, ""), done
    planned, each = json.loads(done.stdout)
    assert not hosts or planned == hosts.split()
    for one in check_ranks(tmp_path, planned, str(request_.get("stdin", "0"))):
        assert one["cpus"] == each


def test_a_step_starts_beside_one_that_has_all_cpus(bed: Bed, tmp_path: Path) -> None:
    holds = "srun -N1 -w h1 -n1 -c4 --exact sh -c 'touch held; sleep 1000' &"
    script = f'{holds} until [ -e held ]; do sleep 0.1; done; "$@"; status=$?; kill %1; exit $status'
    allocated = ("salloc", "-N2", "-n2", "-c4", "--quiet", "--nodelist=h1", "bash", "-c", script, "bash")
    done = inside(bed, "ctl", tmp_path, *allocated, *starts(tmp_path, "slurm", {"processes": 1}))
    assert done.returncode == 0, done
    check_ranks(tmp_path, ["h1"])


def test_a_submitted_job_is_followed_to_its_end(bed: Bed, tmp_path: Path) -> None:
    command = "sh -c 'echo $HOME_OF_IT; srun --overlap -n2 hostname; echo \"$SLURM_JOB_NAME\"; exit 7'"
    request = repr({"hosts": 2, "processes": 2, "time_limit": "10", "tag": 'it\'s a "name" # 1'})
    variables = ("HOME_OF_IT=ctl", "SBATCH_EXPORT=NONE", "SBATCH_OUTPUT=/nonexistent/x", "SLURM_CPUS_PER_TASK=3")
    done = inside(bed, "ctl", tmp_path, "env", *variables, sys.executable, "-c", SUBMITS, request, command)
    assert done.returncode == 7, done.stderr
    first, *hosts, name = done.stdout.splitlines()
    assert (first, len(set(hosts)), name) == ("ctl", 2, 'it\'s a "name" # 1')
    assert re.search(r"^jaxrun: submitted job \d+", done.stderr)
    assert [path.read_text() for path in tmp_path.glob("jaxrun-*.out")] == [done.stdout]


def test_a_signal_reaches_the_command_of_the_script_itself(bed: Bed, tmp_path: Path) -> None:
    command = "bash -c 'trap \"echo told; exit 75\" TERM; scancel --batch --signal=TERM $SLURM_JOB_ID; sleep 99 & wait'"
    done = inside(bed, "ctl", tmp_path, sys.executable, "-c", SUBMITS, "{}", command)
    assert done.returncode == 75 and "told" in done.stdout, done.stderr
