"""Writes the manifest of a job to a file and passes it to kubectl; says how to watch and end the job with kubectl."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from jaxrun.errors import UnavailableError
from jaxrun.spec.backends.generated_files import write_generated_file
from jaxrun.terminal import print_notice


def write_manifest(path: Path, text: str) -> None:
    """Write a manifest. Raises UsageError rather than overwrite a file that jaxrun has not written."""
    write_generated_file(path, text, option="--manifest", kind="manifest", mode=0o600)


def apply(path: Path, name: str, namespace: str) -> None:
    """Pass the manifest at `path` to the cluster, and say how to watch the job `name`.

    Raises UnavailableError if kubectl is missing or refuses the manifest; the file is kept.
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
