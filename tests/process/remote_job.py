"""Jobs whose agents are processes of their own, started by a shell script instead of mpirun; no jax."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from harness import TIME_LIMIT

from jaxrun.agent.guard import find_marked, job_marker
from jaxrun.protocol.names import CONTROL_FD
from jaxrun.rundir.rundir import EVENTS_FILE, VERDICT_FILE

HERE = Path(__file__).parent
SLEEPS = "run(); time.sleep(600)"
READY = "run(); print('ready', flush=True); time.sleep(600)"
CLEAN = "run(); done()"
FAKE_RUNTIME = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
import worker_by_hand
env = worker_by_hand.WorkerEnv.from_env(os.environ)
worker_by_hand.live(env, sys.argv[2 + env.rank])
"""
LAUNCHER = """
import json, os, sys
from pathlib import Path
from jaxrun.backends.remote_plan import plan_remote
from jaxrun.job.fault_spec import parse_faults
from jaxrun.job.job import Job
from jaxrun.job.plan import LaunchCommand
from jaxrun.supervisor.run import run

script, options, *codes = sys.argv[1:]
options = json.loads(options)
if "run_dir" in options:
    options["run_dir"] = Path(options["run_dir"])
if "chaos" in options:
    options["chaos"] = parse_faults(options["chaos"])
size = len(codes)
command = LaunchCommand("open-mpi", "a script", ("/bin/sh", script, str(size)))
job = Job(program=("p", *codes), processes=size, backend="mpirun", platform="cpu", **options)
plan = plan_remote(job, os.environ, os.urandom(16).hex(), command, ["?"] * size)
sys.exit(run(plan, dict(os.environ)))
"""
AGENTS = f"""
rank=0
while [ $rank -lt $1 ]; do
  OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=$1 {sys.executable} -m jaxrun.agent &
  rank=$((rank + 1))
done
wait
"""


class RemoteJob:
    """A job with a worker by hand for each of `codes`, whose agents `script` starts."""

    def __init__(self, directory, codes, script=AGENTS, control=None, **options):
        fake = directory / "fake" / "jaxrun_runtime"
        fake.mkdir(parents=True)
        (fake / "__init__.py").touch()
        (fake / "__main__.py").write_text(FAKE_RUNTIME)
        (directory / "launch").write_text(script)
        self.run_dir = directory / "run"
        options = {"grace": 0.5, "init_timeout": 20.0, "run_dir": str(self.run_dir), **options}
        if options.get("no_run_dir"):
            del options["run_dir"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(directory / "launch"), json.dumps(options), *codes],
            env={
                **os.environ,
                "PYTHONPATH": str(directory / "fake"),
                **({CONTROL_FD: str(control.fileno())} if control else {}),
            },
            pass_fds=[control.fileno()] if control else [],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def job_id(self):
        return json.loads((self.run_dir / "job.json").read_text())["job_id"]

    def events(self, name=None):
        with contextlib.suppress(FileNotFoundError):
            lines = (self.run_dir / EVENTS_FILE).read_text().splitlines()
            return [event for event in map(json.loads, lines) if name in (None, event["event"])]
        return []

    def until(self, condition):
        deadline = time.monotonic() + TIME_LIMIT
        while not (found := condition()):
            assert time.monotonic() < deadline and self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)
        return found

    def until_output(self, text, count=1):
        self.until(lambda: sum(text in path.read_text() for path in self.run_dir.glob("rank-*.out")) >= count)

    def agents(self):
        """Process ids by rank, of those that have started their worker."""
        parents = {}
        for event in self.events("spawned"):
            stat = Path(f"/proc/{event['pid']}/stat").read_text()
            parents[event["rank"]] = int(stat.rpartition(")")[2].split()[1])
        return parents

    def processes(self):
        return list(find_marked(job_marker(self.job_id)))

    def end(self):
        """Its exit status; nothing of the job is left."""
        self.out, self.err = self.process.communicate(timeout=TIME_LIMIT)
        if self.run_dir.exists():
            assert self.processes() == [], self.err
        return self.process.returncode

    def verdict(self):
        return json.loads((self.run_dir / VERDICT_FILE).read_text())

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@contextlib.contextmanager
def remote_jobs(directory):
    """Yields start(CODE, …), which starts a job with a worker by hand for each CODE."""
    with contextlib.ExitStack() as stack:

        def start(*codes, **options):
            job = RemoteJob(directory, codes, **options)
            stack.callback(job.close)
            return job

        yield start
