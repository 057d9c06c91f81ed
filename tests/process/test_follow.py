"""Submitting a batch script and following its job, with scripts in the place of Slurm's programs."""

import os
import re
import signal
import subprocess
import sys

import pytest
from harness import TIME_LIMIT

from jaxrun.errors import UnavailableError
from jaxrun.spec.backends.sbatch import SLURM
from jaxrun.spec.backends.slurm_job import JobState, parse_job_state
from jaxrun.spec.backends.submit import submit_and_follow

SCRIPT = "#!/bin/bash\n# Written by jaxrun.\n#SBATCH --output=x.out\n#SBATCH --time=5\nexec true\n"
# As a Slurm 22.05 printed it, with a name that is made to mislead.
SHOWN = """JobId=80 JobName=x JobState=FAILED ExitCode=9:9
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901680 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code}
   RunTime=00:00:01 TimeLimit=00:01:00 TimeMin=N/A
   Partition=all AllocNode:Sid=ctl:5435
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList={nodes}
   BatchHost=h1
   Command=/home/me/sig.sh
   WorkDir=/home/me
   StdErr={output}
   StdIn=/dev/null
   StdOut={output}
   Power=

"""
FOLLOW = """
import os, sys
from pathlib import Path
from jaxrun.spec.backends.sbatch import SLURM
from jaxrun.spec.backends.submit import submit_and_follow
sys.exit(submit_and_follow(SLURM, "# Written by jaxrun.", Path(sys.argv[1]), os.environ))
"""


def shown(state, *, reason="None", restarts=0, code="0:0", nodes="h[1-2]", output="/home/me/a b.out"):
    return SHOWN.format(state=state, reason=reason, restarts=restarts, code=code, nodes=nodes, output=output)


class Cluster:
    """An sbatch that gives a job the number 80, and a scontrol that shows the states that were laid out, in turn."""

    def __init__(self, folder):
        self.folder = folder
        self.output = folder / "jaxrun-80.out"
        self.environ = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        (folder / "bin").mkdir()
        self.program("sbatch", 'cp "$2" submitted; env > environ; echo 80')

    def program(self, name, text):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\ncd {self.folder}\n{text}\n")
        path.chmod(0o755)

    def states(self, *texts):
        """What scontrol answers to each question, with a file of the same number that is run before; then the last."""
        for number, text in enumerate(texts, start=1):
            (self.folder / f"{number}.state").write_text(text)
        last = len(texts)
        answer = f"""n=$(($(cat asked 2>/dev/null || echo 0) + 1))
            [ $n -gt {last} ] && n={last}
            echo $n > asked; date +%s.%N >> times
            [ ! -e $n.sh ] || . ./$n.sh
            cat $n.state"""
        self.program("scontrol", answer)

    def when(self, number, text):
        """What happens on the cluster just before the answer of that number."""
        (self.folder / f"{number}.sh").write_text(text)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrun.spec.backends.submit._EARLY_QUERY_S", 0.1)
    monkeypatch.setattr("jaxrun.spec.backends.submit._OUTPUT_POLL_S", 0.05)
    return Cluster(tmp_path)


def test_a_job_is_read_whatever_its_name():
    assert parse_job_state(shown("RUNNING", restarts=2)) == JobState(
        "RUNNING",
        "None",
        "h[1-2]",
        "/home/me/a b.out",
        restarts=2,
        exit_code=0,
        exit_signal=0,
        requeue=True,
        is_batch=True,
    )
    assert parse_job_state(shown("PENDING", reason="Resources", nodes="")).nodes == ""
    assert parse_job_state(shown("PENDING", nodes="(null)")).nodes == ""
    assert parse_job_state("slurm_load_jobs error: Unable to contact slurm controller") is None


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "7:0", 7),
        ("FAILED", "0:9", 137),
        ("CANCELLED", "0:0", 143),
        ("CANCELLED", "0:15", 143),
        ("TIMEOUT", "0:0", 124),
        ("PREEMPTED", "0:0", 75),
        ("NODE_FAIL", "1:0", 69),
        ("OUT_OF_MEMORY", "0:125", 137),
        *((state, "0:0", None) for state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED")),
        ("REQUEUED", "0:0", None),
    ],
)
def test_the_command_ends_as_the_job_did_and_not_before(state, code, status):
    read = parse_job_state(shown(state, code=code))
    assert (read.exit_status if read.is_over else None) == status


