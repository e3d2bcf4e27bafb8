"""The node's own key and certificate: ECDSA P-256, made here, never leaving the host.

The certificate says `interlock://node/ID` in its SAN; the control plane signs what it says, not what the
request says.
"""

import base64
import hashlib
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from audit import marks
from interlock.errors import Malformed, Untrusted

_JOIN_ANEW = "move the folder of the node away, then join with a new join file"


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a fresh P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the key for a 0600 file."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def read_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Parse `key_pem`; raises Malformed (``malformed.node_key``)."""
    try:
        key = load_pem_private_key(pem, None)
    except ValueError:
        raise Malformed("the node key is not a PEM key", code="node_key", next_step=_JOIN_ANEW) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise Malformed("the node key is not ECDSA", code="node_key")
    return key


def request(key: ec.EllipticCurvePrivateKey, node: str) -> str:
    """Return the PEM certificate request of node `node`, signed by its key."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node[:64])])
    san = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"interlock://node/{node}")])
    csr = x509.CertificateSigningRequestBuilder().subject_name(name).add_extension(san, critical=False)
    return csr.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def read_certificate(pem: str | bytes) -> x509.Certificate:
    """Parse one PEM certificate; raises Malformed (``malformed.certificate``)."""
    try:
        return x509.load_pem_x509_certificate(pem if isinstance(pem, bytes) else pem.encode())
    except ValueError:
        raise Malformed("not a PEM certificate", code="certificate", next_step=_JOIN_ANEW) from None


def pem(certificate: x509.Certificate) -> str:
    """Return the PEM text of a certificate."""
    return certificate.public_bytes(Encoding.PEM).decode()


def fingerprint(certificate: x509.Certificate) -> str:
    """Return the SHA-256 of the certificate's DER in hex, as join files pin it."""
    return hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest()


def check(certificate: x509.Certificate, ca: x509.Certificate, key: ec.EllipticCurvePrivateKey, node: str) -> None:
    """Refuse a certificate that is not ours: another CA, another key, another node.

    Raises Untrusted (``untrusted.certificate``).
    """
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        raise Untrusted("the certificate is not from the pinned CA", code="certificate") from None
    if _spki(certificate.public_key()) != _spki(key.public_key()):
        raise Untrusted("the certificate is for another key", code="certificate")
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise Untrusted("the certificate names no node", code="certificate") from None
    if names.get_values_for_type(x509.UniformResourceIdentifier) != [f"interlock://node/{node}"]:
        raise Untrusted("the certificate is for another node", code="certificate")


def _spki(key: object) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise Untrusted("the certificate's key is not ECDSA", code="certificate")
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def check_life(certificate: x509.Certificate, now: datetime | None = None) -> bool:
    """Return whether half of the certificate's life has passed, so that it is time to renew.

    Raises Untrusted (``untrusted.certificate_expired``) when it is over: nobody can renew it then. Wall
    clock, because X.509 knows no other; no deadline of a run hangs on it.
    """
    moment = now or datetime.now(UTC)
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if moment >= end:
        raise Untrusted(
            f"the node's certificate expired at {end.isoformat()}", code="certificate_expired",
            next_step="check the host's clock; else make a new join file and join again",
        )
    return moment >= start + (end - start) / 2


def sign_mark(key: ec.EllipticCurvePrivateKey, body: bytes) -> str:
    """Return the base64 ECDSA-SHA256 signature of the canonical bytes of a high-water mark."""
    return base64.b64encode(marks.sign(key, body)).decode()
