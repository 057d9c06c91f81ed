"""JAX's coordinator is closed to strangers by mutual TLS: to each kind of them, and open only where it should be."""

import inspect
import os
import socket
import ssl
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from coordinator_stranger import ask_by_tls, ask_plainly
from harness import TIME_LIMIT, jaxrun, started
from msgspec.structs import replace

from jaxrun.controller.head.certificates import CertificateAuthority
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.worker_messages import Hello
from jaxrun_runtime import coordinator_tls, jax_private
from jaxrun_runtime.coordinator_tls import make_key

pytestmark = pytest.mark.jax_version
HAS_TLS = "mtls_cert_file" in inspect.signature(jax.distributed.initialize).parameters
needs_tls = pytest.mark.skipif(not HAS_TLS, reason="this JAX has no TLS for its coordinator")

ENV = WorkerEnv("ab" * 16, 0, 2, 0, 2, "h1", channel_fd=7, stacks_fd=8, flight_fd=9)
# Leaves the address, and what of its certificate is in memory, in a folder; ends once there is a file `go`.
SHOWS = """
import os, sys, time, jax
if jax.process_index() == 0:
    for fd in os.listdir("/proc/self/fd"):
        target = os.path.realpath(f"/proc/self/fd/{fd}")
        if "memfd:coordinator-" in target:
            name = target.rpartition("coordinator-")[2].partition(" ")[0]
            assert os.stat(f"/proc/self/fd/{fd}").st_mode & 0o777 == 0o600
            open(name, "wb").write(open(f"/proc/self/fd/{fd}", "rb").read())
    print(os.environ["JAX_COORDINATOR_ADDRESS"], flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
"""
JOINS = """
import sys
import jax
port, folder, peers = sys.argv[1:]
files = {f"mtls_{n}_file": f"{folder}/{m}" for n, m in (("cert", "certificate"), ("key", "key"), ("ca", "ca"))}
jax.distributed.initialize(f"127.0.0.1:{port}", 2, 1, [0], mtls_peer_uri_prefix=peers, **files)
"""


