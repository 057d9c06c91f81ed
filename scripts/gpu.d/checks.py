"""The checks of scripts/gpu, one function each: it returns what was seen, and raises Failed if that is wrong."""

from __future__ import annotations

import inspect
import os
import re
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
from machine import PROGRAMS, Done, Failed, Machine, run, used_memory

from jaxrun.analysis.verdict.error_lookup import explain_unavailable

_STALL = 10  # --stall-timeout in seconds
_STARTS = 3  # of each kind
_COMPUTES = 10  # seconds, until Ctrl-C
_LEFT = 0.02  # of a GPU's memory: its driver's own share
_BENCH = Path(__file__).resolve().parents[1] / "bench.d" / "lockstep.py"
_BY_PCI = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as nvidia-smi counts


@dataclass(frozen=True)
class Check:
    """One check.

    gpus:     the least number of GPUs that it needs
    shows:    its line in the table
    on_cpus:  whether it runs with --platform cpu
    """

    name: str
    gpus: int
    shows: str
    run: Callable[[Machine], str]
    on_cpus: bool = False


def selfcheck(machine: Machine) -> str:
    done = machine.jaxrun("-n", str(machine.ranks), "-m", "jaxrun_runtime.programs.selfcheck")
    done.expect(0, r"are right on \d+ device")
    return f"{done.find(r'psum, all_gather.*')}; {done.find(r'done in .*')}"


def regression(machine: Machine) -> str:
    done = machine.jaxrun("-n", str(machine.ranks), "-m", "jaxrun_runtime.programs.regression")
    return done.expect(0).find(r"y = .*truth[^)]*\)")


def counts(machine: Machine) -> str:
    """Check that there is a rank for each GPU of nvidia-smi without -n, and that one more rank is refused."""
    _expect_gpus(machine.jaxrun(PROGRAMS / "ordinals.py", env=_BY_PCI), [gpu.uuid for gpu in machine.gpus])
    more = str(len(machine.gpus) + 1)
    machine.jaxrun("-n", more, PROGRAMS / "ordinals.py").expect(2, r"takes \d+ GPUs, but \d+ (is|are) visible")
    return f"{len(machine.gpus)} ranks, one GPU each, in nvidia-smi's order; -n {more} is refused"


def visible(machine: Machine) -> str:
    """Check that CUDA_VISIBLE_DEVICES chooses GPUs and their order."""
    order = list(reversed(range(len(machine.gpus))))
    chosen = {**_BY_PCI, "CUDA_VISIBLE_DEVICES": ",".join(map(str, order))}
    _expect_gpus(machine.jaxrun(PROGRAMS / "ordinals.py", env=chosen), [machine.gpus[index].uuid for index in order])
    last = {**_BY_PCI, "CUDA_VISIBLE_DEVICES": str(order[0])}
    _expect_gpus(machine.jaxrun(PROGRAMS / "ordinals.py", env=last), [machine.gpus[order[0]].uuid])
    return f"CUDA_VISIBLE_DEVICES={chosen['CUDA_VISIBLE_DEVICES']} and ={order[0]}: the ranks have these, in this order"


def _expect_gpus(done: Done, uuids: list[str]) -> None:
    found = {int(rank): uuid for rank, uuid in re.findall(r"rank (\d+) has (GPU-[-0-9a-f]+)", done.expect(0).output)}
    if [found.get(rank) for rank in range(len(uuids))] != uuids:
        raise Failed(f"the ranks have {found}, nvidia-smi lists {uuids}", done.output)


def no_gpu(machine: Machine) -> str:
    done = machine.jaxrun("-n", "1", PROGRAMS / "ordinals.py", env={"CUDA_VISIBLE_DEVICES": ""})
    return "exit 2: " + done.expect(2).find(r"asks for GPUs, but none is visible.*")


def fallback(machine: Machine) -> str:
    """Check that a rank without a GPU does not compute on its CPU. sitecustomize.py hides the GPU of the last rank."""
    hidden = {"PYTHONPATH": _path_with("hide_gpu"), "HIDE_GPU_OF_RANK": str(machine.ranks - 1)}
    words = [word for name, value in hidden.items() for word in ("--env", f"{name}={value}")]
    # Without a fork, sitecustomize.py runs in each rank.
    done = machine.jaxrun("-n", str(machine.ranks), "--no-fork", *words, PROGRAMS / "ordinals.py")
    if done.status == 0 or re.search(r"rank \d+ has", done.output):
        raise Failed(f"exit {done.status}: the program ran", done.output)
    return f"exit {done.status}: {done.find(r'(?:jaxrun: refused|what this means:).*')}"


