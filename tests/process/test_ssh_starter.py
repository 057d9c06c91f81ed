"""The starter of the ssh backend with a stand-in for ssh, which runs the command line by the login shell of a host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHELLS = ("bash", "dash", "zsh", "fish", "tcsh")
# Each start-up file prints a banner without an end of line, and reads a line of standard input.
START_UP = {
    "bash": (".bashrc", "printf 'Welcome to bash '; read line"),
    "dash": (".profile", ""),  # dash reads no file here
    "zsh": (".zshenv", "printf 'Welcome to zsh '; read line"),
    "fish": (".config/fish/config.fish", "printf 'Welcome to fish '; read line </dev/stdin"),
    "tcsh": (".cshrc", 'printf "Welcome to tcsh "\nset line = "$<"'),
}
SSH = """\
#!/bin/sh
while [ "$1" != -- ]; do shift; done
host=$2 line=$3
case $host in
    refused) echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255 ;;
    denied) echo "root@denied: Permission denied (publickey)." >&2; exit 255 ;;
    other) line='exec /nowhere/python' host=dash ;;
    far) host=dash ;;
esac
exec env -i HOME="$HOMES/$host" SSH_CLIENT=1 PATH=/usr/bin:/bin OWN=login "$host" -c "$line"
"""
SHOW = "import os, sys; print(os.environ['HOME'].split('/')[-1], os.environ['SECRET'], os.environ['OWN'], os.getcwd())"


@pytest.fixture
def start(tmp_path: Path):
    """start(HOSTS, WORDS…) runs the starter; returns what it has printed and its exit status."""
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    for shell, (name, text) in START_UP.items():
        file = tmp_path / "homes" / shell / name
        file.parent.mkdir(parents=True)
        file.write_text(text)

    def run(hosts: list[str], *words: str, directory: Path = tmp_path, stdin: str = "") -> tuple[str, str, int]:
        named = [f"{host}={rank}-{rank}" for rank, host in enumerate(hosts)]
        options = ["--ssh", str(ssh), "--connect-timeout", "10", "--directory", str(directory)]
        env = {**os.environ, "HOMES": str(tmp_path / "homes"), "SECRET": "a 'b' \"c\" $d !e\n%f", "TMPDIR": "/mine"}
        done = subprocess.run(
            [sys.executable, "-m", "jaxrun.node.ssh", *options, *named, "--", *words],
            env=env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout, done.stderr, done.returncode

    return run


def test_every_login_shell_starts_the_command_behind_its_banner_and_its_read(start, tmp_path: Path) -> None:
    shells = [shell for shell in SHELLS if shutil.which(shell)]
    out, err, status = start(shells, sys.executable, "-c", SHOW)
    said = {f"{shell} a 'b' \"c\" $d !e\n%f login {tmp_path}" for shell in shells}
    assert status == 0 and all(text in out for text in said), (out, err)
    assert "Welcome" not in out and "mark" not in out


def test_all_hosts_that_fail_are_named_at_once_with_what_to_type(start) -> None:
    _, err, status = start(["dash", "refused", "denied", "other"], sys.executable, "-c", "pass")
    assert status == 69
    assert err.startswith("3 of 4 hosts cannot be used by ssh\n") and err.endswith("jaxrun-failed-agents 1,2,3\n"), err
    assert "refused: ssh: connect to host refused port 22: Connection refused\n    try: does sshd run there?" in err
    assert "denied: root@denied: Permission denied (publickey).\n    try: it must let you in without a question" in err
    assert "/nowhere/python: not found\n    try: --remote-python PATH" in err


def test_a_host_without_the_directory_is_named(start) -> None:
    _, err, status = start(["dash"], sys.executable, "-c", "pass", directory=Path("/nowhere/here"))
    assert status == 69 and "dash: /nowhere/here: No such file or directory\n    try: start in" in err


def test_an_agent_that_ends_before_it_finds_its_head_is_reported_with_its_last_output(start) -> None:
    agent = "import sys; sys.exit('the head is nowhere')  # jaxrun.node.agent"
    _, err, _ = start(["dash"], sys.executable, "-c", agent, "jaxrun.node.agent")
    assert "dash: the head is nowhere\njaxrun-failed-agents 0\n" in err


def test_rank_0_reads_what_comes_on_standard_input(start) -> None:
    echo = "import sys; print('read', len(sys.stdin.read()))"
    text = "line\n" * 50_000
    out, _, status = start(["dash", "far"], sys.executable, "-c", echo, "jaxrun.node.agent", stdin=text)
    assert f"read {len(text)}\n" in out and "read 0\n" in out, (out, status)
