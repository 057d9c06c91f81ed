"""The status of Kubeflow's TrainJob gets the steps that the program tells, by TLS and with the token of the pod."""

import datetime
import http.server
import ipaddress
import json
import queue
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from harness import TIME_LIMIT

from jaxrun.controller.supervisor.train_job_status import CA_FILE, INTERVAL_S, TOKEN_FILE, URL, TrainJobStatus
from jaxrun.protocol.flight import ToldStep

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/llm/status"
HALF, DONE = ToldStep(500, 1000, 350.0, 0, 100.0), ToldStep(1000, 1000, 600.0, 0, 100.0)


def make_certificate(folder: Path) -> Path:
    """A certificate for 127.0.0.1 that signs itself, with its key, in a file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "trainer")])
    today = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(today).not_valid_after(today + datetime.timedelta(1))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    path = folder / "ca.crt"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(signed.public_bytes(Encoding.PEM) + private)
    return path


@pytest.fixture
def controller(tmp_path):
    """The variables of a pod of a TrainJob, and a queue of what its controller gets: path, token, body."""
    received: queue.SimpleQueue = queue.SimpleQueue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.put((self.path, self.headers["Authorization"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format, *args):
            pass

    certificate = make_certificate(tmp_path)
    (tmp_path / "token").write_text("of-this-pod\n")
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"https://127.0.0.1:{server.server_port}{PATH}"
        yield {URL: url, TOKEN_FILE: f"{tmp_path}/token", CA_FILE: f"{certificate}"}, received
        server.shutdown()
        thread.join()


def test_the_controller_gets_each_new_step_and_the_last_one(controller):
    environ, received = controller
    said: list[str] = []
    status = TrainJobStatus(environ, said.append)
    assert status.deadline() == 0.0
    status.update(None, 100.0)
    for now in (350.0, 380.0):
        status.update(HALF, now)
        assert status.deadline() == now + INTERVAL_S
    path, token, body = received.get(timeout=TIME_LIMIT)
    assert (path, token) == (PATH, "Bearer of-this-pod")
    assert body["trainerStatus"].pop("lastUpdatedTime").endswith("Z")
    metrics = {one["name"]: one["value"] for one in body["trainerStatus"].pop("metrics")}
    assert metrics == {"step": "500", "totalSteps": "1000", "stepsPerSecond": "2"}
    assert body == {"trainerStatus": {"progressPercentage": 50, "estimatedRemainingSeconds": 250}}
    status.end(DONE, 600.0)
    assert received.get(timeout=TIME_LIMIT)[2]["trainerStatus"]["progressPercentage"] == 100
    assert received.empty() and not said


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [(CA_FILE, "/etc/ssl/none.crt", "No such file"), (URL, "http://127.0.0.1:9/", "not an address of https")],
)
def test_what_cannot_be_sent_is_said_once_and_outside_of_a_train_job_nothing_is(controller, variable, value, said):
    environ, received = controller
    lines: list[str] = []
    status = TrainJobStatus({**environ, variable: value}, lines.append)
    for _ in range(3):
        status.end(HALF, 350.0)
        status.update(DONE, 400.0)
    assert len(lines) == 1 and said in lines[0] and received.empty()
    assert TrainJobStatus({}, lines.append).deadline() is None