def _path_with(directory: str) -> str:
    return os.pathsep.join((str(PROGRAMS / directory), os.environ["PYTHONPATH"]))


def names(machine: Machine) -> str:
    """Check that nvidia-smi shows the ranks by name. In a container it may list no process at all."""
    done = machine.jaxrun("-n", str(machine.ranks), PROGRAMS / "listed.py").expect(0)
    listed = done.find(r"listed:.*").removeprefix("listed:").strip()
    if not listed:
        return "nvidia-smi lists no processes on this machine"
    if any(f"jaxrun rank {rank}: listed.py" not in listed for rank in range(machine.ranks)):
        raise Failed(f"nvidia-smi lists {listed}", done.output)
    return listed


def late_variable(machine: Machine) -> str:
    """Check that variables for the memory of GPUs that the program sets are reported as too late."""
    done = machine.jaxrun("-n", str(machine.ranks), PROGRAMS / "listed.py").expect(0)
    return done.find(r"listed.py:\d+ sets .* too late here: use --env XLA_PYTHON_CLIENT_MEM_FRACTION=.5")


def out_of_memory(machine: Machine) -> str:
    done = machine.jaxrun("-n", "1", PROGRAMS / "out_of_memory.py")
    return done.expect(1, r"RESOURCE_EXHAUSTED").find(r"the memory of the GPU is full.*")


def one_gpu_for_two(machine: Machine) -> str:
    """Check that jaxrun explains NCCL's error for two processes of plain JAX on one GPU."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, str(PROGRAMS / "one_gpu.py"), f"127.0.0.1:{port}"]
    ranks = [
        subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in (0, 1)
    ]
    try:
        output = "\n".join(rank.communicate(timeout=180)[0] for rank in ranks)
    except subprocess.TimeoutExpired:
        raise Failed("two processes on one GPU neither run nor fail within 180 s") from None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    explained = explain_unavailable("", output)
    if not explained.means:
        raise Failed("no known error explains NCCL's text", output)
    return explained.means


def waits_for_device(machine: Machine) -> str:
    """Check a rank that waits for a computation without end, as for a collective. The wait may spin."""
    words = ("-n", "1", "--stall-timeout", str(_STALL), PROGRAMS / "endless.py", "device")
    return f"exit 124: {machine.jaxrun(*words, limit=120).expect(124).find(r'.*endless.py:[0-9]+.*')}"


def waits_for_rank(machine: Machine) -> str:
    """Check that the last rank, which sleeps, is named while all others wait in a collective on their GPUs."""
    words = ("-n", str(machine.ranks), "--stall-timeout", str(_STALL), PROGRAMS / "endless.py", "collective")
    blamed = rf"1 rank +{machine.ranks - 1}\b.*"
    return f"exit 124: {machine.jaxrun(*words, limit=120).expect(124).find(blamed)}"


def start_up(machine: Machine) -> str:
    """Measure seconds until the program begins, in forks of a process that imported jax and in fresh interpreters."""
    kinds = {"forked": (), "fresh": ("--no-fork",)}
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(_STARTS):
        for kind, words in kinds.items():
            done = machine.jaxrun("-n", str(machine.ranks), *words, PROGRAMS / "parent.py").expect(0, f"rank 0 {kind}")
            taken[kind].append(float(done.find(r"start-up [\d.]+").split()[1]))
    shown = ", ".join(f"{kind} {statistics.median(seconds):.2f} s" for kind, seconds in taken.items())
    return f"{machine.ranks} process{'es' if machine.ranks > 1 else ''}: {shown}"


def cuda_before_fork(machine: Machine) -> str:
    """Check that workers are fresh interpreters if something has started CUDA in the process that would fork."""
    started = {"PYTHONPATH": _path_with("start_cuda")}
    machine.jaxrun("-n", str(machine.ranks), PROGRAMS / "parent.py", env=started).expect(0, "rank 0 fresh")
    return "cuInit in sitecustomize.py: fresh interpreters"


def killed(machine: Machine) -> str:
    """Check that the GPU memory of a killed rank is free before jaxrun ends, so that another job can start at once."""
    done = machine.jaxrun("-n", str(machine.ranks), PROGRAMS / "killed.py").expect(137)
    held, left = max(map(float, re.findall(r"holds (\d+) MiB", done.output))), max(used_memory())
    if not left < _LEFT * held:
        raise Failed(f"{left:.0f} of {held:.0f} MiB are in use after the job", done.output)
    return f"exit 137; {held:.0f} MiB in use before, {left:.0f} MiB after"


def restarted(machine: Machine) -> str:
    """Check that a job that lost a rank restarts once the GPU's memory is free."""
    words = ("-n", str(machine.ranks), "--max-restarts", "1", "--no-run-dir")
    done = machine.jaxrun(*words, PROGRAMS / "restarted.py").expect(0, r"attempt 1 of 2 failed: rank 0 .*SIGKILL")
    if "still not free" in done.output:
        raise Failed("the memory was not free in time", done.output)
    return f"the first rank {done.find(r'computes [0-9.]+ s after the failure')}"


