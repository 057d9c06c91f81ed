"""As much of Kubernetes as the manifests of --backend kubernetes use: each host of the testbed runs a pod of a Job.

It stands in for kubelet, DNS and the controller of Jobs: pods get the variables and the Secret of the manifest, their
names resolve late, a drained pod gets SIGTERM, its grace and SIGKILL, one whose node is lost is replaced by one with
another address, and exit codes meet the Job's podFailurePolicy.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from cluster_fixture import Bed
from harness import TIME_LIMIT, wait_until
from state import Place, address

_DRAINED = "DisruptionTarget"
_OWN = {"JOB_COMPLETION_INDEX", "HOSTNAME", "KUBERNETES_SERVICE_HOST", "JAXRUN_TERMINATION_LOG"}


@dataclass
class Pod:
    """One container that runs, or has run; `conditions` are those of its status."""

    index: int
    process: subprocess.Popen[str]
    directory: Path
    conditions: set[str] = field(default_factory=set)

    @property
    def message(self) -> str:
        """What `kubectl describe pod` would show as the reason of its end."""
        with suppress(FileNotFoundError):
            return (self.directory / "termination-log").read_text()
        return ""

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()


class JobController:
    """Runs the Job of a manifest on the hosts of a testbed, until it is complete or has failed.

    started:  all pods, in the order in which they were started
    failed:   how many pods count as failed
    status:   "Complete" or "Failed" once it is over
    """

    def __init__(self, bed: Bed, manifest: Path, directory: Path, environ: Mapping[str, str]) -> None:
        """`environ` stands for the image: variables that the programs of this test need."""
        self._bed = bed
        self._parts = {part["kind"]: part for part in yaml.safe_load_all(manifest.read_text())}
        self._spec: dict[str, Any] = self._parts["Job"]["spec"]
        self._pod: dict[str, Any] = self._spec["template"]["spec"]
        self._directory = directory
        self._environ = environ
        self._names = Place(bed.root).etc / "hosts"
        self._known_names = self._names.read_text()
        self._lost: list[int] = []  # pods whose nodes have no power
        self._addresses: dict[int, str] = {}  # of pods that were replaced
        self.started: list[Pod] = []
        self.failed = 0
        self.status = ""

    def run(self, before_replacement: Callable[[], object] = lambda: None) -> str:
        """Start all pods, and those that take their places, until the Job is over; returns how.

        `before_replacement` is called before a pod that takes the place of another one is started.
        """
        running = [self._start(index) for index in range(self._spec["completions"])]
        while running and not self.status:
            pod = wait_until(lambda: next((pod for pod in running if pod.process.poll() is not None), None))
            running.remove(pod)
            if pod.process.returncode and (again := self._judge(pod)):
                before_replacement()
                running.append(self._start(again.index))
        self.end()
        self.status = self.status or "Complete"
        return self.status

    def resolve_names(self) -> None:
        """Have the names of all pods resolve from now on, on all hosts."""
        job, domain = self._parts["Job"]["metadata"]["name"], self._pod["subdomain"]
        assert domain == self._parts["Service"]["metadata"]["name"]
        found = {i: self._addresses.get(i, address(f"h{i + 1}")) for i in range(self._spec["completions"])}
        lines = [f"{ip} {job}-{i}.{domain}\n" for i, ip in found.items()]
        self._names.write_text(self._known_names + "".join(lines))

    def drain(self, index: int) -> None:
        """Take the pod away as `kubectl drain` does: SIGTERM, and SIGKILL after the grace."""
        pod = next(pod for pod in reversed(self.started) if pod.index == index)
        pod.conditions.add(_DRAINED)
        pod.process.send_signal(signal.SIGTERM)
        killer = threading.Timer(self._pod["terminationGracePeriodSeconds"], pod.process.kill)
        killer.daemon = True
        killer.start()

    def lose(self, index: int) -> None:
        """The node of the pod loses its power. The pod that takes its place has another address."""
        pod = next(pod for pod in reversed(self.started) if pod.index == index)
        pod.conditions.add(_DRAINED)
        self._lost.append(index)
        self._bed.run("off", f"h{index + 1}")

    def end(self) -> None:
        """End what runs, as the deletion of the Job does."""
        for pod in self.started:
            if pod.process.poll() is None:
                pod.process.send_signal(signal.SIGTERM)
        for pod in self.started:
            pod.process.wait(TIME_LIMIT)
        self._names.write_text(self._known_names)

    def _judge(self, pod: Pod) -> Pod | None:
        """Apply the podFailurePolicy to a pod that has failed; returns it if another takes its place."""
        action = next((rule["action"] for rule in self._rules() if self._matches(rule, pod)), "Count")
        if action == "FailJob":
            self.status = "Failed"
            return None
        self.failed += action == "Count"
        if self.failed > self._spec["backoffLimit"]:
            self.status = "Failed"
            return None
        return pod

    def _rules(self) -> list[dict[str, Any]]:
        rules: list[dict[str, Any]] = self._spec["podFailurePolicy"]["rules"]
        return rules

    def _matches(self, rule: Mapping[str, Any], pod: Pod) -> bool:
        if "onPodConditions" in rule:
            return any(each["type"] in pod.conditions for each in rule["onPodConditions"])
        return pod.process.returncode in rule["onExitCodes"]["values"]

    def _start(self, index: int) -> Pod:
        (container,) = self._pod["containers"]
        if index in self._lost:
            self._lost.remove(index)
            self._addresses[index] = f"10.77.0.{60 + index}"
            self._bed.turn_on_elsewhere(f"h{index + 1}", self._addresses[index])
            self.resolve_names()
        directory = self._directory / f"pod-{index}-{len(self.started)}"
        directory.mkdir(parents=True)
        job = self._parts["Job"]["metadata"]["name"]
        env = {
            **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
            **self._environ,
            "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": f"{job}-{index}",
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "JAXRUN_TERMINATION_LOG": str(directory / "termination-log"),  # the hosts have one /dev
        }
        env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}"
        assert not _OWN & {each["name"] for each in container["env"]}
        for each in container["env"]:
            env[each["name"]] = self._value(each, env)
        words = [_expand(word, env) for word in container["command"]]
        with open(directory / "log", "w") as log:
            process = self._bed.start(
                "exec", f"h{index + 1}", "--", *words, cwd=self._directory, env=env, stdout=log, stderr=log
            )
        self.started.append(Pod(index, process, directory))
        return self.started[-1]

    def _value(self, variable: Mapping[str, Any], env: Mapping[str, str]) -> str:
        if "value" in variable:
            return _expand(variable["value"], env)
        reference = variable["valueFrom"]["secretKeyRef"]
        assert reference["name"] == self._parts["Secret"]["metadata"]["name"]
        return str(self._parts["Secret"]["stringData"][reference["key"]])


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Replace "$(NAME)" by a variable that is known, and "$$" by "$" (third_party/forked/golang/expansion)."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda found: "$" if found[1] is None else env.get(found[1], found[0]),
        text,
    )


@contextmanager
def applied(bed: Bed, manifest: Path, directory: Path, environ: Mapping[str, str]) -> Iterator[JobController]:
    """The Job of this manifest; whatever the test does, none of its pods runs on, and no name of one resolves."""
    job = JobController(bed, manifest, directory, environ)
    try:
        yield job
    finally:
        job.end()
