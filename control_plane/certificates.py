"""X.509 of the site: one CA (ECDSA P-256), the node listener's certificate, a node's certificate.

A node's id is the SAN URI ``interlock://node/ID``; it comes from the record of the join secret, never from
the signing request. A node's certificate lives 24 hours.
"""

import hashlib
import ipaddress
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from interlock.errors import Malformed, Untrusted
from interlock.keyfile import read_private, write_private

NODE_URI = "interlock://node/"
NODE_LIFE = timedelta(hours=24)
_SERVER_LIFE = timedelta(days=365)
_SERVER_SPARE = timedelta(days=30)
_CA_LIFE = timedelta(days=3650)
_SKEW = timedelta(minutes=5)
_NODE_ID = re.compile(r"^[a-z0-9][a-z0-9-]{0,62}$")


def node_id(text: str) -> str:
    """Return `text` when it may name a node (lower-case letters, digits, dashes); raises Malformed."""
    if not _NODE_ID.match(text):
        raise Malformed("a node id has lower-case letters, digits and dashes, at most 63", code="node")
    return text


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the PKCS#8 PEM of a private key (for a 0600 file)."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def make_ca(site: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Make the site CA: may sign leaves only (path length 0)."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    built = (
        x509.CertificateBuilder().subject_name(_name(f"interlock {site} CA")).issuer_name(_name(f"interlock {site} CA"))
        .public_key(key.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW).not_valid_after(now + _CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return key, built


def fingerprint(certificate: x509.Certificate) -> str:
    """Return the hex SHA-256 of the DER form: what a join file pins."""
    return hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest()


class Authority:
    """The site CA with its private key."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self.certificate = certificate

    @classmethod
    def load(cls, keys: Path) -> "Authority":
        """Read ``ca.key.pem`` (0600) and ``ca.pem``; raises Untrusted, Unavailable or Malformed."""
        raw = read_private(keys / "ca.key.pem")
        try:
            key = load_pem_private_key(raw, None)
            certificate = x509.load_pem_x509_certificate(read_private(keys / "ca.pem"))
        except ValueError:
            raise Malformed("the site CA cannot be read", code="key_file",
                            next_step="restore it from the backup of the keys") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise Malformed("the site CA is not an elliptic-curve key", code="key_file",
                            next_step="restore it from the backup of the keys")
        return cls(key, certificate)

    def pem(self) -> str:
        """Return the CA certificate as PEM text."""
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def _leaf(
        self, common: str, public: ec.EllipticCurvePublicKey, life: timedelta, alternative: list[x509.GeneralName],
        purpose: x509.ObjectIdentifier,
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder().subject_name(_name(common)).issuer_name(self.certificate.subject)
            .public_key(public).serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW).not_valid_after(now + life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName(alternative), critical=False)
            .add_extension(issuer_key, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def server(self) -> tuple[bytes, bytes]:
        """Return (key PEM, certificate chain PEM) of the node listener on this machine."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName("localhost")]
        names += [x509.IPAddress(ipaddress.ip_address(a)) for a in ("127.0.0.1", "::1")]
        leaf = self._leaf("localhost", key.public_key(), _SERVER_LIFE, names, ExtendedKeyUsageOID.SERVER_AUTH)
        return key_pem(key), leaf.public_bytes(Encoding.PEM) + self.pem().encode()

    def sign_node(self, csr_pem: str, node: str) -> str:
        """Return the certificate PEM for `node`; only the public key is taken from the request.

        Raises Malformed (unreadable, not P-256) or Untrusted (the request is not signed by its own key).
        """
        try:
            request = x509.load_pem_x509_csr(csr_pem.encode())
        except (ValueError, UnicodeEncodeError):
            raise Malformed("not a certificate signing request", code="csr") from None
        public = request.public_key()
        if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
            raise Malformed("a node key is ECDSA P-256", code="csr")
        if not request.is_signature_valid:
            raise Untrusted("the signing request is not signed by its own key", code="csr")
        uri = x509.UniformResourceIdentifier(NODE_URI + node_id(node))
        leaf = self._leaf(node, public, NODE_LIFE, [uri], ExtendedKeyUsageOID.CLIENT_AUTH)
        return leaf.public_bytes(Encoding.PEM).decode()


def ready_server(keys: Path) -> None:
    """Make sure that the node listener has a key and a certificate in force; both are issued anew by the site CA
    when they are missing or the certificate ends within 30 days. Nodes pin the CA, so they notice nothing.

    Raises Untrusted (mode), Malformed (``malformed.key_file``: unreadable, or the two are no pair).
    """
    key_file, certificate_file = keys / "tls.key.pem", keys / "tls.pem"
    if not key_file.exists() and not certificate_file.exists():
        _issue_server(keys)
        return
    step = f"restore both from the backup, or move {key_file} and {certificate_file} away: they are made anew"
    try:
        key = load_pem_private_key(read_private(key_file), None)
        certificate = x509.load_pem_x509_certificate(read_private(certificate_file))
    except ValueError:
        raise Malformed("key or certificate of the node listener cannot be read", code="key_file",
                        next_step=step) from None
    if key.public_key() != certificate.public_key():
        raise Malformed("key and certificate of the node listener are no pair", code="key_file", next_step=step)
    if certificate.not_valid_after_utc - datetime.now(UTC) < _SERVER_SPARE:
        _issue_server(keys)


def _issue_server(keys: Path) -> None:
    for name, data in zip(("tls.key.pem", "tls.pem"), Authority.load(keys).server(), strict=True):
        fresh = keys / f"{name}.new"
        fresh.unlink(missing_ok=True)
        write_private(fresh, data)
        fresh.replace(keys / name)


def named_node(certificate_pem: str, now: datetime | None = None) -> str:
    """Return the node id in a peer certificate that TLS has already verified.

    Raises Untrusted (``untrusted.certificate``): no such name, several, or expired since the handshake.
    """
    certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
    if (now or datetime.now(UTC)) > certificate.not_valid_after_utc:
        raise Untrusted("the node's certificate has expired", code="certificate_expired",
                        next_step="join the node again")
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1 or not uris[0].startswith(NODE_URI):
        raise Untrusted("the peer certificate names no node", code="certificate")
    return node_id(uris[0].removeprefix(NODE_URI))