def interrupted(machine: Machine) -> str:
    """Check Ctrl-C while a rank waits for its device: Python does not see it; the rank is killed after the grace."""
    job = (sys.executable, "-m", "jaxrun", "--platform", machine.platform, "-n", "1", PROGRAMS / "endless.py", "device")
    done = run("timeout", "--foreground", "--preserve-status", "-s", "INT", str(_COMPUTES), *job).expect(130)
    return f"exit 130 {done.seconds - _COMPUTES:.1f} s later: {done.find(r'stuck at [^)]*')}"


def gang(machine: Machine) -> str:
    """Check that a gang starts, computes, loses a rank and starts again."""
    done = run(sys.executable, PROGRAMS / "gang.py", machine.platform, str(machine.ranks)).expect(0)
    return done.find(r"started in.*")


def record_cost(machine: Machine) -> str:
    """Measure what recording adds to a call, with scripts/bench lockstep."""
    words = ("-n", str(machine.ranks), "--only", "record", "--rounds", "2", "--out", ".")
    done = run(sys.executable, _BENCH, *words, limit=900).expect(0)
    rows = [done.find(rf"^{kind} .* record .*").split() for kind in ("global jit, no collective", "psum")]
    return "; ".join(f"{row[0]} call: {row[-4]} us, {row[-2]} us of it recording" for row in rows)


def pair(machine: Machine) -> str:
    """Check that two ranks with two host names meet, on GPUs over NCCL, and that rank 0 names the network."""
    done = machine.pair(fate="nothing").expect(0)
    if machine.platform == "cpu":
        return done.find(r"done in .*")
    network = done.find(r"NCCL's network between hosts: .*")
    return f"{network}; {done.find(r'done in .*')}"


def lag(machine: Machine) -> str:
    done = machine.pair("--stall-timeout", str(_STALL), fate="lag").expect(124)
    return f"exit 124: {done.find_sentence(r'rank 1 [(]gb[)] sleeps at [^,]*, and rank 0 waits for it')}"


def another_function(machine: Machine) -> str:
    return _diverges(machine, "function")


def another_shape(machine: Machine) -> str:
    return _diverges(machine, "shape")


def _diverges(machine: Machine, fate: str) -> str:
    """Check that another program in rank 1 is reported before its compilation ends: on GPUs it waits for rank 0."""
    done = machine.pair("--lockstep", "fail", "--stall-timeout", "60", fate=fate)
    if done.status in (0, 124):
        raise Failed(f"exit {done.status}: the ranks were not found out of step", done.output)
    shapes = r"float32.2,4..* on rank 0 .*float32.2,8..*"
    seen = done.find(shapes if fate == "shape" else r"ranks were out of step at .*, for which")
    return f"exit {done.status} after {done.seconds:.0f} s: {seen.removesuffix(', for which')}"


def early(machine: Machine) -> str:
    done = machine.pair(fate="early").expect(124)
    return f"exit 124 after {done.seconds:.0f} s: {done.find_sentence(r'rank 1 finished [^;]*')}"


def pair_killed(machine: Machine) -> str:
    done = machine.pair(fate="kill").expect(137)
    return f"exit 137: {done.find(r'rank 1 .*SIGKILL[^,.]*')}"


def pair_restarted(machine: Machine) -> str:
    """Check that the next attempt continues from a snapshot in the hosts' memory, and that NCCL connects again."""
    done = machine.pair("--max-restarts", "1", fate="restart").expect(0, "attempt 1 of 2 failed")
    return done.find(r"went on from step [23], computes [\d.]+ s later")


