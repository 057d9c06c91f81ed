"""The testbed as a whole: start it, change one host, show its state, end it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import grid_engine
import hosts
import links
import slurm
import sshd
from processes import Process
from state import CONTROLLER, USAGE, Place, Refusal, address, host_names, hosts_file, passwd_file

DEFAULT_HOSTS = 3
Row = tuple[str, ...]
_HERE = Path(__file__).parent


def up(place: Place, wanted: int | None) -> None:
    """Start hosts and daemons that do not run. Others stay as they are, even cut links."""
    existing, controller = place.hosts(), hosts.keeper(place, CONTROLLER)
    if existing and controller and wanted not in (None, existing):
        raise Refusal(
            f"the testbed is up with {existing} hosts, not {wanted}, and changing that would end Slurm and its jobs: "
            f"run scripts/testbed down, then scripts/testbed up -H {wanted}",
            USAGE,
        )
    if not existing or not controller:
        existing = wanted or existing or DEFAULT_HOSTS
        down(place)
        controller = _lay_out(place, existing)
    off = [name for name in host_names(existing) if not hosts.keeper(place, name)]
    for name in off:
        hosts.power_off(place, name)
    for name, keeper in hosts.boot(place, off).items():
        links.connect(place, controller.pid, name, keeper)
        hosts.booted(place, [name])
    links.settle(place, controller.pid, off)
    sshd.start(place, host_names(existing))
    slurm.start(place, host_names(existing))
    if place.grid_engine.exists():
        (grid_engine.restart if off else grid_engine.start)(place, host_names(existing))
    if place.hosts() != existing:
        place.finish(existing)


def start_grid_engine(place: Place) -> None:
    """Start Grid Engine, or what of it does not run, on all hosts that are on."""
    _known(place, CONTROLLER)
    grid_engine.start(place, [name for name in host_names(place.hosts() or 0) if hosts.keeper(place, name)])


def end_grid_engine(place: Place) -> None:
    """End Grid Engine on all hosts; all else goes on."""
    _known(place, CONTROLLER)
    grid_engine.end(place, host_names(place.hosts() or 0))


def down(place: Place) -> None:
    """End every process of the testbed, and so its namespaces, and delete its files."""
    hosts.power_off_all(place)
    place.clear()


def cut(place: Place, name: str) -> None:
    """Take a host's link down. Its processes continue, and its connections stay open without traffic."""
    links.cut(place, _on(place, name), name)


def mend(place: Place, name: str) -> None:
    links.mend(place, _on(place, name), name)


def off(place: Place, name: str) -> None:
    """Turn a host off as if it lost power: the link first, so that no other host sees the end of its processes."""
    controller = _known(place, name)
    _only_hosts(name)
    links.disconnect(place, controller, name)
    hosts.power_off(place, name)


def status(place: Place) -> list[Row]:
    """Return a header and one row per host, the controller first; empty if no testbed is up."""
    controller, count = hosts.keeper(place, CONTROLLER), place.hosts()
    if not controller or not count:
        return []
    names = host_names(count)
    nodes = slurm.node_states(place, controller.pid)
    wires = links.states(place, controller.pid, names)
    header = ("host", "address", "boot id", "link", "slurm", "processes")
    controller_row = _row(place, CONTROLLER, "up", "answers" if nodes else "does not answer")
    return [header, controller_row, *(_row(place, name, wires[name], nodes.get(name, "unknown")) for name in names)]


def command_inside(place: Place, name: str, directory: str, command: list[str]) -> list[str]:
    """Return the argv that runs a command in a host."""
    _known(place, name)
    keeper = hosts.keeper(place, name)
    if not keeper:
        raise Refusal(f"{name} is off; scripts/testbed up turns it on again")
    return hosts.enter(keeper.pid, directory, command)


def _row(place: Place, name: str, link: str, node: str) -> Row:
    if not hosts.keeper(place, name):
        return name, address(name), "-", "off", node, "-"
    boot_id = (place.host(name) / "boot_id").read_text().strip()
    return name, address(name), boot_id, link, node, str(len(hosts.members(place, name)))


def _lay_out(place: Place, count: int) -> Process:
    place.claim()
    slurm.configure(place, count)
    (place.etc / "hosts").write_text(hosts_file(count))
    (place.etc / "passwd").write_text(passwd_file(Path("/etc/passwd").read_text()))
    place.commands.mkdir()
    ssh = place.commands / "ssh"
    environment = f"JAXRUN_TESTBED_DIR={shlex.quote(str(place.root))}"
    command = shlex.join([sys.executable, "-ESsB", str(_HERE / "cli.py"), "ssh"])
    real = f'[ -z "${sshd.REAL}" ] || exec /usr/bin/ssh -F {place.ssh}/config "$@"\n'
    ssh.write_text(f'#!/bin/sh\n{real}{environment} exec {command} "$@"\n')
    ssh.chmod(0o755)
    sshd.configure(place, host_names(count))
    pid = hosts.boot(place, [CONTROLLER])[CONTROLLER]
    links.connect_controller(place, pid)
    hosts.booted(place, [CONTROLLER])
    controller = hosts.keeper(place, CONTROLLER)
    if not controller:
        raise Refusal(f"process {pid}, which keeps {CONTROLLER}, has been killed; run scripts/testbed down")
    return controller


def _known(place: Place, name: str) -> int:
    """Return the process id of the controller's keeper. Raises Refusal unless the testbed is up and has this host."""
    count, controller = place.hosts(), hosts.keeper(place, CONTROLLER)
    if not count or not controller:
        raise Refusal("no testbed is up; start one with: scripts/testbed up")
    if name not in (*host_names(count), CONTROLLER):
        known = ", ".join((CONTROLLER, *host_names(count)))
        raise Refusal(f"{name!r} is not a host of this testbed; it has {known}", USAGE)
    return controller.pid


def _on(place: Place, name: str) -> int:
    controller = _known(place, name)
    _only_hosts(name)
    if not hosts.keeper(place, name):
        raise Refusal(f"{name} is off; scripts/testbed up turns it on again")
    return controller


def _only_hosts(name: str) -> None:
    if name == CONTROLLER:
        raise Refusal(f"{CONTROLLER} is the switch between the hosts too: name one of them instead", USAGE)
