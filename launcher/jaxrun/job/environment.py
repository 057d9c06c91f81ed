"""The environment of the workers: what the user adds (--env, --env-file) and what jaxrun sets and takes away.

All of it is decided from mappings that are passed in; only read_env_file touches a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from jaxrun.errors import UsageError
from jaxrun.job import interpreter
from jaxrun.protocol.names import COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID, RESERVED_PREFIX

PLATFORMS_VARIABLE = "JAX_PLATFORMS"
CPU_DEVICES_VARIABLE = "JAX_NUM_CPU_DEVICES"

# JAX would take its place in the job from these, or an earlier job's values would pass for this one's.
_OTHER_JOB_VARIABLES = (
    COORDINATOR_ADDRESS,
    NUM_PROCESSES,
    PROCESS_ID,
    "JAX_COORDINATOR_BIND_ADDRESS",
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_PARTITION_INDEX",
    "JAX_SLICE_INDEX",
)
_THREAD_COUNT_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_PROXY_VARIABLES = ("grpc_proxy", "http_proxy", "https_proxy")
_LOOPBACK = "127.0.0.1,localhost,::1"
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_URL_PASSWORD = re.compile(r"(://)[^/@\s]+@")


def parse_assignment(text: str, environ: Mapping[str, str], source: str = "--env") -> tuple[str, str]:
    """A variable of --env: "NAME=VALUE", or "NAME" for the value that it has in `environ`."""
    name, equals, value = text.partition("=")
    _check_name(name, text, source)
    if equals:
        return name, _check_value(name, value, source)
    if name not in environ:
        raise UsageError(f"{source} {name} passes a variable on, but {name} is not set; write {name}=VALUE")
    return name, environ[name]


def read_env_file(path: Path) -> dict[str, str]:
    """The variables of an --env-file. UsageError names the file and the line that is malformed."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"--env-file {path} cannot be read: {error.strerror}") from None
    return parse_env_file(text, str(path))


def parse_env_file(text: str, name: str) -> dict[str, str]:
    """The variables in `text`, whose lines look like these; the later of two that are alike counts.

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
        source = f"{name}:{number}:"
        variable, equals, rest = re.sub(r"^export\s+", "", stripped).partition("=")
        if not equals:
            raise UsageError(f"{source} NAME=VALUE is expected, not {line!r}")
        _check_name(variable, line, source)
        values[variable] = _check_value(variable, _parse_value(rest, line, source), source)
    return values


def mask_secret(name: str, value: str) -> str:
    """`value` as it may be shown: *** for a secret, and no password within a URL."""
    if value and _SECRET_NAME.search(name):
        return "***"
    return _URL_PASSWORD.sub(r"\1***@", value)


def inherited_job_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names in `environ` that belong to another job and must not reach a worker."""
    return tuple(sorted(name for name in environ if name.startswith(RESERVED_PREFIX) or name in _OTHER_JOB_VARIABLES))


def common_settings(environ: Mapping[str, str], *, cores: int, workers: int) -> dict[str, str]:
    """The variables for every worker of any platform, where `environ` is what the user gives them.

    `workers` of them share this machine's `cores`.
    """
    threads = str(max(1, cores // workers))
    values = {name: threads for name in _THREAD_COUNT_VARIABLES if name not in environ}
    return values | interpreter.interpreter_settings(environ) | _no_proxy(environ)


def _no_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Keep gRPC from looking for the coordinator behind a proxy: it would wait there until its timeout."""
    if not any(environ.get(name) or environ.get(name.upper()) for name in _PROXY_VARIABLES):
        return {}
    given = next((environ[n] for n in ("no_grpc_proxy", "no_proxy", "NO_PROXY") if environ.get(n)), "")
    return {"no_grpc_proxy": f"{given},{_LOOPBACK}" if given else _LOOPBACK}


def _check_name(name: str, text: str, source: str) -> None:
    if _VARIABLE_NAME.fullmatch(name) is None:
        raise UsageError(f"{source} NAME=VALUE is expected, not {text!r}")
    if name.startswith(RESERVED_PREFIX) or name in (COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID):
        raise UsageError(f"{source} {name} cannot be given: jaxrun sets it in every worker; leave it out")


def _check_value(name: str, value: str, source: str) -> str:
    if "\0" in value:
        raise UsageError(f"{source} the value of {name} contains a NUL byte, which no variable can hold")
    return value


def _parse_value(rest: str, line: str, source: str) -> str:
    quote = rest[:1]
    if quote not in ("'", '"'):
        return re.sub(r"(^|\s+)#.*$", "", rest).strip()
    body = r"((?:[^\\\"]|\\.)*)\"" if quote == '"' else r"([^']*)'"
    match = re.fullmatch(body + r"\s*(?:#.*)?", rest[1:])
    if match is None:
        raise UsageError(f"{source} the quote {quote} is not closed, or something follows it: {line!r}")
    return re.sub(r"\\([\\\"$`])", r"\1", match[1]) if quote == '"' else match[1]