def straggler(machine: Machine) -> str:
    return machine.pair(fate="straggler").expect(0).find(r"rank 1 [(]gb[)] came last to .*")


def pair_cost(machine: Machine) -> str:
    """Measure a call of two ranks with and without recording; the least of two jobs each."""
    least: dict[str, int] = {}
    for mode in ("record", "off") * 2:
        done = machine.pair("--lockstep", mode, fate="cost").expect(0)
        taken = int(done.find(r"one call takes \d+").split()[-1])
        least[mode] = min(taken, least.get(mode, taken))
    return ", ".join(f"{mode} {taken} us" for mode, taken in least.items())


def coordinator_tls(machine: Machine) -> str:
    has_it = "mtls_cert_file" in inspect.signature(jax.distributed.initialize).parameters
    said = machine.pair(fate="tls").expect(0).find(r"JAX's coordinator speaks (?:no )?TLS")
    if has_it == ("no TLS" in said):
        raise Failed(f"{said}, and this JAX {'has' if has_it else 'has no'} TLS for it")
    return said


def left_out(machine: Machine) -> str:
    """Check that NCCL's answer names the missing rank if all ranks wait at one line, without recorders."""
    done = machine.pair("--lockstep", "off", "--stall-timeout", str(_STALL), fate="left-out").expect(124)
    return f"exit 124: {done.find_sentence(r'rank 1 [(]gb[)] has launched [^:]*')}"


CHECKS = (
    Check("selfcheck", 1, "psum, all_gather and ppermute over all devices", selfcheck, on_cpus=True),
    Check("regression", 1, "a sharded program", regression, on_cpus=True),
    Check("counts", 1, "a rank for each GPU of nvidia-smi, and no more", counts),
    Check("visible", 2, "CUDA_VISIBLE_DEVICES chooses and orders", visible),
    Check("no-gpu", 1, "no visible GPU is refused", no_gpu),
    Check("fallback", 1, "a rank that falls back to its CPU is refused", fallback),
    Check("names", 1, "nvidia-smi shows ranks by name", names),
    Check("late-variable", 1, "XLA's variables in the program's first lines are told to be too late", late_variable),
    Check("out-of-memory", 1, "a full GPU is explained", out_of_memory),
    Check("one-gpu-for-two", 1, "two processes on one GPU: NCCL's text is explained", one_gpu_for_two),
    Check("waits-for-device", 1, "`--stall-timeout` while a rank waits for its device", waits_for_device),
    Check("waits-for-rank", 2, "`--stall-timeout` names the rank that others wait for", waits_for_rank, on_cpus=True),
    Check("start-up", 1, "start-up, fork server against fresh processes", start_up, on_cpus=True),
    Check("cuda-before-fork", 1, "CUDA that is started before a fork forbids it", cuda_before_fork),
    Check("killed", 1, "the memory of a killed rank is free when jaxrun ends", killed),
    Check("restarted", 1, "`--max-restarts` while a rank holds its GPU's memory", restarted, on_cpus=True),
    Check("interrupted", 1, "Ctrl-C while a rank waits for its device", interrupted),
    Check("gang", 1, "a gang starts, and starts anew after it has lost a rank", gang, on_cpus=True),
    Check("pair", 1, "two ranks on two host names meet, and by which network", pair, on_cpus=True),
    Check("pair-lag", 1, "the same: a rank that the other waits for", lag, on_cpus=True),
    Check("pair-function", 1, "the same: another function in one rank", another_function, on_cpus=True),
    Check("pair-shape", 1, "the same: another shape in one rank", another_shape, on_cpus=True),
    Check("pair-early", 1, "the same: one ends early with status 0", early, on_cpus=True),
    Check("pair-killed", 1, "the same: one is killed", pair_killed, on_cpus=True),
    Check("pair-restarted", 1, "the same: `--max-restarts` and a snapshot", pair_restarted, on_cpus=True),
    Check("pair-straggler", 1, "the same: one comes late to every step", straggler, on_cpus=True),
    Check("pair-cost", 1, "the same: what `--lockstep record` adds to a call", pair_cost, on_cpus=True),
    Check("pair-tls", 1, "the same: JAX's coordinator speaks TLS where JAX has it", coordinator_tls, on_cpus=True),
    Check("pair-left-out", 1, "the same: all wait at one line, and NCCL says for whom", left_out),
    Check("record-cost", 2, "what `--lockstep record` adds to a call", record_cost, on_cpus=True),
)
