"""The wires: a bridge in the controller's namespace, and a veth pair from it to each host.

The controller's end of a pair has the host's name (h2); the host's end is eth0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import hosts
from state import CONTROLLER, Place, Refusal, address

BRIDGE = "br0"
PATIENCE = 10.0


def connect_controller(place: Place, controller: int) -> None:
    """Make the bridge. Ports that are not part of it must not answer for the controller's address."""
    make = f"link set lo up\nlink add {BRIDGE} type bridge\naddr add {address(CONTROLLER)}/24 dev {BRIDGE}\n"
    _ip(place, controller, f"{make}link set {BRIDGE} up\n")
    hosts.run_inside(place, controller, ["tee", "/proc/sys/net/ipv4/conf/default/arp_ignore"], "8\n")


def connect(place: Place, controller: int, name: str, keeper: int) -> None:
    """Give a host a link, replacing an earlier one. The MAC stays the same, so that others find the host at once."""
    disconnect(place, controller, name)
    pair = f"link add {name} type veth peer name eth0 netns {keeper}\n"
    _ip(place, controller, f"{pair}link set {name} master {BRIDGE}\nlink set {name} up\n")
    mac = ":".join(["02", "00", *(f"{int(part):02x}" for part in address(name).split("."))])
    _ip(place, keeper, f"link set lo up\nlink set eth0 address {mac}\n")
    _ip(place, keeper, f"addr add {address(name)}/24 dev eth0\nlink set eth0 up\n")


def disconnect(place: Place, controller: int, name: str) -> None:
    """Remove the link of a host, if it has one."""
    if name in _devices(place, controller):
        _ip(place, controller, f"link del {name}\n")


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


def states(place: Place, controller: int, names: Sequence[str]) -> dict[str, str]:
    """Return the state of each host's link: "up", "cut" or "off"."""
    devices = _devices(place, controller)
    return {name: _state(devices.get(name)) for name in names}


def _state(device: dict[str, object] | None) -> str:
    if device is None:
        return "off"
    flags = device["flags"]
    assert isinstance(flags, list)
    return "up" if "UP" in flags and device.get("master") else "cut"


def _devices(place: Place, controller: int) -> dict[str, dict[str, object]]:
    listed = json.loads(hosts.run_inside(place, controller, ["ip", "-json", "link"]))
    return {link["ifname"]: link for link in listed}


def _ip(place: Place, keeper: int, commands: str) -> None:
    hosts.run_inside(place, keeper, ["ip", "-batch", "-"], commands)
