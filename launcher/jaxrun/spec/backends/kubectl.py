"""Writes the manifest of a job to a file, and hands it to kubectl, with which it is also watched and ended."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.protocol.own_files import write_whole_file
from jaxrun.spec.backends.kubernetes import MANIFEST_MARK
from jaxrun.terminal import print_notice


def write_manifest(path: Path, text: str) -> None:
    """Write a manifest that its owner alone can read, since it holds the job's secret.

    Raises UsageError rather than overwrite a file that jaxrun has not written.
    """
    try:
        if path.exists() and MANIFEST_MARK not in path.read_text(errors="replace"):
            raise UsageError(f"--manifest {path} exists, and is not a manifest of jaxrun; give another name")
        write_whole_file(path, text.encode("utf-8", "surrogateescape"), 0o600)
    except OSError as error:
        raise UsageError(f"the manifest cannot be written to {path}: {error.strerror}") from None


def apply(path: Path, name: str, namespace: str) -> None:
    """Hand the manifest at `path` to the cluster, and say how to watch the job `name`.

    Raises UnavailableError if kubectl is missing or refuses it; the file is kept.
    """
    file = shlex.quote(str(path))
    try:
        done = subprocess.run(
            ["kubectl", "apply", "-f", str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise UnavailableError(
            f"--submit needs kubectl, which could not be started here ({error.strerror}); the manifest is kept; where "
            f"there is kubectl, type: kubectl apply -f {file}"
        ) from None
    if done.returncode:
        reason = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise UnavailableError(f"kubectl refused the job: {reason}\nthe manifest is kept: kubectl apply -f {file}")
    place = f" -n {namespace}" if namespace else ""
    selector = f"app.kubernetes.io/instance={name},batch.kubernetes.io/job-completion-index=0"
    print_notice(f"submitted {name} (manifest: {file})")
    print_notice(f"its output: kubectl logs{place} -f -l {selector}")
    print_notice(f"to end it: kubectl delete -f {file}")
