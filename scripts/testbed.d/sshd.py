"""OpenSSH on the hosts: keys, configuration, and a server in each host; the client is a login's ssh there.

The server has keys and configuration of its own, and nothing of the machine's. A login gets the host's own directory
for temporary files, as every process of the host does.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import hosts
from processes import Process
from state import Place, Refusal, address

REAL = "JRTB_OPENSSH"  # the variable with which `ssh` inside is OpenSSH's own
PATIENCE = 10.0
LISTENER = "[listener]"  # in the title of the server itself, and not of its sessions
_PRIVILEGE_SEPARATION = Path("/run/sshd")  # built into Debian's server, which does not start without it


def configure(place: Place, names: Sequence[str]) -> None:
    """Write the keys of the hosts and of the user who logs in, and all configuration."""
    place.ssh.mkdir(mode=0o700)
    for key in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", str(place.ssh / key)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    (place.ssh / "authorized_keys").write_text((place.ssh / "user_key.pub").read_text())
    host_key = (place.ssh / "host_key.pub").read_text()
    (place.ssh / "known_hosts").write_text("".join(f"{name},{address(name)} {host_key}" for name in names))
    (place.ssh / "config").write_text(_client_config(place))
    for name in names:
        (place.ssh / f"sshd-{name}").write_text(_server_config(place, name))


def start(place: Place, names: Sequence[str]) -> None:
    """Start a server in each of these hosts that has none."""
    _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    for name in names:
        if not any(map(is_server, hosts.members(place, name))):
            _start_server(place, name)


def is_server(process: Process) -> bool:
    """Whether it listens for clients; the processes of a session do not."""
    return process.argv[:1] == ("/usr/sbin/sshd",) or LISTENER in process.argv[0]


def _client_config(place: Place) -> str:
    return f"""UserKnownHostsFile {place.ssh}/known_hosts
GlobalKnownHostsFile none
StrictHostKeyChecking ask
User root

# Hosts that fail, each in its own way, and one behind a login node.
Host h3-through-h2
    HostName h3
    HostKeyAlias h3
    ProxyJump h2
Host h3-unknown
    HostName h3
    HostKeyAlias h3-unknown
Host h3-closed
    HostName h3
    Port 9
Host h3-denied
    HostName h3
    HostKeyAlias h3
    IdentityFile none
Match host *,!h3-denied originalhost *,!h3-denied
    IdentityFile {place.ssh}/user_key
    IdentitiesOnly yes
"""


def _server_config(place: Place, name: str) -> str:
    return f"""ListenAddress {address(name)}
HostKey {place.ssh}/host_key
AuthorizedKeysFile {place.ssh}/authorized_keys
PidFile {place.ssh}/{name}.pid
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PrintMotd no
MaxStartups 100
SetEnv TMPDIR={place.host(name)}/tmp {hosts.MARK}={place.root}
"""


def _start_server(place: Place, name: str) -> None:
    keeper = hosts.keeper(place, name)
    if not keeper:
        raise Refusal(f"sshd cannot start: {name} is off")
    pid_file, log = place.ssh / f"{name}.pid", place.logs / f"sshd-{name}.log"
    pid_file.unlink(missing_ok=True)
    with open(log, "ab") as output:
        server = subprocess.Popen(
            hosts.enter(keeper.pid, "/", ["/usr/sbin/sshd", "-D", "-e", "-f", str(place.ssh / f"sshd-{name}")]),
            env=hosts.fresh_environment(place),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + PATIENCE
    while not pid_file.exists() or not os.path.getsize(pid_file):
        if server.poll() is not None or time.monotonic() > deadline:
            raise Refusal(f"sshd did not start on {name}: {log.read_text(errors='replace').strip()}")
        time.sleep(0.01)