def test_output_is_passed_on_byte_by_byte_and_the_end_is_the_jobs(cluster, capfdbinary):
    cluster.states(shown("RUNNING", output=cluster.output), shown("FAILED", code="7:0", output=cluster.output))
    cluster.when(1, r"printf 'one\n\377\0' > jaxrun-80.out")
    cluster.when(2, r"printf 'two, no end' >> jaxrun-80.out")
    assert submit_and_follow(SLURM, SCRIPT, cluster.folder / "job.sh", {**cluster.environ, "SBATCH_OUTPUT": "y"}) == 7
    out, err = capfdbinary.readouterr()
    assert out == b"one\n\xff\0two, no end"
    assert re.fullmatch(
        rb"jaxrun: submitted job 80 \(script: .*/job\.sh\); Ctrl-C stops following, not the job\n"
        rb"jaxrun: job 80 is running on h\[1-2\]; output: .*/jaxrun-80\.out\n",
        err,
    )
    assert (cluster.folder / "submitted").read_text() == SCRIPT
    assert "SBATCH_OUTPUT" not in (cluster.folder / "environ").read_text()


def test_a_job_that_starts_again_is_followed_further(cluster, capfd):
    cluster.states(
        shown("RUNNING", output=cluster.output),
        shown("PENDING", reason="BeginTime", restarts=1, output=cluster.output),
        shown("CANCELLED", restarts=1, output=cluster.output),
    )
    assert submit_and_follow(SLURM, SCRIPT, cluster.folder / "job.sh", cluster.environ) == 143
    err = capfd.readouterr().err
    assert "Slurm starts job 80 again (restart 1)" in err
    assert err.endswith(f"job 80 ended as CANCELLED; output: {cluster.output}\n")


def test_a_controller_that_does_not_answer_is_waited_for(cluster, capfd, monkeypatch):
    monkeypatch.setattr("jaxrun.spec.backends.submit._FIRST_NOTE_S", 0.0)
    monkeypatch.setattr("jaxrun.spec.backends.submit._NEXT_NOTE_S", 0.05)
    cluster.states("", "", shown("COMPLETED", output=cluster.output))
    for number in (1, 2):
        cluster.when(number, 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1')
    assert submit_and_follow(SLURM, SCRIPT, cluster.folder / "job.sh", cluster.environ) == 0
    assert "Slurm does not answer; job 80 is not affected" in capfd.readouterr().err


def test_ctrl_c_leaves_the_job_alone_and_says_how_to_go_on(cluster):
    cluster.states(shown("RUNNING", output=cluster.output))
    path = cluster.folder / "job.sh"
    follower = subprocess.Popen(
        [sys.executable, "-c", FOLLOW, path], env=cluster.environ, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert "submitted job 80" in follower.stderr.readline() and "is running on" in follower.stderr.readline()
        follower.send_signal(signal.SIGINT)
        rest = follower.communicate(timeout=TIME_LIMIT)[1]
    finally:
        follower.kill()
        follower.wait()
    assert follower.returncode == 0
    assert "job 80 continues" in rest and f"tail -f {cluster.output}" in rest and "scancel 80" in rest


def test_a_refusal_is_shown_in_sbatchs_own_words_and_the_script_is_kept(cluster):
    cluster.program("sbatch", 'echo "sbatch: error: invalid partition specified: nope" >&2; exit 1')
    path = cluster.folder / "my job.sh"
    with pytest.raises(UnavailableError) as caught:
        submit_and_follow(SLURM, SCRIPT, path, cluster.environ)
    assert "sbatch: error: invalid partition specified: nope" in str(caught.value)
    assert f"the script is kept: sbatch '{path}'" in str(caught.value)
    assert (caught.value.exit_code, path.read_text()) == (69, SCRIPT)


def test_without_sbatch_the_script_is_kept(tmp_path):
    with pytest.raises(UnavailableError, match="needs sbatch, which is not on PATH; the script is kept"):
        submit_and_follow(SLURM, SCRIPT, tmp_path / "job.sh", {"PATH": str(tmp_path)})
    assert (tmp_path / "job.sh").read_text() == SCRIPT


def test_a_job_that_slurm_has_forgotten_has_no_known_end(cluster):
    cluster.program("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    with pytest.raises(UnavailableError, match="Slurm has forgotten job 80, so nobody knows how it ended"):
        submit_and_follow(SLURM, SCRIPT, cluster.folder / "job.sh", cluster.environ)
