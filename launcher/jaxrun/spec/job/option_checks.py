"""Checks of single values: each returns what completes "--option …" for a wrong value, and "" for any other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from jaxrun.protocol.settings import CACHE_AUTO, CACHE_OFF, STDIN_NONE
from jaxrun.spec.job.option_kinds import AUTO_S

_MAX_PROCESSES = 1_000_000  # more must be a typing error
PRELOAD_AUTO, PRELOAD_NONE = "auto", "none"  # values of --preload besides names of modules


def at_least(least: int) -> Callable[[int], str]:
    return lambda value: f"must be {least} or more, not {value}" if value < least else ""


def check_processes(count: int) -> str:
    too_many = f"must be {_MAX_PROCESSES} or less, not {count}" if count > _MAX_PROCESSES else ""
    return at_least(1)(count) or too_many


def positive_seconds(value: float) -> str:
    return "" if 0 < value < math.inf else f"must be a positive number of seconds, not {value:g}"


def seconds_or_never(seconds: float) -> str:
    return positive_seconds(seconds) if seconds else ""


def seconds_never_or_auto(seconds: float) -> str:
    return "" if seconds == AUTO_S else seconds_or_never(seconds)


def any_seconds(seconds: float) -> str:
    return "" if 0 <= seconds < math.inf else f"must be 0 seconds or more, not {seconds:g}"


def check_preload(modules: str) -> str:
    if modules in (PRELOAD_AUTO, PRELOAD_NONE):
        return ""
    wrong = [name for name in modules.split(",") if not all(part.isidentifier() for part in name.split("."))]
    return f"must be auto, none or names of modules, such as flax.nnx,optax; {wrong[0]!r} is no name" if wrong else ""


def check_compile_cache(choice: str) -> str:
    is_valid = choice in (CACHE_OFF, CACHE_AUTO) or choice.startswith("/")
    return "" if is_valid else f"must be a directory, auto or off, not {choice!r}"


def check_stdin(who: str) -> str:
    is_valid = who == STDIN_NONE or (who.isascii() and who.isdigit())
    return "" if is_valid else f"must be the number of a rank, or {STDIN_NONE}, not {who!r}"


def check_metrics(where: str) -> str:
    _, _, port = where.rpartition(":")
    valid = not where or (port.isdecimal() and int(port) < 2**16)
    return "" if valid else f"must be a port, or an address and a port, 9400 or 0.0.0.0:9400, not {where!r}"


def check_kubernetes_name(name: str) -> str:
    valid = not name or (len(name) <= 63 and re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name, re.ASCII))
    return "" if valid else f"must be at most 63 of a-z, 0-9 and -, with none at its ends, not {name!r}"


def check_image(image: str) -> str:
    """Check an image's name as the container runtimes read it: [HOST[:PORT]/]PATH[:TAG][@DIGEST]."""
    part = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
    form = rf"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/|\[[0-9a-f:]+\](?::[0-9]+)?/)?{part}(?:/{part})*(?::\w[\w.-]{{0,127}})?"
    digest = r"(?:@[A-Za-z][A-Za-z0-9+._-]*:[0-9a-fA-F]{32,})?"
    valid = not image or re.fullmatch(form + digest, image, re.ASCII)
    return "" if valid else f"must be the name of an image, such as registry.org/me/train:1, not {image!r}"
