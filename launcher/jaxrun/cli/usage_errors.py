"""Errors about command lines that cannot run as typed, and questions about possible slips."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

import click

from jaxrun.cli.defaults import Defaults
from jaxrun.cli.job_option import JobOption, job_options
from jaxrun.spec.job.env_options import mask_secret
from jaxrun.spec.job.option_declaration import SHAPE

_RUN_PROGRAMS = ("", "jaxrun", "jaxrun attach")
_READ_BYTES = 2**20  # of a program

# Options of other launchers, and replacements.
_HEAD = "use --head HOST:PORT, the same on all hosts"
_MPI = "pass options to mpirun with --mpi-args"
_PROCESSES, _HOSTS = "use -n/--processes", "use -N/--hosts"
_HEAD_BY_HAND = "use --head HOST:PORT and --host-rank on each host"
_ITS_OWN = "the program decides that; put its own options after its name"
_OF_OTHERS = {
    "--master-addr": _HEAD,
    "--master-port": _HEAD,
    "--rdzv-endpoint": _HEAD,
    "--rdzv-backend": _HEAD,
    "--rdzv-id": _HEAD,
    "--standalone": "leave it out: one machine is the default",
    "--log-dir": "use --run-dir; the logs are in the run directory",
    "--nodes": "use -N/--hosts",
    "--ntasks": "use -n/--processes",
    "--ntasks-per-node": "use --processes-per-host",
    "-ppn": "use --processes-per-host",
    "-x": "use --env NAME",
    "-genv": "use --env NAME=VALUE",
    "-host": "use -H/--host",
    "-hosts": "use -H/--host",
    "-hostfile": "use --hostfile",
    "-machinefile": "use --hostfile",
    "-c": "write the code into a file, because each rank on each host runs one: jaxrun [OPTIONS] PROGRAM.py",
    "--map-by": _MPI,
    "--bind-to": _MPI,
    "--oversubscribe": _MPI,
    "--allow-run-as-root": _MPI,
    "--mca": _MPI,
    # accelerate launch
    "--num-processes": _PROCESSES,
    "--num-machines": _HOSTS,
    "--machine-rank": "use --host-rank",
    "--main-process-ip": _HEAD_BY_HAND,
    "--main-process-port": _HEAD_BY_HAND,
    "--mixed-precision": _ITS_OWN,
    "--multi-gpu": "leave it out: each GPU gets a process, unless -n says otherwise",
    "--cpu": "use --platform cpu",
    "--use-cpu": "use --platform cpu",
    "--gpu-ids": "use --env CUDA_VISIBLE_DEVICES=0,1",
    "--config-file": "put defaults into [tool.jaxrun] of pyproject.toml",
    "--dynamo-backend": "leave it out: JAX compiles by itself",
    # deepspeed
    "--num-gpus": _PROCESSES,
    "--num-nodes": _HOSTS,
    "--include": "use -H/--host h1:4,h2:4",
    "--exclude": "use --exclude-hosts",
    "--launcher": "use --backend",
    "--launcher-args": _MPI,
    "--deepspeed": _ITS_OWN,
    "--deepspeed-config": _ITS_OWN,
    "--enable-each-rank-log": "use --run-dir; the logs of all ranks are in the run directory",
}


def describe(error: click.ClickException, words: Collection[str], defaults: Defaults) -> str:
    """Describe the error in jaxrun's own style; `words` are the words of the command line."""
    match error:
        case click.NoSuchOption():
            return _no_such_option(error, words)
        case click.BadOptionUsage():
            return _plain(re.sub("^Option '(.*?)'", r"\1", error.message))
        case click.MissingParameter(param=click.Parameter() as param):
            return f"{_name(param)} is missing"
        case click.BadParameter(param=click.Parameter() as param):
            source = defaults.sources.get(param.name or "")
            typed = error.ctx is None or source is None or not _is_default(error.ctx, param)
            return f"{'' if typed else f'{source}: '}{_name(param)}: {_plain(error.message)}"
    return _plain(error.format_message())


