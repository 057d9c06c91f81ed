"""The Kubernetes backend: writes a job's manifest, for kubectl to apply. It calls no API, and needs no permissions.

An indexed Job, or a JobSet, has one pod for each host. Every pod runs the same command, `jaxrun --hosts auto …`, and
finds its number in JOB_COMPLETION_INDEX, host 0 by the name that a headless Service gives it, and the others by the
token in a Secret. The exit codes of jaxrun become the Job's podFailurePolicy.

Sources: the API reference of Kubernetes 1.37 (batch/v1, v1) and of JobSet (jobset.x-k8s.io/v1alpha2).
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from msgspec.structs import replace

from jaxrun.errors import EXIT_NO_PLACE, EXIT_NOT_UNIFORM, EXIT_PREEMPTED, EXIT_USAGE, UsageError
from jaxrun.protocol.names import HEAD, HOSTS, TOKEN
from jaxrun.spec.backends.generated_files import MARK
from jaxrun.spec.engines.engine import Engine
from jaxrun.spec.engines.host_variables import HEAD_PORT, HostVariables, source
from jaxrun.spec.job.env_options import mask_secret
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import Plan

KUBERNETES = Engine(
    key="kubernetes",
    title="an indexed Job of Kubernetes",
    hosts=HostVariables(markers=("JOB_COMPLETION_INDEX",), index=source("JOB_COMPLETION_INDEX")),
)

_CONTAINER = "jaxrun"
_REPLICATED_JOB = "host"  # of a JobSet, whose pods are NAME-host-0-INDEX
_RUNS = "/jaxrun-runs"  # mount point of the --run-dir claim
_GRACE_MARGIN_S = 15  # time for the verdict and the last files, after the ranks' grace
_MAX_NAME = 40  # a host's name, which includes Kubernetes' suffixes, has at most 63 letters
_GPU_RESOURCE = {"rocm": "amd.com/gpu", "tpu": "google.com/tpu"}
# Values that the manifest sets, or that each pod finds out itself.
_NOT_IN_COMMAND = {
    *("backend", "hosts", "image", "manifest", "jobset", "queue", "namespace", "submit", "gpus_per_host"),
    *("assignments", "env_files"),  # the pod's own variables
}


def plan(job: Job, environ: Mapping[str, str], job_id: str) -> Plan:
    """Raise UsageError: only the pods can run the job."""
    raise UsageError(
        "--backend kubernetes writes a manifest, and starts no process here; give --manifest FILE, or --submit to pass "
        "it to kubectl"
    )


def manifest(job: Job, token: str | None, *, name: str, file: str) -> str:
    """Return the manifest of this job as YAML; it will be written to `file`. Raises UsageError.

    name:   of the Job, its Service and its Secret
    token:  the secret with which the pods authenticate each other; None to show the manifest without the secret
    """
    if not job.image:
        raise UsageError("--backend kubernetes needs --image: a container image that has jaxrun and your program")
    secrets = {variable: value for variable, value in job.env.items() if mask_secret(variable, value) != value}
    of_secret = {TOKEN: token or "", **secrets}
    if token is None:
        of_secret = dict.fromkeys(of_secret, "***")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(job, name), "stringData": of_secret}
    job_spec = _job_spec(job, name, of_secret)
    parts = [
        secret,
        *([_jobset(job, name, job_spec)] if job.jobset else [_service(job, name), _job(job, name, job_spec)]),
    ]
    head = [
        f"{MARK} Hand it to the cluster with:  kubectl apply -f {shlex.quote(file)}",
        f"# and end the job, and all that belongs to it, with:  kubectl delete -f {shlex.quote(file)}",
        "# It holds the job's secret: keep it to yourself.",
    ]
    return "\n".join(head) + "\n" + "---\n".join(to_yaml(part) for part in parts)


def object_name(job: Job, suffix: str) -> str:
    """Make a name that Kubernetes accepts from the program's name and `suffix`: "train-3f9a" from "src/Train.py"."""
    text = re.sub(r"[^a-z0-9]+", "-", (job.tag or job.name).lower()).strip("-")
    text = text if text[:1].isalpha() else f"job-{text}"
    return f"{text[: _MAX_NAME - len(suffix) - 1].strip('-')}-{suffix}"


# ---- the objects


def _metadata(job: Job, name: str, **labels: str) -> dict[str, Any]:
    namespace = {"namespace": job.namespace} if job.namespace else {}
    return {"name": name, **namespace, "labels": {**_labels(name), **labels}}


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/instance": name, "app.kubernetes.io/managed-by": "jaxrun"}


def _queue(job: Job) -> dict[str, str]:
    return {"kueue.x-k8s.io/queue-name": job.queue} if job.queue else {}


