"""Makes a rank's key for mutual TLS with JAX's coordinator, which closes the coordinator to strangers.

The private key never leaves this process. The public key goes to the head in the Hello, and a certificate comes back
with the order to join. JAX reads key and certificates from files. These are in memory only: no other user can open
them, and they vanish with this process, however it ends.
"""

from __future__ import annotations

import os
import sys

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.protocol.settings import TLS_AUTO, TLS_ON
from jaxrun.protocol.worker_messages import Certificate
from jaxrun_runtime import jax_private


class RankKey(HidesFields, frozen=True):
    """The key of this rank; both fields are empty if it has no key.

    private:  PEM
    public:   a compressed point of P-256, in hex
    """

    hidden = frozenset({"private"})

    private: bytes = b""
    public: str = ""


def make_key(env: WorkerEnv) -> RankKey:
    """Return the key of this rank; an empty key if the job needs none, or if JAX already has certificates.

    jax must have been imported; `cryptography` is imported only if it is needed. Raises RuntimeError if a key cannot be
    made and --coordinator-tls is on.
    """
    has_several_hosts = env.local_size < env.size and not env.simulated_boot_id
    is_wanted = env.coordinator_tls == TLS_ON or (env.coordinator_tls == TLS_AUTO and has_several_hosts)
    options = jax_private.certificate_options()
    if not is_wanted or any(options.values()):
        return RankKey()
    if not options and env.coordinator_tls == TLS_AUTO:
        return RankKey()
    try:
        if not options:
            raise ImportError(jax_private.lacks("TLS for its coordinator; jax 0.12 has it"))
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
    except ImportError as error:
        text = f"JAX's coordinator cannot be closed to strangers: {error}\ninstall it, or give --coordinator-tls off"
        if env.coordinator_tls == TLS_ON:
            raise RuntimeError(text) from None
        print(f"jaxrun: rank {env.rank} ({env.host}): {text}", file=sys.stderr)
        return RankKey()
    key = ec.generate_private_key(ec.SECP256R1())
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    point = key.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    return RankKey(secret, point.hex())


def initialize_arguments(key: RankKey, certificate: Certificate | None) -> dict[str, str]:
    """Return the arguments with which jax.distributed.initialize joins with this certificate; empty if it is None."""
    if certificate is None:
        return {}
    return {
        "mtls_cert_file": _file_in_memory("certificate", certificate.chain.encode()),
        "mtls_key_file": _file_in_memory("key", key.private),
        "mtls_ca_file": _file_in_memory("ca", certificate.ca.encode()),
        "mtls_peer_uri_prefix": certificate.peers,
    }


def _file_in_memory(name: str, content: bytes) -> str:
    """Return the path of a file that stays open until this process ends: JAX reads it again from time to time."""
    file = os.memfd_create(f"coordinator-{name}")
    os.fchmod(file, 0o600)  # by default everybody may read a memfd
    os.write(file, content)
    return f"/proc/self/fd/{file}"
