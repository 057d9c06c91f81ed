"""Options of mpirun, srun, accelerate, deepspeed and torchrun that jaxrun lacks, and what to type instead of each.

Pure: a table, and how a typed word is found in it. Options of torchrun that jaxrun understands are in torchrun.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxrun.spec.job.env_options import mask_secret

_MPI = "pass options to mpirun with --mpi-args"
_SLURM = "pass options to srun and sbatch with --slurm-args"
_PROCESSES, _HOSTS, _PER_HOST = "use -n/--processes", "use -N/--hosts", "use --processes-per-host"
_HOST, _HOSTFILE = "use -H/--host h1:4,h2:4", "use --hostfile"
_HEAD = "use --head HOST:PORT, the same on all hosts"
_HEAD_BY_HAND = "use --head HOST:PORT and --host-rank on each host"
_ITS_OWN = "the program decides that; put its own options after its name"
_COMPILES = "leave it out: JAX compiles by itself"
_LOGS = "leave it out: the run directory keeps all output of all ranks (--run-dir)"
_PREFIXES = "leave it out: each line on the screen begins with its rank"
_BIND = "use --bind"
_CORES = "use --cpus-per-process"
_SHARDS = "leave it out: JAX shards by jax.sharding, and the program decides how"
_QUIET = "use --quiet"
_PLAN = "use --dry-run or -v, which show what jaxrun starts and where"

# By name without its dashes; a single letter with one. mpirun takes one dash or two for most of its options.
_INSTEAD = {
    # torchrun, whose options `jaxrun` itself understands, and `jaxrun attach` does not
    "master-addr": _HEAD,
    "master-port": _HEAD,
    "rdzv-endpoint": _HEAD,
    "rdzv-backend": _HEAD,
    "rdzv-id": _HEAD,
    "log-dir": _LOGS,
    # mpirun: Open MPI, MPICH and Intel MPI
    "-x": "use --env NAME",
    "genv": "use --env NAME=VALUE",
    "env": "use --env NAME=VALUE",
    "genvlist": "use --env NAME for each",
    "envlist": "use --env NAME for each",
    "genvall": "use --env NAME for each variable that hosts need",
    "envall": "use --env NAME for each variable that hosts need",
    "host": _HOST,
    "hosts": _HOST,
    "-f": _HOSTFILE,
    "hostfile": _HOSTFILE,
    "machinefile": _HOSTFILE,
    "ppn": _PER_HOST,
    "perhost": _PER_HOST,
    "npernode": _PER_HOST,
    "-c": "write the code into a file, because each rank on each host runs one: jaxrun [OPTIONS] PROGRAM.py",
    "map-by": _MPI,
    "rank-by": _MPI,
    "bind-to": f"{_BIND}, or {_MPI}",
    "oversubscribe": _MPI,
    "nooversubscribe": _MPI,
    "use-hwthread-cpus": _MPI,
    "allow-run-as-root": _MPI,
    "mca": _MPI,
    "pmca": _MPI,
    "prtemca": _MPI,
    "rankfile": _MPI,
    "bootstrap": _MPI,
    "launcher-exec": _MPI,
    "gtool": "use --wrap COMMAND",
    "iface": "use --interface",
    "wdir": "cd there first: ranks start in the current directory",
    "wd": "cd there first: ranks start in the current directory",
    "chdir": "cd there first: ranks start in the current directory",
    "prefix": f"use --mpirun PATH, or {_MPI}",
    "display-map": _PLAN,
    "display-allocation": _PLAN,
    "display": _PLAN,
    "report-bindings": _PLAN,
    "tag-output": _PREFIXES,
    "prepend-rank": _PREFIXES,
    "label": _PREFIXES,
    "-l": _PREFIXES,
    "timestamp-output": "leave it out: events.jsonl and jaxrun explain have the times",
    "output-filename": _LOGS,
    # srun
    "nodes": _HOSTS,
    "ntasks": _PROCESSES,
    "ntasks-per-node": _PER_HOST,
    "cpus-per-task": _CORES,
    "gpus-per-node": "use --gpus-per-host",
    "gpus-per-task": "use --gpus-per-host; each process gets its share",
    "gpus": "leave it out for all GPUs of a host, one process each; use -n or --gpus-per-host for fewer",
    "gpu": "leave it out: each GPU gets a process; --platform gpu refuses to run without one",
    "-G": "use --gpus-per-host",
    "gres": "use --gpus-per-host",
    "-p": "use --partition",
    "-A": "use --account",
    "-w": _HOST,
    "nodelist": _SLURM,
    "-J": "use --tag for a note; the job has the program's name",
    "job-name": "use --tag for a note; the job has the program's name",
    "mem": _SLURM,
    "qos": _SLURM,
    "constraint": _SLURM,
    "reservation": _SLURM,
    "exclusive": _SLURM,
    "mpi": _SLURM,
    "cpu-bind": _BIND,
    "output": _LOGS,
    "error": _LOGS,
    # accelerate launch
    "num-processes": _PROCESSES,
    "num-machines": _HOSTS,
    "machine-rank": "use --host-rank",
    "main-process-ip": _HEAD_BY_HAND,
    "main-process-port": _HEAD_BY_HAND,
    "same-network": "leave it out: all hosts reach host 0 at --head",
    "mixed-precision": _ITS_OWN,
    "downcast-bf16": _ITS_OWN,
    "gradient-accumulation-steps": _ITS_OWN,
    "multi-gpu": "leave it out: each GPU gets a process, unless -n says otherwise",
    "cpu": "use --platform cpu",
    "use-cpu": "use --platform cpu",
    "tpu": "use --platform tpu",
    "num-tpu-cores": "leave it out: one process has all TPU chips of its host",
    "gpu-ids": "use --env CUDA_VISIBLE_DEVICES=0,1",
    "num-cpu-threads-per-process": "use --env OMP_NUM_THREADS=N; --bind gives each rank cores of its own",
    "enable-cpu-affinity": _BIND,
    "config-file": "put defaults into [tool.jaxrun] of pyproject.toml",
    "dynamo-backend": _COMPILES,
    "dynamo-mode": _COMPILES,
    "dynamo-use-fullgraph": _COMPILES,
    "dynamo-use-dynamic": _COMPILES,
    "use-fsdp": _SHARDS,
    "use-parallelism-config": _SHARDS,
    "use-megatron-lm": _SHARDS,
    "use-deepspeed": _SHARDS,
    "zero-stage": _SHARDS,
    "zero3-init-flag": _SHARDS,
    "deepspeed-config-file": _ITS_OWN,
    "deepspeed-hostfile": _HOSTFILE,
    "deepspeed-multinode-launcher": "use --backend",
    "-q": _QUIET,
    # deepspeed
    "num-gpus": _PROCESSES,
    "num-accelerators": _PROCESSES,
    "num-nodes": _HOSTS,
    "-i": _HOST,
    "include": _HOST,
    "-e": "use --exclude-hosts",
    "exclude": "use --exclude-hosts",
    "launcher": "use --backend",
    "launcher-args": _MPI,
    "no-ssh": _HEAD_BY_HAND,
    "no-ssh-check": "leave it out: hosts that ssh does not reach are named",
    "ssh-port": "put the port into ~/.ssh/config",
    "force-multi": f"leave it out, or {_HOST}",
    "no-local-rank": "leave it out: no program gets --local_rank",
    "save-pid": "leave it out: jaxrun top and jaxrun stacks find the job by its run directory",
    "elastic-training": "use -N MIN:MAX and --max-restarts",
    "min-elastic-nodes": "use --min-hosts",
    "max-elastic-nodes": "use -N MIN:MAX",
    "bind-cores-to-rank": "use --bind cores",
    "bind-core-list": _BIND,
    "venv-script": "start jaxrun in that environment; --stage venv copies it to the hosts",
    "enable-each-rank-log": _LOGS,
    "autotuning": _ITS_OWN,
    "deepspeed": _ITS_OWN,
    "deepspeed-config": _ITS_OWN,
    "user-args": _ITS_OWN,
}
# Families of options, by how they begin.
_FAMILIES = {"fsdp-": _SHARDS, "megatron-lm-": _SHARDS, "parallelism-config-": _SHARDS, "offload-": _SHARDS}


def find_foreign(option: str, words: Sequence[str]) -> tuple[str, str]:
    """Return (the word that was typed, what to type instead); both are empty if no other launcher has it.

    option: the unknown option as click names it: of a word with one dash it is a letter, such as "-c" of `-mca`
    """
    for word in (_behind(option, words), option):
        if instead := _spelled_out(word, words) or find_instead(word):
            return word, instead
    return "", ""


def find_instead(word: str) -> str:
    """Return what to type instead of an option of another launcher; empty if none of them has it."""
    name = word.replace("_", "-")
    if len(name) == len("-x"):
        return _INSTEAD.get(name, "")
    bare = name.lstrip("-")
    return _INSTEAD.get(bare) or next((text for start, text in _FAMILIES.items() if bare.startswith(start)), "")


def _behind(option: str, words: Sequence[str]) -> str:
    """Return the word of one dash and several letters in which click found the letter `option`, or else the option."""
    if len(option) > len("-x"):
        return option
    typed = (word.partition("=")[0] for word in words if word.startswith("-") and not word.startswith("--"))
    return next((word for word in typed if option[1:] in word[1:]), option)


def _number_of_cores(name: str, words: Sequence[str]) -> str:
    """Return the number of srun's `-c 2` and `-c2`; empty for any other option, and for the code of Python's -c."""
    value = ""
    if name == "-c" and name in words:
        value = "".join(words[words.index(name) + 1 :][:1])
    elif name.startswith("-c"):
        value = name[len("-c") :]
    return value if value.isdecimal() else ""


def _spelled_out(name: str, words: Sequence[str]) -> str:
    """Return the replacement for srun's `-c 2`, mpirun's `-x FOO=1` and `-genv FOO 1`; empty for any other option."""
    if cores := _number_of_cores(name, words):
        return f"{_CORES} {cores}"
    if name not in ("-x", "-genv", "-env") or name not in words:
        return ""
    variable, *rest = (*words[words.index(name) + 1 :], "")
    if name != "-x" and "=" not in variable and rest and rest[0]:
        variable = f"{variable}={rest[0]}"
    variable, equals, value = variable.partition("=")
    return f"use --env {variable}{equals}{mask_secret(variable, value)}" if variable[:1].isalpha() else ""