def _service(job: Job, name: str) -> dict[str, Any]:
    """Return a headless Service: it gives each pod a name, even before the pod is ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": name},
        "ports": [{"name": "jaxrun", "port": HEAD_PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job, name), "spec": spec}


def _job(job: Job, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job, name, **_queue(job)), "spec": spec}


def _jobset(job: Job, name: str, job_spec: Mapping[str, Any]) -> dict[str, Any]:
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": job.max_restarts},
        "replicatedJobs": [{"name": _REPLICATED_JOB, "replicas": 1, "template": {"spec": job_spec}}],
    }
    metadata = _metadata(job, name, **_queue(job))
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def _job_spec(job: Job, name: str, of_secret: Mapping[str, str]) -> dict[str, Any]:
    hosts = job.hosts or 1
    fails = {"action": "FailJob", "onExitCodes": _exit_codes(EXIT_USAGE, EXIT_NOT_UNIFORM)}
    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    # Pods for which the job has no rank end with EXIT_NO_PLACE: those in the place of lost ones, or left out.
    has_others = job.keep_survivors or job.min_hosts is not None
    uncounted = (EXIT_NO_PLACE, EXIT_PREEMPTED) if has_others else (EXIT_PREEMPTED,)
    ignored = {"action": "Ignore", "onExitCodes": _exit_codes(*uncounted)}
    # After a failure that jaxrun itself cannot repair, all pods end, and each of them counts.
    backoff, rules = 0 if job.jobset else hosts * job.max_restarts, [fails, disrupted, ignored]
    # The job may end well without some of its pods, but not without the head's.
    success = {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}} if job.keep_survivors else {}
    if job.keep_survivors and not job.max_restarts:
        # Each lost pod counts once, and so does each of the others if the job then fails: hosts in all, one too many.
        backoff, rules = hosts - 1, [fails, ignored]
    return {
        "completionMode": "Indexed",
        "completions": hosts,
        "parallelism": hosts,
        "backoffLimit": backoff,
        **success,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": _labels(name)}, "spec": _pod_spec(job, name, of_secret)},
    }


def _exit_codes(*codes: int) -> dict[str, Any]:
    return {"containerName": _CONTAINER, "operator": "In", "values": [*codes]}


def _pod_spec(job: Job, name: str, of_secret: Mapping[str, str]) -> dict[str, Any]:
    claim, path = _claim(job)
    first = f"{name}-{_REPLICATED_JOB}-0-0" if job.jobset else f"{name}-0"
    told = {HOSTS: str(job.hosts or 1), HEAD: f"{first}.{name}:{HEAD_PORT}"}
    plain = told | {variable: value for variable, value in job.env.items() if variable not in of_secret}
    from_secret = [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": variable}}} for variable in of_secret
    ]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}, *([{"name": "runs", "mountPath": _RUNS}] if claim else [])]
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": job.image,
        "command": ["jaxrun", "--hosts", "auto", *map(_literal, _words(job, path))],
        "env": [*({"name": variable, "value": _literal(value)} for variable, value in plain.items()), *from_secret],
        "ports": [{"name": "jaxrun", "containerPort": HEAD_PORT, "protocol": "TCP"}],
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if job.gpus_per_host:
        resource = _GPU_RESOURCE.get(job.platform, "nvidia.com/gpu")
        container["resources"] = {"limits": {resource: str(job.gpus_per_host)}}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if claim:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": claim}})
    subdomain = {} if job.jobset else {"subdomain": name}
    return {
        **subdomain,
        "restartPolicy": "Never",  # podFailurePolicy requires this
        "terminationGracePeriodSeconds": math.ceil(job.signal_grace) + _GRACE_MARGIN_S,
        "containers": [container],
        "volumes": volumes,
    }


def _literal(text: str) -> str:
    """Keep Kubernetes from replacing "$(NAME)" with a variable: it reads "$$" as one dollar, wherever it is."""
    return text.replace("$", "$$")


def _claim(job: Job) -> tuple[str, str]:
    """Return the claim named by --run-dir CLAIM/PATH, and the path of the run directory in the pod."""
    if job.run_dir is None:
        return "", ""
    claim, *below = PurePosixPath(job.run_dir).parts
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", claim) or ".." in below:
        raise UsageError(
            f"--run-dir {job.run_dir}: with --backend kubernetes it begins with the name of a PersistentVolumeClaim, "
            "as in --run-dir my-claim/runs/first"
        )
    return claim, str(PurePosixPath(_RUNS, *below))


def _words(job: Job, run_dir: str) -> list[str]:
    """Return the words for each pod's jaxrun; `run_dir` is the run directory in the pod."""
    if run_dir:
        job = replace(job, run_dir=PurePosixPath(run_dir, job.name) if run_dir == _RUNS else PurePosixPath(run_dir))
    return job.command_words(without=_NOT_IN_COMMAND)


# ---- YAML

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def to_yaml(value: Any) -> str:
    """Write a mapping as YAML, in blocks; a text that YAML could read as another type is quoted."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(each, (dict, list)) and each:
                yield f"{_scalar(key)}:"
                yield from (f"  {line}" for line in _lines(each))
            else:
                yield f"{_scalar(key)}: {_scalar(each)}"
        return
    for each in value:
        if isinstance(each, (dict, list)) and each:
            first, *others = _lines(each)
            yield f"- {first}"
            yield from (f"  {line}" for line in others)
        else:
            yield f"- {_scalar(each)}"


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    return f'"{"".join(map(_escaped, value))}"'


def _escaped(character: str) -> str:
    """Write a character as in JSON, which has two escapes for one beyond U+FFFF, and YAML one. Raises UsageError."""
    if "\ud800" <= character <= "\udfff":
        raise UsageError("a manifest is text, but a word of the command or a variable is not valid UTF-8")
    return json.dumps(character)[1:-1] if character <= "\uffff" else f"\\U{ord(character):08x}"
