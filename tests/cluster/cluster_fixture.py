"""Whole jobs on the hosts of a testbed, typed as a user types them there, and what is left of them on any host."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import harness
import hosts
import processes
import sshd
from harness import TIME_LIMIT, Found, Result, wait_until, write_fake_runtime
from launch_modes import LaunchMode
from processes import Process
from state import CONTROLLER, Place, address

from jaxrun.node.agent.guard import find_marked, job_marker

TESTBED = Path(__file__).parents[2] / "scripts" / "testbed"
HOSTS = ("h1", "h2", "h3")
# Parts of the code of a worker by hand. SIGTERM does not end one of JAX's either.
RUNS = "signal.signal(signal.SIGTERM, signal.SIG_IGN); run(); "
READY = "print('ready', flush=True); time.sleep(1000)"
# The program ends well once the file of this name is there.
UNTIL_GO = (
    RUNS + "print('ready', flush=True); any(iter(lambda: time.sleep(0.01) or os.path.exists({!r}), True)); done()"
)
# What an engine runs, beside the processes that it was asked for.
ENGINE = (
    *("mpirun", "prterun", "prted", "orted", "mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_proxy", "srun"),
    *("ssh", "sh"),
)
_DAEMONS = ("munged", "slurmctld", "slurmscriptd", "slurmd", "slurmstepd", "sge_qmaster", "sge_execd")
_RANK_0 = (b"OMPI_COMM_WORLD_RANK=0", b"PMI_RANK=0", b"SLURM_PROCID=0")


@dataclass(frozen=True)
class Bed:
    """The testbed in the directory `root`."""

    root: Path
    hosts: tuple[str, ...] = HOSTS
    moved: set[str] = field(default_factory=set)  # hosts that have another address until they are off the next time

    def start(self, *words: str, **popen: object) -> subprocess.Popen[str]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": os.environ, **popen}
        options["env"] = {**options["env"], "JAXRUN_TESTBED_DIR": str(self.root)}  # type: ignore[dict-item]
        return subprocess.Popen(
            [TESTBED, *words],
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            **options,  # type: ignore[call-overload]
        )

    def run(self, *words: str, status: int = 0) -> str:
        """The output of scripts/testbed WORDS, standard error after standard output."""
        started = self.start(*words)
        output, errors = started.communicate(timeout=TIME_LIMIT)
        assert started.returncode == status, output + errors
        return output + errors

    def inside(self, host: str, *command: str, status: int = 0) -> str:
        return self.run("exec", host, "--", *command, status=status)

    def turn_on_elsewhere(self, host: str, other: str) -> None:
        """Give a host that is off its power again, with another address."""
        self.run("up")
        self.moved.add(host)
        self.inside(host, "ip", "addr", "del", f"{address(host)}/24", "dev", "eth0")
        self.inside(host, "ip", "addr", "add", f"{other}/24", "dev", "eth0")

    def row(self, host: str) -> list[str]:
        """The line of the status: host, address, boot id, link, slurm, processes."""
        rows = (re.split(r"  +", line) for line in self.run("status").splitlines())
        return next(row for row in rows if row[0] == host)

    def processes(self) -> list[int]:
        """What runs on the machine with this testbed's directory in its arguments or environment."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and int(entry.name) != os.getpid():
                    texts = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
                    found += [int(entry.name)] if any(bytes(self.root) in text for text in texts) else []
        return found

    def end_slurmd(self, host: str) -> None:
        """End Slurm's daemon on a host: as `up` starts it again, Slurm learns that the host is there.

        Else it may go on counting the time for which the host was cut off, and end the next job there.
        """
        keeper = hosts.keeper(Place(self.root), host)
        daemons = [
            one.pid for one in processes.scan() if keeper and one.network == keeper.network and one.command == "slurmd"
        ]
        for pid in daemons:
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not any(processes.inspect(pid) for pid in daemons), f"end of slurmd on {host}")

    def job_processes(self) -> list[Process]:
        """All processes on all hosts that are neither the testbed's, nor a daemon of a scheduler or of OpenSSH."""
        keepers = [hosts.keeper(Place(self.root), host) for host in (CONTROLLER, *self.hosts)]
        networks = {keeper.network for keeper in keepers if keeper}
        own = {keeper.pid for keeper in keepers if keeper}
        found = (process for process in processes.scan() if process.network in networks and process.pid not in own)
        found = (process for process in found if not sshd.is_server(process))
        # "slurmstepd: [1.0]", ": slurmscriptd"
        return [process for process in found if process.command.strip(": ").partition(":")[0] not in _DAEMONS]

    @contextmanager
    def typed(self, host: str, *words: str, directory: Path, env: Mapping[str, str] | None = None) -> Iterator[Job]:
        """A command on a host; whatever the test does, nothing of it survives, of Slurm's jobs neither."""
        # To files, as a daemon on a host that is cut off may hold its standard output for long.
        with open(directory / "out", "w") as out, open(directory / "err", "w") as err:
            environ = {**os.environ, **(env or {})}
            process = self.start("exec", host, "--", *words, cwd=directory, env=environ, stdout=out, stderr=err)
        try:
            yield Job(self, process, directory)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if self.job_processes():
                self.inside("ctl", "scancel", "--user=root")
            harness.kill(left.pid for left in self.job_processes())