def write_credentials(folder, rank=0, nonce="another-1"):
    """Of a rank of another job, as its head makes them; returns the prefix of the names in it."""
    folder.mkdir(exist_ok=True)
    key = make_key(replace(ENV, coordinator_tls="on"))
    hello = Hello(rank, "h", 1, 0.0, 0.0, {}, "", {}, key.public)
    authority = CertificateAuthority(nonce)
    authority.certify(hello)
    certificate = authority.issued[rank]
    for name, content in (("certificate", certificate.chain), ("ca", certificate.ca), ("key", key.private.decode())):
        (folder / name).write_text(content)
    return certificate.peers


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What comes back from the coordinators of two jobs."""
    found = {}
    for mode in ("on", "off"):
        folder = tmp_path_factory.mktemp(mode)
        (folder / "shows.py").write_text(SHOWS)
        with started(folder, "-n", "2", "--coordinator-tls", mode, "shows.py") as job:
            job.wait_for_output(":")
            address = (job.run_dir / "rank-0000.out").read_text().strip()
            write_credentials(folder / "other")
            found[mode] = SimpleNamespace(
                plain=ask_plainly(address),
                no_certificate=ask_by_tls(address),
                other_job=ask_by_tls(address, folder / "other"),
                own=ask_by_tls(address, folder) if mode == "on" else b"",
            )
            (folder / "go").touch()
            result = job.end()
        # gRPC has printed nothing of strangers.
        assert result.code == 0 and all(line.startswith("jaxrun: ") for line in result.err.splitlines()), result
    return found


@needs_tls
def test_who_connects_without_tls_gets_nothing(answers):
    assert answers["off"].plain and not answers["on"].plain


@needs_tls
def test_who_has_no_certificate_gets_nothing(answers):
    assert answers["on"].own and not answers["on"].no_certificate


@needs_tls
def test_who_has_a_certificate_of_another_job_gets_nothing(answers):
    assert answers["on"].own and not answers["on"].other_job


@pytest.mark.extended
@needs_tls
@pytest.mark.parametrize("whose", ["own", "other"])
def test_a_rank_talks_to_a_coordinator_of_its_own_job_only(tmp_path, whose):
    peers = write_credentials(tmp_path / "rank", rank=1, nonce="own-1")
    if whose == "own":  # the same certificate will do, as any of the job does
        (tmp_path / "own").symlink_to(tmp_path / "rank")
    else:
        write_credentials(tmp_path / "other", nonce="other-1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / whose / "certificate", tmp_path / whose / "key")
    context.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIME_LIMIT)
        client = [sys.executable, "-c", JOINS, str(listener.getsockname()[1]), str(tmp_path / "rank"), peers]
        with subprocess.Popen(client, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as rank:
            try:
                connection, _ = listener.accept()
                with connection, pytest.raises(ssl.SSLError) if whose == "other" else nullcontext():
                    with context.wrap_socket(connection, server_side=True) as accepted:
                        assert accepted.recv(4096).startswith(b"PRI * HTTP/2.0")
            finally:
                rank.kill()


@pytest.mark.extended
@needs_tls
def test_each_attempt_has_certificates_of_its_own(tmp_path):
    (tmp_path / "fails.py").write_text(
        "import os, jax\n"
        "from cryptography import x509\n"
        "paths = (os.path.realpath(f'/proc/self/fd/{fd}') + f' {fd}' for fd in os.listdir('/proc/self/fd'))\n"
        "fd = next(path.split()[-1] for path in paths if 'coordinator-certificate' in path)\n"
        "read = x509.load_pem_x509_certificate(open(f'/proc/self/fd/{fd}', 'rb').read())\n"
        "print(read.extensions[0].value.get_values_for_type(x509.UniformResourceIdentifier)[0], flush=True)\n"
        "assert os.environ['JAXRUN_ATTEMPT'] == '2'\n"
    )
    result = jaxrun(tmp_path, "-n", "2", "--max-restarts", "1", "--coordinator-tls", "on", "fails.py")
    assert result.code == 0, result
    job = result.events("DeviceReport")[0]["nonce"].rpartition("-")[0]
    first, second = ({f"[{rank}] spiffe://jaxrun/{job}-{attempt}/{rank}" for rank in (0, 1)} for attempt in (1, 2))
    lines = set(result.out.splitlines())
    assert second <= lines and lines - second and lines - second <= first, result  # a failure ends the other rank, too


# ---- who has a key


@needs_tls
@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, False),
        ({"local_size": 1}, True),
        ({"local_size": 1, "simulated_boot_id": "5eed"}, False),
        ({"local_size": 1, "coordinator_tls": "off"}, False),
        ({"coordinator_tls": "on"}, True),
    ],
)
def test_a_rank_makes_a_key_where_the_job_has_several_hosts_or_asks_for_it(changes, wanted):
    key = make_key(replace(ENV, **changes))
    assert (bool(key.private), bool(key.public)) == (wanted, wanted)


def test_a_jax_without_tls_is_mentioned_only_if_tls_was_requested(monkeypatch, capsys):
    monkeypatch.setattr(jax_private, "_CERTIFICATE_OPTIONS", ("jax_no_such_option",))
    assert not make_key(replace(ENV, local_size=1)).public and capsys.readouterr().err == ""
    with pytest.raises(RuntimeError, match="TLS for its coordinator"):
        make_key(replace(ENV, local_size=1, coordinator_tls="on"))


@needs_tls
def test_a_rank_without_the_package_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    assert not make_key(replace(ENV, local_size=1)).public
    assert "rank 0 (h1): JAX's coordinator cannot be closed to strangers: " in capsys.readouterr().err


def test_the_files_of_a_rank_have_no_name():
    certificate = coordinator_tls.Certificate("chain", "ca", "spiffe://jaxrun/x/")
    arguments = coordinator_tls.initialize_arguments(coordinator_tls.RankKey(b"secret", "p"), certificate)
    paths = [Path(arguments[f"mtls_{name}_file"]) for name in ("key", "cert", "ca")]
    assert [path.read_bytes() for path in paths] == [b"secret", b"chain", b"ca"]
    assert [path.stat().st_nlink for path in paths] == [0, 0, 0]
    for path in paths:
        os.close(int(path.name))


# ---- whole jobs


@pytest.mark.extended
@needs_tls
def test_certificates_of_the_site_win(tmp_path):
    (tmp_path / "shows.py").write_text(SHOWS)
    peers = write_credentials(tmp_path / "site", nonce="site-1")
    files = {"CERT": "certificate", "KEY": "key", "CA": "ca"}
    env = {f"JAX_MTLS_{name}_FILE": str(tmp_path / "site" / file) for name, file in files.items()}
    env["JAX_MTLS_PEER_URI_PREFIX"] = peers
    with started(tmp_path, "-n", "2", "--coordinator-tls", "on", "shows.py", env=env) as job:
        job.wait_for_output(":")
        address = (job.run_dir / "rank-0000.out").read_text().strip()
        assert ask_by_tls(address, tmp_path / "site") and not ask_by_tls(address)
        (tmp_path / "go").touch()
        assert job.end().code == 0
    assert not (tmp_path / "key").exists()  # of jaxrun's own


@pytest.mark.extended
def test_what_cannot_be_closed_fails_where_that_is_asked_for(tmp_path):
    """A host without the package `cryptography`, or a JAX without TLS."""
    (tmp_path / "cryptography.py").write_text("raise ImportError('No module named cryptography')\n")
    (tmp_path / "clean.py").write_text("print('ran')\n")
    env = {"PYTHONPATH": str(tmp_path)}
    result = jaxrun(tmp_path, "-n", "2", "--coordinator-tls", "on", "clean.py", env=env)
    assert (result.code, result.out) == (69, ""), result
    assert "RuntimeError: JAX's coordinator cannot be closed to strangers: " in result.err
    assert ("No module named cryptography" if HAS_TLS else "TLS for its coordinator; jax 0.12 has it") in result.err
