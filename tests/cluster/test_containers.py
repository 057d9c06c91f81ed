"""docker/: both images are built, and what docker/README.md shows is run, without Docker, a daemon or a registry.

buildah builds on a base image of files that scripts/containers has installed, and podman runs the containers, which
need no privileges. Its storage is a temporary directory and its networks are in a network namespace, so nothing stays.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import TIME_LIMIT, wait_until

ROOT = Path(__file__).parents[2]
BASE = ROOT / ".containers/base"
PAGE = (ROOT / "docker/README.md").read_text()
PROGRAM = "jaxrun_runtime.programs.regression"
RIGHT = "y = 2.030 x - 1.004"
BUILD_LIMIT_S = 500
SUBNET = "10.89.77"
# podman asks for more than a container's user may have, unless it is told.
AS_USER = ("--init", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4000:4000")

# The time of a test begins when the images are there; building each of them has a limit of its own.
pytestmark = [pytest.mark.extended, pytest.mark.timeout(2 * TIME_LIMIT, func_only=True)]


@dataclass(frozen=True)
class Containers:
    """Runs podman. `storage` has all images and containers, `namespace` the networks."""

    storage: Path
    namespace: str

    def options(self) -> list[str]:
        kind = subprocess.run(["stat", "-f", "-c", "%T", self.storage], capture_output=True, text=True).stdout.strip()
        driver = "vfs" if kind.startswith("overlay") else "overlay"  # which cannot be on one of its kind
        return ["--root", f"{self.storage}/root", "--runroot", f"{self.storage}/run", "--storage-driver", driver]

    def build(self, *words: str) -> str:
        """Run buildah, on the machine's own network; returns its standard output."""
        done = subprocess.run(
            ["buildah", *self.options(), *words], cwd=ROOT, capture_output=True, text=True, timeout=BUILD_LIMIT_S
        )
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-4000:])
        return done.stdout.strip()

    def podman(self, *words: str) -> subprocess.CompletedProcess[str]:
        of_runtime = ["--runtime", "runc", "--cgroup-manager", "cgroupfs"]
        networks = ["--network-config-dir", f"{self.storage}/networks"]
        command = ["nsenter", f"--net=/run/netns/{self.namespace}", "podman", *self.options(), *of_runtime, *networks]
        return subprocess.run([*command, *words], capture_output=True, text=True, timeout=TIME_LIMIT)

    def succeed(self, *words: str) -> str:
        done = self.podman(*words)
        assert done.returncode == 0, (words, done)
        return done.stdout

    def logs(self, name: str) -> str:
        done = self.podman("logs", name)
        return done.stdout + done.stderr

    def processes(self, name: str) -> list[str]:
        return self.succeed("top", name, "args").splitlines()[1:]


@pytest.fixture(scope="module")
def containers() -> Iterator[Containers]:
    """The images, as `jaxrun` and `jaxrun-cluster`."""
    missing = [name for name in ("buildah", "podman", "runc", "conmon", "ip") if shutil.which(name) is None]
    if os.geteuid() or missing or not (BASE / "usr/bin/python3").exists():
        pytest.skip(f"no {', '.join(missing) or 'base image'} here; scripts/containers installs all as root")
    # podman takes a path of at most 50 characters, which those of pytest exceed after a thousand runs.
    made = Containers(Path(tempfile.mkdtemp(prefix="containers-")), f"containers-{os.getpid()}")
    (made.storage / "networks").mkdir()
    subprocess.run(["ip", "netns", "add", made.namespace], check=True)
    try:
        subprocess.run(["ip", "-n", made.namespace, "link", "set", "lo", "up"], check=True)
        build_images(made)
        made.succeed("network", "create", "--subnet", f"{SUBNET}.0/24", "hosts")
        yield made
    finally:
        made.podman("rm", "--force", "--all", "--time", "0")
        subprocess.run(["ip", "netns", "del", made.namespace], check=True)
        for folder in (made.storage / "root/overlay", made.storage / "root"):  # what podman keeps mounted
            subprocess.run(["umount", "--lazy", folder], stderr=subprocess.DEVNULL)
        shutil.rmtree(made.storage)


def build_images(made: Containers) -> None:
    base = made.build("from", "scratch")
    made.build("add", "--quiet", base, str(BASE), "/")
    for path in ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt"):  # how pip reaches an index from here
        if Path(path).exists():
            made.build("copy", "--quiet", base, path, path)
    made.build("commit", "--quiet", "--rm", base, "localhost/base")
    for target, tag in {"cluster": "jaxrun-cluster", "jaxrun": "jaxrun"}.items():
        isolated = ["--isolation", "chroot", "--network", "host", "--layers"]
        image = ["--build-arg", "BASE=localhost/base", "--target", target, "--file", "docker/Dockerfile", "--tag", tag]
        made.build("bud", *isolated, *image, ".")