@contextmanager
def brought_up(names: tuple[str, ...]) -> Iterator[Bed]:
    """A testbed with these hosts, h1 and so on, and nothing is left of it."""
    bed = Bed(Path(tempfile.mkdtemp(prefix="jrtb-")), names)
    takes_down = subprocess.Popen(  # once its input ends, as it does with this process
        ["sh", "-c", 'read -r _; exec "$0" down', TESTBED],
        env={**os.environ, "JAXRUN_TESTBED_DIR": str(bed.root)},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        bed.run("up", "-H", str(len(names)))
        yield bed
    finally:
        takes_down.communicate()
        assert takes_down.returncode == 0 and not bed.root.exists() and not bed.processes()


class Job(harness.Job):
    """A running job. `process` is what the user typed: jaxrun itself, or what starts it."""

    def __init__(self, bed: Bed, process: subprocess.Popen[str], directory: Path) -> None:
        super().__init__(process, directory / "run")
        self.bed = bed
        self.directory = directory

    def log(self, rank: int) -> str:
        with suppress(FileNotFoundError):
            return (self.run_dir / f"rank-{rank:04d}.out").read_text(errors="replace")
        return ""

    def wait_for_output(self, text: str, count: int = len(HOSTS)) -> None:
        super().wait_for_output(text, count)

    def wait_until(self, condition: Callable[[], Found], what: str) -> Found:
        try:
            return super().wait_until(condition, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._situation()}") from None

    def _situation(self) -> str:
        """What the job has printed so far, and how its hosts and the jobs of Slurm and Grid Engine are."""
        printed = "".join((self.directory / name).read_text(errors="replace") for name in ("out", "err"))
        queue = self.bed.inside("ctl", "sh", "-c", "squeue --format='%i %t %R %N'; qstat -f && qstat -j '*' || :")
        running = "\n".join(str(process) for process in self.bed.job_processes())
        return f"{printed[-2000:]}\n{self.bed.run('status')}\n{queue}\n{running[-3000:]}"

    def workers(self) -> list[int]:
        """The processes that carry the job's mark: all workers, and what they have started."""
        return [
            pid
            for pid in find_marked(job_marker(self.job_id))
            if processes.inspect(pid) and (_ran(pid, b"jaxrun_runtime") or _ran(pid, b"jaxrun rank "))
        ]

    def launcher(self) -> int:
        """The process that hosts the head."""
        words = str(self.run_dir)
        own = [
            found.pid
            for found in self.bed.job_processes()
            if found.argv[:3] == (sys.executable, "-m", "jaxrun") and words in found.argv and _may_lead(found)
        ]
        return next(pid for pid in own if parent_of(pid) not in own)  # the other is its guard

    def agent(self, rank: int) -> int:
        """The process that started the worker of this rank."""
        return next(parent_of(pid) for pid in self.workers() if _has(pid, f"JAXRUN_RANK={rank}".encode()))

    def result(self, timeout: float = TIME_LIMIT) -> Result:
        """Once it has ended, or with 0 as it is now, with the exit status -1 while it runs."""
        try:
            code = self.process.wait(timeout) if timeout else self.process.poll()
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error}\n{self._situation()}") from None
        out, err = ((self.directory / name).read_text(errors="replace") for name in ("out", "err"))
        return Result(-1 if code is None else code, out, err, self.run_dir)

    def gone(self, *, but_for: Sequence[str] = ()) -> None:
        """Until no host has a process any more that was not there before the job; `but_for` those commands."""
        left: list[Process] = []

        def is_gone() -> bool:
            left[:] = [process for process in self.bed.job_processes() if process.command not in but_for]
            return not left

        wait_until(is_gone, left)


@dataclass(frozen=True)
class JobRunner:
    """Starts jobs in one launch mode."""

    bed: Bed
    mode: LaunchMode
    directory: Path

    @contextmanager
    def started(
        self, *words: str, ranks_on: tuple[str, ...] = HOSTS, env: Mapping[str, str] | None = None
    ) -> Iterator[Job]:
        """`jaxrun WORDS` with a process on each of these hosts; each process has the variables `env`, too."""
        command = self.mode.command(ranks_on, "--run-dir", str(self.directory / "run"), *words, variables=env or ())
        environ = {**self.mode.engine.env(), **(env or {})}
        with self.bed.typed(self.mode.host, *command, directory=self.directory, env=environ) as job:
            yield job

    def by_hand(
        self, *options: str, code: str = RUNS + READY, rank_1: str = "", hosts: tuple[str, ...] = HOSTS
    ) -> AbstractContextManager[Job]:
        """A job of workers by hand (worker_by_hand.py), without jax: each runs `code`, or rank 1 something else.

        It shows what engine, agents and head do, which know nothing of JAX, for a fourth of the work.
        """
        codes = [code, rank_1 or code, *(code for _ in hosts[2:])]
        return self.started(*options, "by_hand.py", *codes, ranks_on=hosts, env=write_fake_runtime(self.directory))

    def jaxrun(self, *words: str, **more: object) -> Result:
        """Run a job to its end, and check that it has left nothing on any host, nor a file beside its run directory."""
        with self.started(*words, **more) as job:  # type: ignore[arg-type]
            result = job.result()
            job.gone()
        assert not list(self.directory.glob(".jaxrun*")), result
        return result


def _may_lead(process: Process) -> bool:
    """Not one of the other ranks of `jaxrun attach`."""
    return "attach" not in process.argv or any(_has(process.pid, variable) for variable in _RANK_0)


def _has(pid: int, variable: bytes) -> bool:
    with suppress(OSError):
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _ran(pid: int, word: bytes) -> bool:
    with suppress(OSError):
        return word in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def parent_of(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
