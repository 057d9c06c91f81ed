"""The options whose values every worker gets, too, as its settings; protocol/settings.py has their defaults."""

from __future__ import annotations

from jaxrun.protocol.flight_file import LOCKSTEP_MODES
from jaxrun.protocol.settings import COMPILE_MODES, MAKE_MESH_MODES, TLS_MODES
from jaxrun.spec.job.option_checks import check_compile_cache, check_stdin, positive_seconds
from jaxrun.spec.job.option_declaration import FAILURE, OUTPUT, SHAPE, START, OptionValues, option
from jaxrun.spec.job.option_kinds import FLAG, TEXT, TIME, Kind, one_of

POD_INIT_TIMEOUT_S = 600.0  # for hosts with a command each, which begins once the host's image has been pulled


class WorkerOptions(OptionValues, frozen=True, kw_only=True):
    """The values of these options: the fields of WorkerSettings."""

    make_mesh = option(
        "--make-mesh",
        one_of(MAKE_MESH_MODES),
        "Who makes a jax.make_mesh over several hosts: jaxrun puts the hosts along the leading axes; jax refuses since "
        "0.10.2. [default: {default}]",
        group=SHAPE,
        doctor=False,
    )
    stdin = option(
        "--stdin",
        TEXT,
        "The rank that reads jaxrun's standard input. [default: 0]",
        group=START,
        metavar="RANK|none",
        check=check_stdin,
        doctor=False,
    )
    torch_env = option(
        "--torch-env",
        FLAG,
        "Also set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the like, as torchrun does.",
        group=START,
        doctor=False,
    )
    expand_args = option(
        "--expand-args",
        FLAG,
        "In the program's arguments, replace %r, %l and %h by rank, local rank and host, and %% by %, as in --wrap: "
        "-m cProfile -o out.%r train.py.",
        group=START,
        doctor=False,
    )
    compile = option(
        "--compile",
        one_of(COMPILE_MODES),
        "Compile each program once for all ranks of a host if that is safe (auto), or in each rank. "
        "[default: {default}]",
        group=START,
    )
    compile_cache = option(
        "--compile-cache",
        Kind(empty="", path="dir"),
        "Keep compiled programs in this directory for the next attempt and the next job; auto: in ~/.cache/jaxrun. "
        "[default: {default}]",
        group=START,
        metavar="DIR|auto|off",
        check=check_compile_cache,
    )
    coordinator_tls = option(
        "--coordinator-tls",
        one_of(TLS_MODES),
        "Keep strangers out of JAX's coordinator, by mutual TLS, which JAX has since 0.12: on, off, or where the job "
        "has several hosts (auto). [default: {default}]",
        group=START,
    )
    verbose = option("-v/--verbose", FLAG, "Say what jaxrun does.", group=OUTPUT)
    lockstep = option(
        "--lockstep",
        one_of(LOCKSTEP_MODES),
        "Compare the cross-process calls of the ranks. record: report a difference; check: also exit with 1 at the "
        "program's end; fail: end the job at once, as failed; strict: stop before the call that differs (slow, for "
        "debugging). [default: {default}]",
        group=FAILURE,
    )
    init_timeout = option(
        "--init-timeout",
        TIME,
        "Stop the job if not all processes have joined after this time. [default: {default}; with --host-rank or "
        f"attach in a pod {POD_INIT_TIMEOUT_S:g}]",
        group=FAILURE,
        check=positive_seconds,
    )
    pdb = option("--pdb", FLAG, "Open a debugger in the rank that fails first, in this terminal.", group=FAILURE)
    debug_post_mortem = option(
        "--debug-post-mortem",
        FLAG,
        "Keep the frames of the rank that fails first until jaxrun debug has connected an editor with it.",
        group=FAILURE,
        doctor=False,
    )
    keep_survivors = option(
        "--keep-survivors",
        FLAG,
        "The failure of a rank other than 0 does not end the job: the others are told, and go on; with --max-restarts "
        "it is started again, N times in the whole job. The program must use JAX's live_devices (docs/survivors.md).",
        group=FAILURE,
    )
