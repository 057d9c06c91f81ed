"""Certificates for the ranks of one attempt: who gets one, what is in it, and what the head makes of ranks without."""

from __future__ import annotations

import sys

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from simulation import JOB_ID, Simulation

from jaxrun.controller.head import startup
from jaxrun.protocol.worker_messages import CoordinatorReady, Join, StartCoordinator

PEERS = f"spiffe://jaxrun/{JOB_ID}/"
KEYS = [ec.generate_private_key(ec.SECP256R1()).public_key() for _ in range(3)]
PUBLIC = [key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint).hex() for key in KEYS]


def started(changes=(), **options):
    """A job of three ranks on two hosts whose coordinator is ready, where the head has not refused it."""
    job = Simulation(3, hosts={0: "h1", 1: "h1", 2: "h2"}, **options)
    hellos = {f"r{rank}": {"public_key": key} for rank, key in enumerate(PUBLIC)}
    job.say_hello(**{**hellos, **dict(changes)})
    return job.handle(CoordinatorReady(0, "10.0.0.1:4711")).wait(1)


def given(job):
    """The certificate of each rank."""
    orders = {ranks: message for _, ranks, message in job.sent if isinstance(message, (StartCoordinator, Join))}
    return {rank: message.certificate for ranks, message in orders.items() for rank in ranks}


def test_each_rank_gets_a_certificate_for_its_own_key_that_names_it():
    found = given(started())
    ca = x509.load_pem_x509_certificate(found[0].ca.encode())
    assert {(one.ca, one.peers) for one in found.values()} == {(found[0].ca, PEERS)}
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    for rank, key in enumerate(KEYS):
        own = x509.load_pem_x509_certificate(found[rank].chain.encode())
        own.verify_directly_issued_by(ca)
        assert own.public_key() == key
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"{PEERS}{rank}"]


def test_an_attempt_has_an_authority_of_its_own():
    assert given(started())[0].ca != given(started())[0].ca


def test_a_job_without_keys_makes_no_authority(monkeypatch):
    monkeypatch.delattr(startup, "CertificateAuthority")
    nobody = {f"r{rank}": {} for rank in range(3)}
    assert given(started(nobody)) == dict.fromkeys(range(3))


def test_where_one_rank_has_no_key_the_others_do_without():
    assert given(started({"r2": {}})) == dict.fromkeys(range(3))


@pytest.mark.parametrize("key", ["zz", "02", "02" + "ff" * 32, PUBLIC[0] * 2])
def test_what_is_no_key_is_refused(key):
    job = started({"r1": {"public_key": key}})
    assert given(job) == {} and job.verdict.exit_code == 65
    assert "rank 1 sent a key that is none" in str(job.verdict)


def test_a_launcher_without_the_package_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    job = started()
    assert given(job) == {} and job.verdict.exit_code == 69
    assert "pip install cryptography. Or give --coordinator-tls off" in str(job.verdict)
