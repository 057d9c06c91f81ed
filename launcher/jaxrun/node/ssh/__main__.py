"""`python -m jaxrun.node.ssh OPTIONS HOST=RANKS… -- WORDS`: runs WORDS on each host, by one ssh for each.

With --qrsh, Grid Engine's `qrsh -inherit` takes the place of ssh, except on the host --here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from jaxrun.node.ssh.remote_shell import openssh, qrsh
from jaxrun.node.ssh.started_host import SHELL_S, StartRequest
from jaxrun.node.ssh.starter import Starter
from jaxrun.protocol.addresses import parse_addresses
from jaxrun.protocol.names import GANG_ADDRESS, GANG_TUNNEL, HEAD_ADDRESSES, HEAD_TUNNEL
from jaxrun.protocol.ssh_start import TUNNEL_MODES, TUNNEL_OFF, TUNNEL_ON
from jaxrun.spec.backends.forwarded_variables import forwarded_variables

# A tunnel has no probe of its own: ssh notices that a host is silent after 15 s.
_ALIVE_S, _ALIVE_COUNT = 5, 3


def _parse(words: Sequence[str]) -> tuple[dict[str, str], StartRequest]:
    end = list(words).index("--")
    parser = argparse.ArgumentParser(prog="jaxrun.node.ssh", allow_abbrev=False)
    parser.add_argument("--ssh", default="")
    parser.add_argument("--qrsh", default="")
    parser.add_argument("--here", default="")
    parser.add_argument("--connect-timeout", type=int, required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--remote-python", action="append", required=True)
    parser.add_argument("--tunnel", choices=TUNNEL_MODES, default=TUNNEL_OFF)
    parser.add_argument("--carry", action="store_true")
    parser.add_argument("--stage-dir", default="")
    parser.add_argument("--stages-directory", action="store_true")
    parser.add_argument("hosts", nargs="+")
    given = parser.parse_args(words[:end])
    tunnels = _tunnels(os.environ) if given.tunnel != TUNNEL_OFF else {}
    names = forwarded_variables(os.environ, {})
    request = StartRequest(
        shell=qrsh(given.qrsh, given.here) if given.qrsh else openssh(_ssh_words(given, tunnels)),
        pythons=tuple(given.remote_python),
        directory=given.directory,
        words=tuple(words[end + 1 :]),
        env={name: os.environ[name] for name in names if name in os.environ},
        limit_s=given.connect_timeout + SHELL_S,
        tunnels=tunnels,
        only_tunnels=given.tunnel == TUNNEL_ON,
        carries=given.carry,
        stage_dir=given.stage_dir,
        stages_directory=given.stages_directory,
    )
    return dict(word.split("=", 1) for word in given.hosts), request


def _ssh_words(given: argparse.Namespace, tunnels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words of ssh, up to the name of the host."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": given.connect_timeout,
        "RemoteCommand": "none",  # nor what else the user's configuration does for a person at a terminal
        "PermitLocalCommand": "no",
        "ControlMaster": "no",
        "LogLevel": "INFO",
        **_tunnel_options(given.tunnel),
    }
    forwards = [word for target in tunnels for word in ("-R", f"127.0.0.1:0:{target}")]
    ssh = (given.ssh, "-T", "-x", *(word for name, value in options.items() for word in ("-o", f"{name}={value}")))
    return (*ssh, *forwards, "--")


def _tunnel_options(mode: str) -> dict[str, object]:
    """What ssh does about forwarded ports: a user's own may be in use already, and those of a tunnel must be there."""
    if mode == TUNNEL_OFF:
        return {"ClearAllForwardings": "yes"}
    alive: dict[str, object] = {"ServerAliveInterval": _ALIVE_S, "ServerAliveCountMax": _ALIVE_COUNT}
    return alive | ({"ExitOnForwardFailure": "yes", "ControlPath": "none"} if mode == TUNNEL_ON else {})


def _tunnels(environ: Mapping[str, str]) -> dict[str, str]:
    """What is forwarded: the head's port, and that of the process that owns a gang."""
    named = {HEAD_TUNNEL: environ.get(HEAD_ADDRESSES, ""), GANG_TUNNEL: environ.get(GANG_ADDRESS, "")}
    return {str(parse_addresses(text)[0]): name for name, text in named.items() if text}


def main() -> int:
    while os.open(os.devnull, os.O_RDWR) <= 2:  # no pipe takes the place of a standard stream that is closed
        pass
    return Starter(*_parse(sys.argv[1:])).run()


if __name__ == "__main__":
    os._exit(main())
