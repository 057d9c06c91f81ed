"""Checks that the machine can run a testbed: root, namespaces, and a few Debian packages, which it can install."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from state import Refusal

# The commands that a testbed runs, and their packages.
PACKAGES = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "bwrap": "bubblewrap",  # a container without privileges, for --wrap
    "numactl": "numactl",  # for --wrap
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    # Login shells of hosts that are reached by ssh.
    "zsh": "zsh",
    "fish": "fish",
    "tcsh": "tcsh",
}
# Grid Engine's, for `scripts/testbed grid-engine`. Not every distribution has them, and all else works without them.
GRID_ENGINE_PACKAGES = {
    "sge_qmaster": "gridengine-master",
    "sge_execd": "gridengine-exec",
    "qsub": "gridengine-client",
}
_POLICY = "#!/bin/sh\nexit 101\n"
# Debian's packages start their services unless this file forbids it. It does so for this one installation.
_INSTALL = """
set -e
policy=/usr/sbin/policy-rc.d
[ -e $policy ] || { : >$policy; trap 'umount $policy; rm $policy' EXIT; }
mount --bind "$1" $policy
shift
apt-get --quiet=2 update
apt-get --quiet=2 install --yes --no-install-recommends "$@"
"""


def missing_packages(which: Callable[[str], str | None], packages: Mapping[str, str] = PACKAGES) -> list[str]:
    """Return the packages whose commands `which` does not find."""
    return sorted({package for command, package in packages.items() if not which(command)})


def require_root(user: int) -> None:
    if user != 0:
        raise Refusal(
            "needs root, to make network, mount and UTS namespaces that stand in for hosts; "
            "run it again with sudo, or in a machine or container of your own"
        )


def require_packages(packages: Sequence[str]) -> None:
    if packages:
        raise Refusal(
            f"needs {', '.join(packages)}: run `scripts/testbed install`, "
            f"or apt-get install --no-install-recommends {' '.join(packages)}"
        )


def require_namespaces() -> None:
    """Raise Refusal if even root may not make namespaces, as in most containers."""
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--propagation", "slave", "mount", "-t", "sysfs", "none", "/sys"],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        raise Refusal(
            f"may not make namespaces here ({tried.stderr.strip()}): in a container it needs --privileged, "
            "or at least CAP_SYS_ADMIN and CAP_NET_ADMIN"
        )


def install(packages: Sequence[str]) -> None:
    """Install Debian packages, without starting their services on the machine."""
    if not shutil.which("apt-get"):
        raise Refusal(f"can only install with apt-get, which is not here; install by hand: {' '.join(packages)}")
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder, "policy-rc.d")
        policy.write_text(_POLICY)
        policy.chmod(0o755)
        shell = ["unshare", "--mount", "--propagation", "slave", "/bin/sh", "-c", _INSTALL, "install", str(policy)]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run([*shell, *packages], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise Refusal(f"apt-get could not install {' '.join(packages)}: {(done.stderr or done.stdout).strip()}")