def commands(before: str) -> list[list[str]]:
    """The words after these in the commands of the page."""
    return [shlex.split(line) for line in re.findall(rf"^\$ {re.escape(before)} (.*)$", PAGE, re.MULTILINE)]


def test_the_first_commands_of_the_page_run_as_a_user_with_little_memory_and_no_network(containers: Containers) -> None:
    """With 64 MiB of /dev/shm, as containers have it."""
    shown = commands("docker run --rm --init jaxrun")
    assert len(shown) == 2 and "mpirun" in shown[1]
    little = (*AS_USER, "--network", "none", "--memory", "2g", "localhost/jaxrun")
    held = containers.succeed("run", "--rm", *little, "sh", "-c", "id -u; df -m --output=size /dev/shm | tail -n 1")
    assert held.split()[0] == "1000" and int(held.split()[1]) <= 64
    for words in shown:
        assert RIGHT in containers.succeed("run", "--rm", *little, *words)


def test_two_containers_of_a_network_form_one_job(containers: Containers) -> None:
    common = (*AS_USER, "--network", "hosts", "--env", f"JAXRUN_TOKEN={secrets.token_hex()}")
    for host in (0, 1):
        words = f"jaxrun --hosts 2 --host-rank {host} --head {SUBNET}.2:7777 -n 4 -m {PROGRAM}".split()
        address = f"{SUBNET}.{2 + host}"
        containers.succeed(
            "run", "--detach", "--name", f"host{host}", *common, "--ip", address, "localhost/jaxrun", *words
        )
    assert containers.succeed("wait", "host0", "host1").split() == ["0", "0"]
    assert RIGHT in containers.logs("host0") and "ranks 2-3 of 4 join the head" in containers.logs("host1")


def test_docker_stop_ends_all_ranks_in_time(containers: Containers) -> None:
    program = "import time\nprint('ready', flush=True)\ntime.sleep(1000)"
    shell = f"echo {shlex.quote(program)} > sleeps.py; exec jaxrun -n 2 --grace 5 sleeps.py"
    containers.succeed(
        "run", "--detach", "--name", "stopped", *AS_USER, "--network", "none", "localhost/jaxrun", "sh", "-c", shell
    )
    wait_until(lambda: containers.logs("stopped").count("ready") == 2)
    containers.succeed("stop", "--time", "20", "stopped")
    assert containers.succeed("wait", "stopped").strip() == "143"  # 137 if it had to be killed
    assert "interrupted by SIGTERM (15)" in containers.logs("stopped")


@pytest.fixture(scope="module")
def cluster(containers: Containers) -> Containers:
    """The three containers of compose.yaml."""
    address = {"controller": f"{SUBNET}.10", "c1": f"{SUBNET}.11", "c2": f"{SUBNET}.12"}
    names = [f"--add-host={name}:{where}" for name, where in address.items()]
    volumes = ("--volume", "munge:/etc/munge", "--volume", "jobs:/jobs")
    daemons = {"controller": ["slurmctld", "c1", "c2"], "c1": ["slurmd", "controller"], "c2": ["slurmd", "controller"]}
    for name, words in daemons.items():
        where = ("--name", name, "--hostname", name, "--network", "hosts", "--ip", address[name], *names, *volumes)
        containers.succeed("run", "--detach", *AS_USER, *where, "localhost/jaxrun-cluster", *words)
    idle = ("exec", "controller", "sinfo", "--noheader", "--format=%T %D")
    wait_until(lambda: containers.podman(*idle).stdout == "idle 2\n")
    return containers


@pytest.mark.parametrize("words", commands("docker compose exec controller"), ids=" ".join)
def test_a_command_of_the_page_runs_in_the_cluster(cluster: Containers, words: list[str]) -> None:
    done = cluster.podman("exec", "controller", *words)
    assert done.returncode == 0 and RIGHT in done.stdout, done


def test_the_page_shows_five_ways_to_start_a_job_in_the_cluster() -> None:
    assert len(commands("docker compose exec controller")) == 5


def test_a_rank_that_fails_in_the_cluster_is_named_and_nothing_is_left(cluster: Containers) -> None:
    program = "import jax, sys, time\nif jax.process_index(): sys.exit(7)\ntime.sleep(1000)"
    cluster.succeed("exec", "controller", "sh", "-c", f"echo {shlex.quote(program)} > fails.py")
    words = shlex.split("salloc -N 2 jaxrun --backend slurm -n 2 fails.py")
    done = cluster.podman("exec", "controller", *words)
    assert done.returncode == 7 and "rank 1 of 2 on c2" in done.stderr, done
    for name in ("controller", "c1", "c2"):
        wait_until(lambda name=name: not [args for args in cluster.processes(name) if "python" in args])
