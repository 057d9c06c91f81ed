"""The srun command and the batch script of a job, tried with a real Slurm.

A probe takes the place of the agent, and of `jaxrun` in the batch script.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_fixture import Bed

VALUE = "--a=1,2 \"b\" 'c'\n=d"

PROBE = """
import os, sys
names = "SLURM_PROCID", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "TRIED"
seen = [os.environ.get(name, "") for name in names]
sys.stdout.write("%r\\n" % [*seen, os.uname().nodename, os.getcwd(), sys.stdin.read()])
"""

# Makes the plan as the launcher would where it runs, starts it with the probe, and prints what was planned and seen.
STARTS = """
import ast, json, os, subprocess, sys
from jaxrun.backends import slurm
from jaxrun.errors import JaxrunError
from jaxrun.job.job import Job
from jaxrun.job.plan import AGENT_ARGV
request, probe = ast.literal_eval(sys.argv[1]), sys.argv[2]
try:
    made = slurm.plan(Job(program=("p",), backend="slurm", **request), os.environ, "ab" * 16)
except JaxrunError as error:
    sys.exit(str(error))
environ = {name: value for name, value in os.environ.items() if name not in made.launch_command.unset_env}
argv = [*made.launch_command.argv[: -len(AGENT_ARGV)], sys.executable, "-c", probe]
environ |= made.launch_command.set_env
done = subprocess.run(argv, env=environ, input="input", capture_output=True, text=True)
seen = sorted(ast.literal_eval(line) for line in done.stdout.splitlines())
planned = [worker.host for worker in made.workers], made.launch_command.set_env["SRUN_CPUS_PER_TASK"]
json.dump([planned, seen, done.stderr, done.returncode], sys.stdout)
"""

# Submits the batch script of a job, with the command given in place of jaxrun.
SUBMITS = """
import ast, os, re, sys
from pathlib import Path
from jaxrun.backends import sbatch
from jaxrun.errors import JaxrunError
from jaxrun.job.job import Job
from jaxrun.backends.follow import submit_and_follow
job = Job(program=("p",), backend="slurm", **ast.literal_eval(sys.argv[1]))
text = sbatch.sbatch_script(job, ["p"], directory=os.getcwd(), file="job.sh")
text = re.sub("(?m)^exec .*$", lambda _: "exec " + sys.argv[2], text)
try:
    sys.exit(submit_and_follow(text, Path("job.sh"), os.environ))
except JaxrunError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""

pytestmark = pytest.mark.extended

Inside = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def inside(bed: Bed, tmp_path: Path) -> Inside:
    def inside(*words: str) -> subprocess.CompletedProcess[str]:
        started = bed.start("exec", "ctl", "--", *words, cwd=tmp_path)
        output, errors = started.communicate(timeout=90)
        return subprocess.CompletedProcess(words, started.returncode, output, errors)

    return inside


@pytest.mark.parametrize(
    ("salloc", "request_", "hosts"),
    [
        (["-N3", "-n3", "-c4"], {}, ["h1", "h2", "h3"]),
        (["-N3", "-n3", "-c4"], {"processes": 5}, ["h1", "h1", "h2", "h2", "h3"]),
        (["-N3", "-n3", "-c4"], {"hosts": 2, "processes_per_host": 2}, ["h1", "h1", "h2", "h2"]),
        (["-N3", "-n3", "-c4"], {"processes": 13, "slurm_args": ("--overcommit",)}, None),
        (["-N3", "-n5", "-c1"], {}, None),
        (["-N3", "-n5", "-c1"], {"hosts": 2}, None),
        (["-N2", "--ntasks-per-node=2"], {"stdin": "all"}, ["h1", "h1", "h2", "h2"]),
        (["-N2", "-n2", "-c4"], {"stdin": "1"}, ["h1", "h2"]),
        (["-N2", "--ntasks-per-node=1", "-c3", "srun", "-N1", "-n1", "--input=none"], {}, ["h1", "h2"]),
    ],
)
def test_each_rank_is_where_the_plan_says(
    inside: Inside, tmp_path: Path, salloc: list[str], request_: dict[str, object], hosts: list[str] | None
) -> None:
    words = [*salloc[:3], "--quiet", "--nodelist=h1", *salloc[3:]]
    leaks = ("env", "SLURM_LABELIO=1", "SLURM_NO_KILL=1", "SLURM_EXPORT_ENV=NONE", f"TRIED={VALUE}")
    done = inside("salloc", *words, *leaks, sys.executable, "-c", STARTS, repr(request_), PROBE)
    assert done.returncode == 0, done.stderr
    (planned, each), seen, errors, status = json.loads(done.stdout)
    assert (errors, status) == ("", 0)
    assert [row[4] for row in sorted(seen, key=lambda row: int(row[0]))] == planned
    assert hosts is None or planned == hosts
    for rank, ntasks, cpus, tried, _, cwd, read in seen:
        assert (ntasks, cpus, tried, cwd) == (str(len(seen)), each, VALUE, str(tmp_path))
        assert read == ("input" if request_.get("stdin", "0") in ("all", rank) else "")