def _no_such_option(error: click.NoSuchOption, words: Collection[str]) -> str:
    typed = [word.partition("=")[0] for word in words if word.startswith("-")]
    foreign = next((name for name in (error.option_name, *typed) if _as_typed(name) in _OF_OTHERS), None)
    if foreign is not None and (foreign == error.option_name or foreign.startswith(error.option_name)):
        instead = _spelled_out(foreign, list(words)) or _OF_OTHERS[_as_typed(foreign)]
        return f"there is no option {foreign}: {instead}"
    command = error.ctx.command.name if error.ctx else ""
    text = f"there is no option {error.option_name}{f' of {command}' if command != 'jaxrun' else ''}"
    close = _close_options(error)
    if close:
        return f"{text}; did you mean {' or '.join(close)}?"
    if command not in _RUN_PROGRAMS:
        return f"{text}; {command} --help lists its options"
    return f"{text}; put the program's options after its name; --help-all lists jaxrun's"


def _spelled_out(name: str, words: Sequence[str]) -> str:
    """Return the replacement for mpirun's `-x FOO=1` and `-genv FOO 1`; empty for any other option."""
    if name not in ("-x", "-genv") or name not in words:
        return ""
    variable, *rest = (*words[words.index(name) + 1 :], "")
    if name == "-genv" and "=" not in variable and rest[0]:
        variable = f"{variable}={rest[0]}"
    variable, equals, value = variable.partition("=")
    return f"use --env {variable}{equals}{mask_secret(variable, value)}" if variable[:1].isalpha() else ""


def _close_options(error: click.NoSuchOption) -> list[str]:
    """Return the options that begin with the typed text, or else the most similar one."""
    known = [name for param in (error.ctx.command.params if error.ctx else ()) for name in param.opts]
    beginning = [name for name in known if len(error.option_name) > 3 and name.startswith(error.option_name)]
    return beginning or difflib.get_close_matches(error.option_name, known, n=1, cutoff=0.7)


def _as_typed(name: str) -> str:
    return name.replace("_", "-")


def _is_default(ctx: click.Context, param: click.Parameter) -> bool:
    return param.name is not None and ctx.get_parameter_source(param.name) is click.core.ParameterSource.DEFAULT_MAP


def _name(param: click.Parameter) -> str:
    if isinstance(param, click.Option):
        return "/".join(param.opts)
    return str(param.metavar or param.name).upper()


def _plain(message: str) -> str:
    """Return the message as the end of a sentence."""
    text = message.strip().rstrip(".")
    return text[:1].lower() + text[1:]


# ---- options of jaxrun that are typed after the program, so the program gets them


def describe_misplaced(ctx: click.Context, words: Sequence[str], program: Sequence[str], source: Path | None) -> str:
    """Ask whether an option among the program's own was meant for jaxrun; empty if that is unlikely.

    words:   the whole command line
    program: its end, the program and its arguments
    source:  the program's file; an option that the file mentions belongs to the program, and so does any if it is None
    """
    before = words[: len(words) - len(program)]
    if "--" in before or source is None:
        return ""
    options, text = _options(ctx), _read(source)
    for at, word in enumerate(program[1:], 1):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        option = options.get(name)
        if option is None or _mentions(text, name):
            continue
        end = at + (1 if equals or option.is_flag else 2)
        if option.is_flag or (end <= len(program) and _fits(ctx, option, value if equals else program[end - 1])):
            moved = program[at:end]
            instead = shlex.join(["jaxrun", *moved, *before, *program[:at], *program[end:]])
            return f"{shlex.join(moved)} goes to {program[0]}; did you mean {instead}?"
    return ""


def _options(ctx: click.Context) -> dict[str, JobOption]:
    """Return the options to look for, by each of their names: those that most jobs need, and those of their shape.

    An option that the command line also gives to jaxrun is known to the user, so it is left out.
    """
    typed = click.core.ParameterSource.COMMANDLINE
    return {
        name: option
        for option in job_options(ctx.command)
        if option.declared.main or option.declared.group == SHAPE
        if option.opts != ["-m"] and ctx.get_parameter_source(option.parameter) is not typed
        for name in (*option.opts, *option.declared.aliases)
    }


def _fits(ctx: click.Context, option: JobOption, value: str) -> bool:
    try:
        option.type.convert(value, option, ctx)
    except click.ClickException:
        return False
    return True


def _mentions(text: str, name: str) -> bool:
    """Whether a program's text has an option of this name: "-n" or "n" in quotes, --processes, or a field of it."""
    bare = name.lstrip("-")
    found = re.search(rf"""["'`]-{{0,2}}{re.escape(bare)}\b""", text)
    return found is not None or (len(bare) > 2 and re.search(rf"\b{bare.replace('-', '[-_]')}\b", text) is not None)


def _read(source: Path) -> str:
    try:
        with source.open("rb") as file:
            return file.read(_READ_BYTES).decode(errors="replace")
    except OSError:
        return ""
