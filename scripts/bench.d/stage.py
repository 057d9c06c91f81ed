"""Stage: a job on three hosts with Python on a slow file system: without --stage, the first time with it, and again.

Each host mounts an image with the environment from its own block device. The kernel limits the number and bytes of
reads. Between two jobs the image is mounted again, so that none of it is in memory. Copies are in each host's /dev/shm.
The job is one collective by mpirun (Open MPI 5). Needs root, scripts/engines, and the blkio controller of cgroup v1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import kills  # puts the tests' folders on the path
from _bench import Bench, Outcome, grouped, progress, table
from cluster_fixture import HOSTS, Bed
from launch_modes import LAUNCHED, MPI, LaunchMode

HOWS = ("without", "first", "again")
DISK, LIMIT_S = "/dev/shm", 300.0
NEEDED = (
    *("jax", "numpy", "scipy", "ml_dtypes", "opt_einsum", "click", "cloudpickle", "rich", "cryptography"),
    "msgspec",
)


@dataclass(frozen=True)
class Sample:
    """One job: seconds from the command to its end, and MiB that each host has read of the slow file system."""

    how: str
    seconds: float
    mib: tuple[float, ...]
    wrong: str


def make_image(folder: Path) -> None:
    """Make an image of a file system in `folder`, with an environment that has everything for a job."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "root/env"], check=True)
    site, own = next((folder / "root/env/lib").glob("python*/site-packages")), Path(sysconfig.get_path("purelib"))
    for entry in own.iterdir():
        if entry.is_file():
            shutil.copy2(entry, site)
        elif entry.name.lower().startswith(NEEDED):
            shutil.copytree(entry, site / entry.name)
    pages = sum(path.lstat().st_size // 4096 + 1 for path in folder.rglob("*"))
    subprocess.run(["mkfs.ext4", "-q", "-d", folder / "root", folder / "image", f"{pages * 5 + 2**16}k"], check=True)
    shutil.rmtree(folder / "root")
    (folder / "slow").mkdir()


@contextmanager
def mounted(bed: Bed, folder: Path, options: argparse.Namespace) -> Iterator[list[str]]:
    """Mount the image at `folder`/slow on each host, with none of it in memory. Yields the names of the devices."""
    devices = list[str]()
    try:
        for host in HOSTS:
            device = subprocess.check_output(["losetup", "--show", "-rf", folder / "image"], text=True).strip()
            devices.append(Path(device).name)
            limit(devices[-1], options.reads, options.mib_per_s * 2**20)
            bed.inside(host, "mount", "-o", "ro,noload", device, str(folder / "slow"))
        yield devices
    finally:
        for host, name in zip(HOSTS, devices, strict=False):
            bed.inside(host, "sh", "-c", f"umount -l {folder}/slow; true")
            limit(name, 0, 0)
            subprocess.run(["losetup", "-d", f"/dev/{name}"], check=True)


def limit(device: str, reads: int, nbytes: int) -> None:
    """Limit the reads and bytes per second of a device; 0: no limit."""
    number = Path(f"/sys/block/{device}/dev").read_text().strip()
    for what, most in (("iops", reads), ("bps", nbytes)):
        Path(f"/sys/fs/cgroup/blkio/blkio.throttle.read_{what}_device").write_text(f"{number} {most}")


def measure(bed: Bed, folder: Path, how: str, options: argparse.Namespace) -> Sample:
    words = () if how == "without" else ("--stage", "venv", "--stage-dir", DISK)
    words = ("--lockstep", "off", "--init-timeout", f"{LIMIT_S:g}", *words, "-m", "jaxrun_runtime.programs.selfcheck")
    mode, python = LaunchMode(MPI[0], LAUNCHED), str(folder / "slow/env/bin/python")
    command = [python if word == sys.executable else word for word in mode.command(HOSTS, *words)]
    with mounted(bed, folder, options) as devices, tempfile.TemporaryDirectory(prefix="bench-") as name:
        files, began = [Path(f"/sys/block/{device}/stat") for device in devices], time.monotonic()
        before = [int(file.read_text().split()[2]) for file in files]  # sectors of 512 bytes
        with bed.typed(mode.host, *command, directory=Path(name)) as job:
            job.process.wait(LIMIT_S)
            seconds = time.monotonic() - began
        mib = tuple((int(file.read_text().split()[2]) - at) / 2**11 for file, at in zip(files, before, strict=True))
        return Sample(how, seconds, mib, Path(name, "err").read_text()[-300:] if job.process.returncode else "")


def run(options: argparse.Namespace) -> Outcome:
    samples = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as name, kills.testbed() as bed:
        make_image(Path(name))
        for how in HOWS * options.rounds:
            for host in HOSTS if how == "first" else ():
                bed.inside(host, "rm", "-rf", f"{DISK}/jaxrun-stage-{os.geteuid()}")
            samples.append(one := measure(bed, Path(name), how, options))
            progress(f"{how}: {one.wrong or f'{one.seconds:.1f} s, read {[round(mib) for mib in one.mib]} MiB'}")
    good = [one for one in samples if not one.wrong]
    return Outcome(render(good), samples, [f"{one.how}: {one.wrong}" for one in samples if one.wrong])


def render(samples: Sequence[Sample]) -> str:
    rows = []
    for how, group in grouped(samples, lambda one: one.how).items():
        read = [f"{statistics.median(column):.0f}" for column in zip(*(one.mib for one in group), strict=True)]
        rows.append((how, f"{statistics.median(one.seconds for one in group):.1f} s", *read))
    return table(("--stage", "in all", *(f"{host} reads MiB" for host in HOSTS)), rows, left=1)


if __name__ == "__main__":
    bench = Bench("stage", __doc__, rounds=3)
    for name, default in (("--reads", 500), ("--mib-per-s", 60)):
        bench.add_option(name, type=int, default=default, metavar="N", help=f"for each host (default: {default})")
    sys.exit(bench.main(run))
