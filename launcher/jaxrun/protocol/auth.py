"""The job's secret, and how each side proves to the other that it knows it without saying it.

Each proof is an HMAC-SHA256 over both sides' nonces and the prover's role and rank, so that none can be replayed or
reflected. What follows the handshake is not encrypted: the channel trusts the network as far as TCP does.
"""

from __future__ import annotations

import hmac
import secrets

_BYTES = 32


def new_token() -> str:
    """A secret for one job: 64 hex digits."""
    return secrets.token_hex(_BYTES)


def new_nonce() -> str:
    return secrets.token_hex(_BYTES)


def make_proof(token: str, role: str, rank: int, head_nonce: str, agent_nonce: str) -> str:
    """What only one who knows `token` can say; `role` is "agent" or "head"."""
    text = f"jaxrun {role} {rank} {head_nonce} {agent_nonce}"
    return hmac.digest(token.encode(), text.encode(errors="surrogatepass"), "sha256").hex()


def proofs_equal(one: str, other: str) -> bool:
    """Compares two proofs in constant time."""
    return hmac.compare_digest(one.encode(errors="surrogatepass"), other.encode(errors="surrogatepass"))
