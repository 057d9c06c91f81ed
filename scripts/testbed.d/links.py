"""The wires: a bridge in the controller's namespace, and a veth pair from it to each host.

The controller's end of a pair is called like the host (h2), the host's end is eth0. While a host is slowed, its end is
taken off the bridge, and a relay carries its frames there instead, late:

    h2's eth0 ── h2 ═ relay ═ h2-relay ── h2-slow ── bridge
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import hosts
import processes
from processes import Process
from state import CONTROLLER, USAGE, Place, Refusal, address

BRIDGE = "br0"
PATIENCE = 10.0
_RELAY = Path(__file__).with_name("relay.py")
_UNITS = {"ms": 0.001, "s": 1.0}


def delay_of(text: str) -> float:
    """Seconds: of "100ms" or "1.5s"; 0 needs no unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)?", text)
    if not found or (not found[2] and float(found[1])) or float(found[1]) * _UNITS[found[2] or "s"] > 60:
        raise Refusal(f"{text!r} is not a delay of at most 60s; write it as 100ms, 1.5s or 0", USAGE)
    return float(found[1]) * _UNITS[found[2] or "s"]


def delay_text(seconds: float) -> str:
    return f"{seconds * 1000:g}ms" if seconds < 1 else f"{seconds:g}s"


def connect_controller(place: Place, controller: int) -> None:
    """Make the bridge. Ports that are not part of it must not answer for the controller's address."""
    make = f"link set lo up\nlink add {BRIDGE} type bridge\naddr add {address(CONTROLLER)}/24 dev {BRIDGE}\n"
    _ip(place, controller, f"{make}link set {BRIDGE} up\n")
    hosts.run_inside(place, controller, ["tee", "/proc/sys/net/ipv4/conf/default/arp_ignore"], "8\n")


def connect(place: Place, controller: int, name: str, keeper: int) -> None:
    """Give a host its link, in place of one that it had; with the same MAC, so that the others find it at once."""
    _delete(place, controller, name)
    pair = f"link add {name} type veth peer name eth0 netns {keeper}\n"
    _ip(place, controller, f"{pair}link set {name} master {BRIDGE}\nlink set {name} up\n")
    mac = ":".join(["02", "00", *(f"{int(part):02x}" for part in address(name).split("."))])
    _ip(place, keeper, f"link set lo up\nlink set eth0 address {mac}\n")
    _ip(place, keeper, f"addr add {address(name)}/24 dev eth0\nlink set eth0 up\n")


def disconnect(place: Place, controller: int, name: str) -> None:
    """Take the link of a host away for good."""
    unslow(place, controller, name)
    _delete(place, controller, name)


def cut(place: Place, controller: int, name: str) -> None:
    _ip(place, controller, f"link set {name} down\n")


def mend(place: Place, controller: int, name: str) -> None:
    _ip(place, controller, f"link set {name} up\n")
    settle(place, controller, [name])


def settle(place: Place, controller: int, names: Sequence[str]) -> None:
    """Wait until these hosts' links carry frames: the kernel may take a second to notice that a link is up."""
    deadline = time.monotonic() + PATIENCE
    while True:
        operating = {name for name, device in _devices(place, controller).items() if device["operstate"] == "UP"}
        down = sorted(set(names) - operating)
        if not down:
            return
        if time.monotonic() > deadline:
            raise Refusal(f"the links of {', '.join(down)} do not come up; try scripts/testbed down and up again")
        time.sleep(0.02)


def slow(place: Place, controller: int, name: str, seconds: float) -> None:
    """Let all that the host sends arrive this much later."""
    unslow(place, controller, name)
    near, far = f"{name}-relay", f"{name}-slow"
    pair = f"link add {near} type veth peer name {far}\nlink set {near} up\nlink set {far} up\n"
    _ip(place, controller, f"link set {name} nomaster\n{pair}link set {far} master {BRIDGE}\n")
    relay = [sys.executable, "-ESs", str(_RELAY), name, near, str(seconds), _marker(place, name)]
    with open(place.logs / f"{name}-relay.log", "wb") as log:
        started = subprocess.Popen(
            hosts.enter(controller, "/", relay),
            env=hosts.fresh_environment(place),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert started.stdout
    with started.stdout as words:
        if words.readline() != b"ready\n":
            unslow(place, controller, name)
            raise Refusal(f"{name} cannot be slowed: {(place.logs / f'{name}-relay.log').read_text().strip()}")
    settle(place, controller, [near, far])


def unslow(place: Place, controller: int, name: str) -> None:
    """End the delay of a host, if there is one."""
    processes.end(lambda process: _marker(place, name) in process.argv, f"the delay of {name}")
    if _delete(place, controller, f"{name}-slow"):
        _ip(place, controller, f"link set {name} master {BRIDGE}\n")


def states(place: Place, controller: int, names: Sequence[str]) -> dict[str, str]:
    """How each host is linked: "up", "cut", "slow 100ms", "cut, slow 100ms" or "off"."""
    devices = _devices(place, controller)
    running = processes.scan()
    return {name: _state(devices.get(name), _delay(place, name, running)) for name in names}


def _state(device: dict[str, object] | None, delay: str | None) -> str:
    if device is None:
        return "off"
    flags = device["flags"]
    assert isinstance(flags, list)
    is_cut = "UP" not in flags or not (delay or device.get("master"))
    parts = (["cut"] if is_cut else []) + ([f"slow {delay_text(float(delay))}"] if delay else [])
    return ", ".join(parts) or "up"


def _delay(place: Place, name: str, running: Sequence[Process]) -> str | None:
    relays = [process.argv for process in running if _marker(place, name) in process.argv]
    return relays[0][-2] if relays else None


def _marker(place: Place, name: str) -> str:
    return f"jrtb-slow-{name}:{place.root}"


def _delete(place: Place, controller: int, device: str) -> bool:
    """Delete a device of the controller's, and with it its peer; False where there is none."""
    if device not in _devices(place, controller):
        return False
    _ip(place, controller, f"link del {device}\n")
    return True


def _devices(place: Place, controller: int) -> dict[str, dict[str, object]]:
    listed = json.loads(hosts.run_inside(place, controller, ["ip", "-json", "link"]))
    return {link["ifname"]: link for link in listed}


def _ip(place: Place, keeper: int, commands: str) -> None:
    hosts.run_inside(place, keeper, ["ip", "-batch", "-"], commands)
