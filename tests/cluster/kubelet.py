"""As much of Kubernetes as the manifests of --backend kubernetes use: each host of the testbed runs a pod of a Job.

It stands in for kubelet, DNS and the controller of Jobs: pods get the variables and the Secret of the manifest, their
names resolve late, a drained pod gets SIGTERM, its grace and SIGKILL, one whose node is lost is replaced by one with
another address, and exit codes meet the Job's podFailurePolicy and its successPolicy.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hosts
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
    def exit_code(self) -> int | None:
        """What the container's status says; None while it runs."""
        status = self.process.poll()
        return status if status is None or status >= 0 else 128 - status

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
        self._due: dict[int, float] = {}  # indexes whose next pods are started later, and when
        self.started: list[Pod] = []
        self.failed = 0
        self.status = ""

    def run(self, before_replacement: Callable[[], object] = lambda: None) -> str:
        """Start all pods, and those that take their places, until the Job is over; returns how.

        `before_replacement` is called before a pod that takes the place of another one is started.
        """
        running = [self._start(index) for index in range(self._spec["completions"])]
        while (running or self._due) and not self.status:
            wait_until(lambda: self._ended(running) or self._startable())
            for index in self._startable():
                del self._due[index]
                before_replacement()
                running.append(self._start(index))
            for pod in self._ended(running)[:1]:
                running.remove(pod)
                if pod.exit_code == 0:
                    self._apply_success_policy(pod)
                elif self._judge(pod):
                    self._due[pod.index] = time.monotonic() + self._backoff(pod.index)
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

    def kill(self, index: int) -> None:
        """All processes of the pod's container are killed, as when its memory is used up."""
        keeper = hosts.keeper(Place(self._bed.root), f"h{index + 1}")
        assert keeper is not None
        of_pod = [process.pid for process in self._bed.job_processes() if process.network == keeper.network]
        for signum in (signal.SIGSTOP, signal.SIGKILL):  # so that none sees another's end, as in a cgroup
            for pid in of_pod:
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def end(self) -> None:
        """End what runs, as the deletion of the Job does."""
        for pod in self.started:
            if pod.process.poll() is None:
                pod.process.send_signal(signal.SIGTERM)
        for pod in self.started:
            pod.process.wait(TIME_LIMIT)
        self._names.write_text(self._known_names)

    @staticmethod
    def _ended(running: list[Pod]) -> list[Pod]:
        return [pod for pod in running if pod.exit_code is not None]

    def _startable(self) -> list[int]:
        return [index for index, at in self._due.items() if at <= time.monotonic()]

    def _backoff(self, index: int) -> float:
        """Return seconds until the next pod of this index: Kubernetes waits longer after each failure, from 10 s on."""
        failures = sum(pod.index == index for pod in self.started)
        return 0.0 if failures == 1 else 1.0 * 2 ** (failures - 2)

    def _apply_success_policy(self, pod: Pod) -> None:
        """End the Job if it counts as complete once a pod of this index has ended well."""
        rules = self._spec.get("successPolicy", {"rules": []})["rules"]
        if any(rule == {"succeededIndexes": str(pod.index)} for rule in rules):
            self.status = "Complete"

    def _judge(self, pod: Pod) -> bool:
        """Apply the podFailurePolicy to a pod that has failed; returns whether another takes its place."""
        action = next((rule["action"] for rule in self._rules() if self._matches(rule, pod)), "Count")
        if action == "FailJob":
            self.status = "Failed"
            return False
        self.failed += action == "Count"
        if self.failed > self._spec["backoffLimit"]:
            self.status = "Failed"
            return False
        return True

    def _rules(self) -> list[dict[str, Any]]:
        rules: list[dict[str, Any]] = self._spec["podFailurePolicy"]["rules"]
        return rules

    def _matches(self, rule: Mapping[str, Any], pod: Pod) -> bool:
        if "onPodConditions" in rule:
            return any(each["type"] in pod.conditions for each in rule["onPodConditions"])
        return pod.exit_code in rule["onExitCodes"]["values"]

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
