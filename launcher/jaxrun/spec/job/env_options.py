"""Parses the variables of --env and --env-file, and masks secrets in values that are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from jaxrun.errors import UsageError
from jaxrun.protocol.names import COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID, RESERVED_PREFIX

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
_QUOTED_CHARS = 60
_URL_PASSWORD = re.compile(r"(://)[^/@\s]+@")


def parse_assignment(text: str, environ: Mapping[str, str], source: str = "--env") -> tuple[str, str]:
    """Parse `NAME=VALUE`, or `NAME` with its value from `environ`. Raises UsageError that names `source`."""
    name, equals, value = text.partition("=")
    _check_name(name, text, source)
    if equals:
        return name, _check_value(name, value, source)
    if name not in environ:
        shown = shown_assignment(name)
        raise UsageError(f"{source} {shown} passes a variable on, but {shown} is not set; write {shown}=VALUE")
    return name, environ[name]


def read_env_file(path: Path) -> dict[str, str]:
    """Read an --env-file. Raises UsageError that names the file and the malformed line."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"--env-file {path} cannot be read: {error.strerror}") from None
    return parse_env_file(text, str(path))


def parse_env_file(text: str, file_name: str) -> dict[str, str]:
    """Parse lines such as the following; if a variable occurs twice, the later line counts.

    # a comment
    NAME=any value, with no expansion   # a blank before the sign starts a comment
    export QUOTED="with spaces, # and \\"quotes\\""
    RAW='nothing is special in here'
    """
    values = {}
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        source = f"{file_name}:{number}:"
        variable, equals, rest = re.sub(r"^export\s+", "", stripped).partition("=")
        if not equals:
            raise UsageError(f"{source} NAME=VALUE is expected, but this line has no equals sign")
        _check_name(variable, line, source)
        values[variable] = _check_value(variable, _parse_value(rest, line, source), source)
    return values


def mask_secret(name: str, value: str) -> str:
    """Return `value` in a form that may be shown: *** for a secret, and no password within a URL."""
    if value and _SECRET_NAME.search(name):
        return "***"
    return _URL_PASSWORD.sub(r"\1***@", value)


def mask_assignment(text: str) -> str:
    """Return `NAME=VALUE` in a form that may be shown, and `NAME` as it is."""
    name, equals, value = text.partition("=")
    return f"{name}{equals}{mask_secret(name, value)}"


def shown_assignment(text: str) -> str:
    """Return an assignment as an error may quote it: the value may be a secret, whatever the name."""
    name, equals, _ = text.partition("=")
    short = name if len(name) <= _QUOTED_CHARS else f"{name[:_QUOTED_CHARS]}…"
    return f"{short}=…" if equals else short


def _check_name(name: str, text: str, source: str) -> None:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
        raise UsageError(f"{source} NAME=VALUE is expected, not {shown_assignment(text)!r}")
    if name.startswith(RESERVED_PREFIX) or name in (COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID):
        raise UsageError(
            f"{source} {shown_assignment(name)} cannot be set: jaxrun sets it in every worker; leave it out"
        )


def _check_value(name: str, value: str, source: str) -> str:
    if "\0" in value:
        raise UsageError(f"{source} the value of {name} contains a NUL byte, which no variable can hold")
    return value


def _parse_value(rest: str, line: str, source: str) -> str:
    """Parse the text after the equals sign, quoted or not."""
    quote = rest[:1]
    if quote not in ("'", '"'):
        return re.sub(r"(^|\s+)#.*$", "", rest).strip()
    body = r"((?:[^\\\"]|\\.)*)\"" if quote == '"' else r"([^']*)'"
    match = re.fullmatch(body + r"\s*(?:#.*)?", rest[1:])
    if match is None:
        name = re.sub(r"^export\s+", "", line.strip()).partition("=")[0]
        raise UsageError(f"{source} the quote {quote} of {name} is not closed, or something follows it")
    return re.sub(r"\\([\\\"$`])", r"\1", match[1]) if quote == '"' else match[1]
