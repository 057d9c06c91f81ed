"""Jobs of PBS, with stand-ins for its commands that do what OpenPBS's manual pages say.

pbsdsh -n LINE -- WORDS   runs the words on the host of this line of PBS_NODEFILE, with the variables of the job,
                          and neither with the caller's variables nor with its standard input
qrerun                    needs the privilege of an operator
"""

import os
import subprocess
import sys

import pytest
from harness import TIME_LIMIT, write_fake_runtime

from jaxrun.spec.backends.pbs_job import PBS, end_of_job
from jaxrun.spec.backends.submit import submit_and_follow

DONE = "run(); print('MODE', os.environ.get('MODE'), os.environ['PBS_TASKNUM'], flush=True); done()"
PBSDSH = """
[ "$1" = -n ] && [ "$3" = -- ] || exit 9
line=$2; shift 3
echo "$@" >>words
exec env -i PATH=/usr/bin:/bin HOME=/ PBS_JOBID=12.server PBS_TASKNUM=$((line + 1)) "$@" </dev/null
"""


class Pbs:
    """The environment of a job with two hosts, and commands of PBS in `folder`."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "nodes").write_text("one\none\ntwo\n")
        self.environ = {
            **os.environ,
            **write_fake_runtime(folder),
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "PBS_NODEFILE": str(folder / "nodes"),
            "PBS_JOBID": "12.server",
            "PBS_ENVIRONMENT": "PBS_BATCH",
        }

    def command(self, name, text):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\ncd {self.folder}\n{text}\n")
        path.chmod(0o755)

    def jaxrun(self, *words):
        command = [sys.executable, "-m", "jaxrun", "--backend", "pbs", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=TIME_LIMIT
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def pbs(tmp_path):
    return Pbs(tmp_path)


def test_pbsdsh_starts_an_agent_on_each_host_with_the_environment_of_jaxrun(pbs, tmp_path):
    pbs.command("pbsdsh", PBSDSH)
    pbs.environ = {**pbs.environ, "MODE": "fast", "API_TOKEN": "hidden"}
    status, out, err = pbs.jaxrun("--no-run-dir", "by_hand.py", DONE, DONE, DONE)
    assert status == 0, out + err
    assert "3 processes on 2 hosts by pbsdsh" in err
    assert sorted(out.splitlines()) == ["[0] MODE fast 1", "[1] MODE fast 1", "[2] MODE fast 3"]
    words = (tmp_path / "words").read_text().splitlines()
    assert len(words) == 2 and "hidden" not in "".join(words)
    assert not list(tmp_path.glob(".jaxrun*"))


def test_an_agent_that_pbs_cannot_start_ends_the_job(pbs):
    pbs.command("pbsdsh", "echo 'pbsdsh: spawn failed on node 0 err 17000' >&2; exit 1")
    status, _, err = pbs.jaxrun("--no-run-dir", "by_hand.py", DONE, DONE, DONE)
    assert status == 69 and "pbsdsh" in err and "spawn failed on node 0 err 17000" in err


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ("echo $1 >again", "PBS will start job 12.server again"),
        (
            "echo 'qrerun: Unauthorized Request  12.server' >&2; exit 1",
            "(qrerun: Unauthorized Request  12.server); its",
        ),
    ],
)
def test_a_preempted_job_is_started_again_if_pbs_lets_it(pbs, tmp_path, answer, line):
    pbs.command("pbsdsh", PBSDSH)
    pbs.command("qrerun", answer)
    preempted = "run(); os._exit(75)"
    status, out, err = pbs.jaxrun("--requeue", "--run-dir", str(tmp_path / "run"), "by_hand.py", *[preempted] * 3)
    assert status == 75 and line in err, out + err
    assert (tmp_path / "again").exists() == ("will start" in line)
    status, out, err = pbs.jaxrun("--requeue", "--run-dir", str(tmp_path / "run"), "by_hand.py", *[DONE] * 3)
    assert status == 0 and "continues with attempt 2" in err, out + err


def test_an_interactive_job_is_not_started_again(pbs):
    pbs.command("pbsdsh", PBSDSH)
    pbs.environ = {**pbs.environ, "PBS_ENVIRONMENT": "PBS_INTERACTIVE"}
    status, _, err = pbs.jaxrun("--requeue", "by_hand.py", DONE, DONE, DONE)
    assert status == 2 and "--requeue is for a batch job, which PBS can start again, and job 12.server is an" in err


def test_the_end_of_a_job_is_its_start_and_its_walltime_less_the_time_that_jaxrun_needs(pbs):
    pbs.command(
        "qstat", "printf 'Job Id: 12\\n    Resource_List.walltime = 01:00:00\\n    stime = Thu Jan  1 00:00:00 1970\\n'"
    )
    assert end_of_job({**pbs.environ, "TZ": "UTC"}, 0.0) % 3600 == 3590
    pbs.command("qstat", "printf 'Job Id: 12\\n    job_state = R\\n'")
    assert end_of_job(pbs.environ, 0.0) is None


SCRIPT = "#!/bin/bash\n# Written by jaxrun.\nexec >>{}/jaxrun-${{PBS_JOBID%%.*}}.out 2>&1\nexec true\n"


def test_a_submitted_job_is_followed_to_its_end(pbs, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("jaxrun.spec.backends.submit._EARLY_QUERY_S", 0.1)
    pbs.command("qsub", 'cp "$1" submitted; echo 12.server')
    shown = "printf 'Job Id: 12.server\\n    job_state = %s\\n    exec_host = n1/0*4\\n%s'"
    pbs.command(
        "qstat",
        f"""[ "$*" = "-x -f 12.server" ] || exit 9
        if [ ! -e asked ]; then touch asked; {shown} R ""; echo hello >jaxrun-12.out
        else {shown} F "    Exit_status = 3"; fi""",
    )
    text = SCRIPT.format(tmp_path)
    assert submit_and_follow(PBS, text, tmp_path / "job.qsub", pbs.environ) == 3
    out, err = capfd.readouterr()
    assert out == "hello\n" and (tmp_path / "submitted").read_text() == text
    assert f"job 12.server is running on n1; output: {tmp_path}/jaxrun-12.out" in err


def test_a_job_that_pbs_does_not_keep_is_said_to_be_forgotten(pbs, tmp_path):
    pbs.command("qsub", "echo 12.server")
    pbs.command("qstat", "echo 'qstat: Unknown Job Id 12.server' >&2; exit 153")
    command = (
        "import os, sys; from pathlib import Path; from jaxrun.spec.backends.pbs_job import PBS; "
        "from jaxrun.spec.backends.submit import submit_and_follow; from jaxrun.errors import UnavailableError\n"
        "try: submit_and_follow(PBS, '# Written by jaxrun.', Path('job.qsub'), os.environ)\n"
        "except UnavailableError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=tmp_path, env=pbs.environ, capture_output=True, text=True, timeout=60
    )
    assert "PBS has forgotten job 12.server, so nobody knows how it ended" in done.stdout, done.stderr
