"""Why hosts cannot be used by ssh or qrsh, in their own words where they have some, and what to type. Pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

from msgspec import Struct

from jaxrun.protocol.names import VERSION
from jaxrun.text import plural

OLDEST_PYTHON = (3, 11)
_MAX_WORDS = 3  # lines that ssh has written last
_NOISE = re.compile(r"(Warning: Permanently added|Allocated port |\*\* |@{4,}|\s*$)")
# Texts of OpenSSH's client, and what to do; {host} is the host's name. The first that fits counts.
_ADVICE = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its key is another than before: if that is expected, ssh-keygen -R {host}; then ssh {host} once, and compare",
    ),
    (r"Host key verification failed", "its key is unknown here: ssh {host} once, and compare the fingerprint"),
    (
        r"Permission denied|Too many authentication failures",
        "it must let you in without a question: ssh-copy-id {host}, or ssh-add; then ssh -o BatchMode=yes {host} true",
    ),
    (
        r"remote port forwarding failed",
        "its sshd must allow it (AllowTcpForwarding); or --tunnel off, where hosts reach this one directly",
    ),
    (r"Could not resolve hostname", "is the name right? HostName in ~/.ssh/config gives it an address"),
    (r"Connection refused", "does sshd run there? systemctl start ssh; for another port: Port in ~/.ssh/config"),
    (
        r"timed out|No route to host|Network is unreachable|Connection reset|Connection closed",
        "is it on, and does a firewall let ssh in? Through a login node: ProxyJump in ~/.ssh/config",
    ),
)
_CHANGED = re.compile(r"REMOTE HOST IDENTIFICATION HAS CHANGED")


class HostFailure(Struct, frozen=True):
    """Why one host cannot be used: what was seen, and what to type."""

    words: str
    advice: str = ""


def ssh_failed(host: str, said: str) -> HostFailure:
    """OpenSSH's client could not begin a session; `said` is all that it has written."""
    advice = next((text for pattern, text in _ADVICE if re.search(pattern, said)), "ssh -v {host} true shows more")
    words = last_words(said) or "ssh failed without a word"
    if _CHANGED.search(said):
        words = "remote host identification has changed; " + words.rpartition("\n")[2]
    return HostFailure(words, advice.format(host=host))


def qrsh_failed(said: str) -> HostFailure | None:
    """Grid Engine's qrsh could not begin; None if what it has written, `said`, is not its own."""
    if not re.search(r"(?m)^error: ", said):
        return None
    return HostFailure(
        last_words(said),
        "the parallel environment must have control_slaves TRUE: qconf -sp NAME, by the name in $PE; or --backend ssh",
    )


def no_interpreter(python: str, status: int, said: str, *, carries: bool) -> HostFailure:
    """The login shell ended before an interpreter had begun; `carries`: this one's environment comes there."""
    words = last_words(said) or f"its login shell ended with status {status}"
    if carries:
        return HostFailure(words, f"--remote-python PATH, for a Python {_own_python()} there")
    return HostFailure(
        words,
        f"--remote-python PATH, if {python} is not the Python there; "
        f"or --stage venv, which carries this one's packages to any Python {_own_python()}",
    )


def check_python(version: str, *, carries: bool) -> HostFailure | None:
    """Return why an interpreter of this version cannot be used; `carries`: this one's environment comes there."""
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if tuple(parse_version(version)) < OLDEST_PYTHON:
        return HostFailure(
            f"has Python {version}", f"--remote-python PATH, for a Python that is not older than {oldest}"
        )
    if carries and tuple(parse_version(version)) != sys.version_info[:2]:
        return HostFailure(
            f"has Python {version}, and the environment that --stage carries is for Python {_own_python()}",
            f"--remote-python PATH, for a Python {_own_python()} there",
        )
    return None


def cannot_start(problem: str, detail: str, python: str) -> HostFailure:
    """The interpreter there found a problem, which `problem` names, before it became the agent."""
    match problem:
        case "directory":
            return HostFailure(detail, "--stage . carries it there; or start in a directory that all hosts have")
        case "version":
            found = f"has jaxrun {detail}, and this is jaxrun {VERSION}" if detail else f"{python} has no jaxrun"
            return HostFailure(
                found,
                f"--stage venv carries this environment there; or install jaxrun {VERSION}, or --remote-python PATH "
                "names a Python with it",
            )
        case "machine":
            return HostFailure(
                f"has processors of another kind ({detail}) than the environment that --stage carries",
                "install jax and jaxrun there, and leave --stage venv out",
            )
        case "copy":
            return HostFailure(f"cannot keep a copy of jaxrun: {detail}", "--stage-dir DIR, for another disk")
        case _:
            return HostFailure(detail)


def _own_python() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def agent_ended(status: int, said: str) -> HostFailure:
    """The agent ended before it had found the head."""
    return HostFailure(last_words(said) or f"its agent ended with status {status}")


def last_words(said: str) -> str:
    """The last lines of a text, without those that are no reason."""
    lines = [line.rstrip() for line in said.replace("\r", "").splitlines() if not _NOISE.match(line)]
    return "\n".join(line.removeprefix("jaxrun: ") for line in lines[-_MAX_WORDS:])


def describe_failures(failures: Mapping[str, HostFailure], hosts: int, shell: str = "ssh") -> str:
    """Name all hosts that cannot be used; those for the same reason together."""
    groups: dict[HostFailure, list[str]] = {}
    for host, failure in failures.items():
        groups.setdefault(failure, []).append(host)
    lines = [f"{', '.join(names)}: {_indent(failure)}" for failure, names in groups.items()]
    head = "" if len(failures) == hosts == 1 else f"{_count(len(failures), hosts)} cannot be used by {shell}\n"
    return head + "\n".join(lines)


def _indent(failure: HostFailure) -> str:
    lines = failure.words.split("\n") + ([f"try: {failure.advice}"] if failure.advice else [])
    return "\n    ".join(lines)


def _count(failed: int, hosts: int) -> str:
    return plural(hosts, "host") if failed == hosts else f"{failed} of {plural(hosts, 'host')}"


def parse_version(text: str) -> Sequence[int]:
    """Return the numbers of a version: "3.13.0rc1" is (3, 13)."""
    return [int(number) for number in re.findall(r"\d+", text)[:2]]
