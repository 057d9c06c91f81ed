"""The command line of scripts/testbed."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import hosts
import remote
import requirements
import testbed
from state import CONTROLLER, DEFAULT_ROOT, MAX_HOSTS, USAGE, Place, Refusal, address, locked

_EPILOG = f"""\
examples:
  scripts/testbed up                                three hosts: h1, h2, h3, and the controller {CONTROLLER}
  scripts/testbed exec ctl -- srun -N3 hostname     as from a login node; salloc and sbatch work too
  scripts/testbed exec h1 -- mpirun --host h1,h2,h3 hostname
  scripts/testbed grid-engine                       then: scripts/testbed exec ctl -- qsub -pe spread 3 job.sh
  scripts/testbed off h2                            and up again to turn it on

Inside, `ssh` is a stand-in that needs no sshd, so mpirun starts its daemons on other hosts with no further option. Each
host has a real sshd, too: with JRTB_OPENSSH=1 in the environment, `ssh` is OpenSSH's client.
The hosts share the machine's files, but /dev/shm is each host's own. They reach each other and nothing else.
JAXRUN_TESTBED_DIR (now {{root}}) holds all files; with another one, a second testbed runs beside the first.
"""


def main(arguments: Sequence[str]) -> int:
    """Run one command. Returns its exit status."""
    try:
        place = Place(Path(os.environ.get("JAXRUN_TESTBED_DIR") or DEFAULT_ROOT))
        # Like ssh itself, everything after the word belongs to it, options too.
        if arguments[:1] == ["ssh"]:
            return ssh(place, arguments[1:])
        if arguments[:1] == ["exec"] and "--" in arguments:
            end = list(arguments).index("--")
            return run(place, _parser(place).parse_args(arguments[:end]), list(arguments[end + 1 :]))
        return run(place, _parser(place).parse_args(arguments), [])
    except Refusal as refusal:
        print(f"scripts/testbed: {refusal}", file=sys.stderr)
        return refusal.status
    except KeyboardInterrupt:
        print("scripts/testbed: interrupted; the same command again completes it", file=sys.stderr)
        return 130


def run(place: Place, options: argparse.Namespace, words: list[str]) -> int:
    """Execute a command other than ssh. `words`: the command of exec."""
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{hosts.SYSTEM_PATH}"
    requirements.require_root(os.geteuid())
    match options.command:
        case "exec":
            if not words:
                raise Refusal(f"no command was given; usage: scripts/testbed exec {options.host} -- COMMAND...", USAGE)
            execute(place, options.host, words)
        case "status":
            return show(testbed.status(place))
        case "install":
            install()
        case command:
            if os.environ.get(hosts.MARK) == str(place.root) and command in ("up", "down", "off"):
                raise Refusal(f"{command} cannot be run from inside the testbed: leave it first", USAGE)
            if command == "up":
                requirements.require_packages(requirements.missing_packages(shutil.which))
                requirements.require_namespaces()
            if command == "grid-engine":
                requirements.require_packages(
                    requirements.missing_packages(shutil.which, requirements.GRID_ENGINE_PACKAGES)
                )
            with locked(place):
                change(place, options)
    return 0


def change(place: Place, options: argparse.Namespace) -> None:
    """Execute a command that changes the testbed, which must be locked."""
    match options.command:
        case "up":
            testbed.up(place, options.hosts)
        case "grid-engine" if options.end:
            testbed.end_grid_engine(place)
        case "grid-engine":
            testbed.start_grid_engine(place)
        case "down":
            testbed.down(place)
        case "off":
            testbed.off(place, options.host)
        case "cut":
            testbed.cut(place, options.host)
        case "mend":
            testbed.mend(place, options.host)


def install() -> None:
    """Install the missing packages, and check that the machine can run a testbed."""
    packages = requirements.missing_packages(shutil.which)
    if packages:
        print(f"installing {' '.join(packages)}; their services are not started ...")
        requirements.install(packages)
    requirements.require_packages(requirements.missing_packages(shutil.which))
    requirements.require_namespaces()
    packages = requirements.missing_packages(shutil.which, requirements.GRID_ENGINE_PACKAGES)
    if packages:
        print(f"installing {' '.join(packages)}; their services are not started ...")
        try:
            requirements.install(packages)
        except Refusal as refusal:
            print(f"scripts/testbed: Grid Engine's tests will be skipped: {refusal}", file=sys.stderr)


def execute(place: Place, name: str, command: list[str]) -> NoReturn:
    """Replace this process by the command in the host, in the same directory, with its environment and descriptors."""
    argv = testbed.command_inside(place, name, os.getcwd(), command)
    os.execvpe(argv[0], argv, hosts.environment(place, os.environ))


def ssh(place: Place, arguments: Sequence[str]) -> int:
    """What ssh would do."""
    asked = remote.parse(arguments)
    try:
        requirements.require_root(os.geteuid())
        argv = testbed.command_inside(place, asked.host, "/root", asked.command)
        if os.environ.get(hosts.MARK) == str(place.root):
            remote.reach(address(asked.host))
    except (Refusal, OSError) as reason:
        print(f"ssh: connect to host {asked.host} port 22: {reason}", file=sys.stderr)
        return remote.SSH_FAILED
    # As ssh does; or a proxy of Hydra would hold its mpiexec's listening socket open, and connect to nobody there.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    return remote.run(argv, hosts.fresh_environment(place))


def show(rows: Sequence[testbed.Row]) -> int:
    """Print the status. Returns 1 if no testbed is up."""
    if not rows:
        print("no testbed is up; start one with: scripts/testbed up")
        return 1
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for line in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def _parser(place: Place) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/testbed",
        description="Several hosts on one machine, with Slurm, Grid Engine and an ssh for mpirun. Needs root.",
        epilog=_EPILOG.format(root=place.root),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start it, or what of it does not run")
    up.add_argument("-H", "--hosts", type=_count, help=f"how many, 1 to {MAX_HOSTS} (default: 3, or as it is up)")
    scheduler = commands.add_parser("grid-engine", help="start Grid Engine on the hosts, too")
    scheduler.add_argument("--end", action="store_true", help="end it again, once its jobs are over")
    commands.add_parser("install", help="install the Debian packages that are missing")
    commands.add_parser("down", help="end it, and leave nothing")
    commands.add_parser("status", help="print a table of the hosts")
    enter = commands.add_parser("exec", help="HOST -- COMMAND...: run a command in a host")
    enter.add_argument("host", nargs="?", default=CONTROLLER)
    for name, text in _ON_A_HOST.items():
        commands.add_parser(name, help=text).add_argument("host")
    commands.add_parser("ssh", help="HOST COMMAND...: as ssh would, for mpirun's plm_ssh_agent", add_help=False)
    return parser


_ON_A_HOST = {
    "cut": "take the link of a host down; its processes go on",
    "mend": "undo cut",
    "off": "end all processes of a host, and its link",
}


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_HOSTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hosts from 1 to {MAX_HOSTS}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