def test_a_step_starts_beside_one_that_has_all_cpus(inside: Inside) -> None:
    script = 'srun -N1 -w h1 -n1 -c4 --exact sleep 80 & sleep 0.5; "$@"; kill %1'
    command = (sys.executable, "-c", STARTS, "{'processes': 1}", PROBE)
    began = time.monotonic()
    done = inside("salloc", "-N2", "-n2", "-c4", "--quiet", "--nodelist=h1", "bash", "-c", script, "bash", *command)
    assert time.monotonic() - began < 60
    assert [row[4] for row in json.loads(done.stdout)[1]] == ["h1"], done.stderr


def test_srun_would_refuse_what_is_refused(inside: Inside) -> None:
    words = ("salloc", "-N2", "-n2", "-c2", "--quiet")
    done = inside(*words, sys.executable, "-c", STARTS, "{'processes': 9}", PROBE)
    assert "9 processes x 1 CPU do not fit" in done.stderr
    assert "More processors" in inside(*words, "srun", "-n9", "-c1", "true").stderr


def test_a_submitted_job_is_followed_to_its_end(inside: Inside, tmp_path: Path) -> None:
    command = "sh -c 'echo $HOME_OF_IT; srun --overlap -n2 hostname; echo \"$SLURM_JOB_NAME\"; exit 7'"
    request = repr({"hosts": 2, "processes": 2, "time_limit": "10", "tag": 'it\'s a "name" # 1'})
    variables = ("HOME_OF_IT=ctl", "SBATCH_EXPORT=NONE", "SBATCH_OUTPUT=/nonexistent/x", "SLURM_CPUS_PER_TASK=3")
    done = inside("env", *variables, sys.executable, "-c", SUBMITS, request, command)
    assert done.returncode == 7, done.stderr
    first, *hosts, name = done.stdout.splitlines()
    assert (first, len(set(hosts)), name) == ("ctl", 2, 'it\'s a "name" # 1')
    assert re.search(r"^jaxrun: submitted job \d+", done.stderr)
    assert [path.read_text() for path in tmp_path.glob("jaxrun-*.out")] == [done.stdout]


def test_a_signal_reaches_the_command_of_the_script_itself(inside: Inside) -> None:
    command = "bash -c 'trap \"echo told; exit 75\" TERM; scancel --batch --signal=TERM $SLURM_JOB_ID; sleep 5 & wait'"
    done = inside(sys.executable, "-c", SUBMITS, "{}", command)
    assert done.returncode == 75 and "told" in done.stdout, done.stderr


def test_a_refusal_of_sbatch_is_shown_in_its_words(inside: Inside, tmp_path: Path) -> None:
    done = inside(sys.executable, "-c", SUBMITS, "{'partition': 'nope'}", "true")
    assert done.returncode == 69 and "invalid partition specified: nope" in done.stderr
    assert (tmp_path / "job.sh").exists()
