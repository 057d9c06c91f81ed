"""Signs the keys with which the ranks of one attempt join JAX's coordinator by mutual TLS.

Each attempt has a certificate authority of its own. Its key is only in the memory of this process, and a rank's key
never leaves the rank: only public keys and certificates travel, on authenticated channels. A certificate names nothing
except the attempt and the rank, as a URI: a rank trusts every holder of a certificate of the same attempt.

Certificates are valid forever, because hosts' clocks may be wrong and the authority does not outlive the attempt.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from jaxrun.errors import NotUniformError, UnavailableError
from jaxrun.protocol.worker_messages import Certificate, Hello

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.x509 import CertificateBuilder, Name

_FROM, _UNTIL = datetime.datetime(1970, 1, 1), datetime.datetime(9999, 12, 31)


class CertificateAuthority:
    """The authority of one attempt, whose processes share the `nonce`; `issued` has the certificates by rank."""

    def __init__(self, nonce: str) -> None:
        """Create a key. Raises UnavailableError if `cryptography` cannot be imported."""
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes
            from cryptography.hazmat.primitives.asymmetric import ec
            from cryptography.hazmat.primitives.serialization import Encoding
        except ImportError as error:
            raise UnavailableError(
                f"jaxrun cannot close JAX's coordinator to strangers: {error}\n"
                "install it where jaxrun is started: pip install cryptography. Or give --coordinator-tls off"
            ) from None
        self._x509, self._ec, self._sha256, self._pem = x509, ec, hashes.SHA256(), Encoding.PEM
        self._peers = f"spiffe://jaxrun/{nonce}/"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "jaxrun")])
        builder = self._builder(self._name, self._key.public_key(), 1)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._ca = self._sign(builder)
        self.issued: dict[int, Certificate] = {}

    def certify(self, hello: Hello) -> None:
        """Issue a certificate for the key of this rank. Raises NotUniformError if the key is invalid."""
        x509, ec = self._x509, self._ec
        try:
            key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), bytes.fromhex(hello.public_key))
        except ValueError:
            raise NotUniformError(f"rank {hello.rank} sent an invalid key: {hello.public_key!r:.80}") from None
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{self._peers}{hello.rank}")])
        builder = self._builder(x509.Name([]), key, 2 + hello.rank)
        chain = self._sign(builder.add_extension(names, critical=True))
        self.issued[hello.rank] = Certificate(chain, self._ca, self._peers)

    def _builder(self, subject: Name, key: EllipticCurvePublicKey, serial: int) -> CertificateBuilder:
        builder = self._x509.CertificateBuilder().issuer_name(self._name).subject_name(subject)
        return builder.public_key(key).serial_number(serial).not_valid_before(_FROM).not_valid_after(_UNTIL)

    def _sign(self, builder: CertificateBuilder) -> str:
        return builder.sign(self._key, self._sha256).public_bytes(self._pem).decode()
