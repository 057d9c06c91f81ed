"""The starter of the ssh backend with a stand-in for ssh, which runs the command line by the login shell of a host."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrun.node.ssh.session import SshSession
from jaxrun.node.staging.interpreter import base_python
from jaxrun.protocol.names import VERSION

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

    def run(
        hosts: list[str],
        *words: str,
        directory: Path = tmp_path,
        stdin: str = "",
        options: tuple[str, ...] = ("--remote-python", sys.executable),
    ) -> tuple[str, str, int]:
        named = [f"{host}={rank}-{rank}" for rank, host in enumerate(hosts)]
        options = ("--ssh", str(ssh), "--connect-timeout", "10", "--directory", str(directory), *options)
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
    assert status == 69 and "dash: /nowhere/here: No such file or directory\n    try: --stage . carries" in err


def test_an_agent_that_ends_before_it_finds_its_head_is_reported_with_its_last_output(start) -> None:
    agent = "import sys; sys.exit('the head is nowhere')  # jaxrun.node.agent"
    _, err, _ = start(["dash"], sys.executable, "-c", agent, "jaxrun.node.agent")
    assert "dash: the head is nowhere\njaxrun-failed-agents 0\n" in err


def test_rank_0_reads_what_comes_on_standard_input(start) -> None:
    echo = "import sys; print('read', len(sys.stdin.read()))"
    text = "line\n" * 50_000
    out, _, status = start(["dash", "far"], sys.executable, "-c", echo, "jaxrun.node.agent", stdin=text)
    assert f"read {len(text)}\n" in out and "read 0\n" in out, (out, status)


WHERE = "import jaxrun, jaxrun_runtime, jaxrun.protocol.agent_messages, sys; print(jaxrun.__file__, sys.executable)"


def test_a_bare_interpreter_gets_jaxrun_once_and_finds_it_the_next_time(start, tmp_path: Path) -> None:
    """Nor does it matter that another version of jaxrun is there, which is refused if nothing is carried."""
    other = tmp_path / "other" / "jaxrun" / "protocol"
    other.mkdir(parents=True)
    (other.parent / "__init__.py").touch()
    (other / "__init__.py").touch()
    (other / "names.py").write_text("VERSION = '0.0.1'")
    there = tmp_path / "python"
    there.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "other"} exec {base_python()} "$@"\n')
    there.chmod(0o755)
    _, err, status = start(["dash"], sys.executable, "-c", WHERE, options=("--remote-python", str(there)))
    assert status == 69 and f"has jaxrun 0.0.1, and this is jaxrun {VERSION}\n    try: --stage venv" in err, err
    _, err, _ = start(["dash"], sys.executable, "-c", WHERE, options=("--remote-python", base_python()))
    assert "has no jaxrun\n    try: --stage venv" in err, err

    carry = (
        "--remote-python",
        "/nowhere/python",
        "--remote-python",
        str(there),
        "--carry",
        "--stage-dir",
        str(tmp_path),
    )
    out, err, status = start(["dash"], sys.executable, "-c", WHERE, options=carry)
    assert status == 0, err
    found, python = out.split()
    copy = Path(found).parents[1]
    assert copy.parents[1] == tmp_path / f"jaxrun-stage-{os.getuid()}" and python == base_python(), out
    assert {path.name for path in copy.iterdir()} == {"jaxrun", "jaxrun_runtime", "msgspec"}
    (copy / "kept").touch()  # a copy that came again would not have it
    shells = [shell for shell in SHELLS if shutil.which(shell)]
    out, err, _ = start(shells, sys.executable, "-c", WHERE, options=carry)
    assert out.count(found) == len(shells) and (copy / "kept").exists(), (out, err)


def test_a_host_that_lacks_the_directory_waits_for_its_copy_if_one_comes(start) -> None:
    show = "import os; print(os.getcwd(), os.environ['JAXRUN_LACKS_DIRECTORY'])"
    options = ("--remote-python", sys.executable, "--stages-directory")
    out, err, _ = start(["dash"], sys.executable, "-c", show, directory=Path("/nowhere/here"), options=options)
    assert out == "/ /nowhere/here\n", err


def test_an_output_that_another_handler_has_read_does_not_block_the_starter() -> None:
    session = SshSession(("/bin/sh", "-c", "echo Allocated port >&2; read line; echo end"))
    assert select.select([session.stderr], [], [], 10)[0]
    assert session.read(session.stderr) == b"Allocated port\n" and session.read(session.stderr) is None
    session.send(b"\n")
    assert select.select([session.stdout], [], [], 10)[0]
    assert session.read(session.stdout) == b"end\n" and session.wait() == 0
    assert not session.close(session.stdout) and session.close(session.stderr)
    session.end_input()
