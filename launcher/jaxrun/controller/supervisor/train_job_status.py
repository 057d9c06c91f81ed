"""Shows how far the program has come in the status of Kubeflow's TrainJob, if the job runs in one.

Kubeflow Trainer (2.2 and later, with its feature gate TrainJobStatus) gives each pod an address, a token and the
certificate of that address; what is sent there is the `status.trainerStatus` of the TrainJob. A thread sends it, so
that a controller that does not answer holds up nothing.

Source: https://github.com/kubeflow/trainer/tree/master/docs/proposals/2779-trainjob-progress
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from jaxrun.analysis.lockstep.told_progress import seconds_left
from jaxrun.protocol.flight import ToldStep

URL = "KUBEFLOW_TRAINER_SERVER_URL"
TOKEN_FILE, CA_FILE = "KUBEFLOW_TRAINER_SERVER_TOKEN", "KUBEFLOW_TRAINER_SERVER_CA_CERT"
INTERVAL_S = 30.0
_REQUEST_TIMEOUT_S = 10.0
_LAST_TIMEOUT_S = 3.0  # for which the end of the job waits
_MAX_SECONDS = 2**31 - 1  # of Kubernetes' int32

Post = Callable[[Mapping[str, str], bytes], None]  # raises OSError or ValueError


class TrainJobStatus:
    """Sends the steps that the program tells, at most every INTERVAL_S. Times are seconds since the epoch.

    environ:  of this pod; without Kubeflow's variables nothing is sent
    tell:     prints a line
    post:     sends a body as these variables say
    """

    def __init__(self, environ: Mapping[str, str], tell: Callable[[str], None], post: Post | None = None) -> None:
        names = (URL, TOKEN_FILE, CA_FILE)
        self._variables = {name: environ[name] for name in names if environ.get(name)}
        self._tell = tell
        self._post = post or post_status
        self._due = 0.0
        self._sent: ToldStep | None = None
        self._thread: threading.Thread | None = None
        self._trouble = ""
        self._has_complained = False

    @property
    def is_wanted(self) -> bool:
        """Whether this pod has an address to send to."""
        return len(self._variables) == 3

    def deadline(self) -> float | None:
        """The latest time at which to call `update`; None for never."""
        return self._due if self.is_wanted else None

    def update(self, told: ToldStep | None, now: float) -> None:
        """Send what the program has told since, unless the last request still runs."""
        self._due = now + INTERVAL_S
        if self._trouble and not self._has_complained:
            self._has_complained = True
            self._tell(f"the status of the TrainJob could not be updated: {self._trouble}; jaxrun goes on trying")
        if told is None or told == self._sent or (self._thread is not None and self._thread.is_alive()):
            return
        self._sent = told
        body = status_body(told, datetime.now(UTC))
        self._thread = threading.Thread(target=self._send, args=(body,), name="jaxrun-train-job", daemon=True)
        self._thread.start()

    def end(self, told: ToldStep | None, now: float) -> None:
        """Send the last step, and wait for that a little."""
        if self.is_wanted and told is not None:
            for _ in range(2):  # an earlier request may still run
                self.update(told, now)
                if self._thread is not None:
                    self._thread.join(_LAST_TIMEOUT_S)

    def _send(self, body: bytes) -> None:
        try:
            self._post(self._variables, body)
        except (OSError, ValueError) as error:
            self._trouble = str(error) or type(error).__name__


def status_body(told: ToldStep, now: datetime) -> bytes:
    """Return the request as Kubeflow defines it; `now` is in UTC."""
    metrics = {"step": f"{told.step}"}
    status: dict[str, object] = {"lastUpdatedTime": now.strftime("%Y-%m-%dT%H:%M:%SZ")}
    if told.total:
        status["progressPercentage"] = min(100, 100 * told.step // told.total)
        metrics["totalSteps"] = f"{told.total}"
    if told.per_second > 0.0:
        metrics["stepsPerSecond"] = f"{told.per_second:.4g}"
    if (left := seconds_left(told)) is not None:
        status["estimatedRemainingSeconds"] = min(_MAX_SECONDS, round(left))
    status["metrics"] = [{"name": name, "value": value} for name, value in metrics.items()]
    return json.dumps({"trainerStatus": status}).encode()


def post_status(variables: Mapping[str, str], body: bytes) -> None:
    """Send a request. Raises OSError, or ValueError if the address is not one of https."""
    import ssl  # takes 30 ms
    from urllib.request import Request, urlopen

    if not variables[URL].startswith("https://"):
        raise ValueError(f"{URL} is not an address of https, so the pod's token is not sent there")
    with open(variables[TOKEN_FILE], encoding="utf-8") as file:  # it is replaced now and then
        token = file.read().strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = Request(variables[URL], data=body, headers=headers, method="POST")
    context = ssl.create_default_context(cafile=variables[CA_FILE])
    with urlopen(request, timeout=_REQUEST_TIMEOUT_S, context=context):
        pass
