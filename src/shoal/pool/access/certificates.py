"""Keys and certificates. Only what makes or signs them needs `cryptography`; see tls.py for their use.

The head is its pool's only authority. A certificate's common name is who it is for, its unit is the
role ("head", "node", "user", "task", …), and the server name that it may answer to is `role.name`.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.errors import ProtocolError
from shoal.pool.base import limits, paths
from shoal.pool.wire.tls import Identity, server_name

_BACKDATED = datetime.timedelta(hours=1)  # clocks differ a little


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


def request_pem(key: ec.EllipticCurvePrivateKey) -> str:
    """Return a request to certify `key`, which proves possession of it. The head ignores its names."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


@dataclass(frozen=True)
class Issued:
    pem: str
    serial: str
    expires: float  # Unix time


class Authority:
    """The pool's CA. Its key never leaves the head's state directory."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate

    @classmethod
    def open(cls, directory: Path, pool: str) -> Authority:
        """Open the authority in `directory`, or make one there."""
        path = directory / "authority.pem"
        if path.exists():
            paths.check_private(path)
            data = path.read_bytes()
            key = serialization.load_pem_private_key(data, password=None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            return cls(key, x509.load_pem_x509_certificate(data))
        key = new_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"shoal pool {pool}")])
        certificate = (
            _builder(name, name, limits.AUTHORITY_DAYS)
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(authority=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .sign(key, hashes.SHA256())
        )
        made = cls(key, certificate)
        paths.write_private(path, key_pem(key) + made.pem)
        return made

    @property
    def pem(self) -> str:
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    def sign_request(self, request: str, role: str, name: str) -> Issued:
        """Certify the key in a PKCS #10 request, with the role and name that the head chooses."""
        try:
            parsed = x509.load_pem_x509_csr(request.encode())
            public = parsed.public_key()
            good = parsed.is_signature_valid
        except Exception as error:  # whatever the parser makes of a stranger's bytes
            raise ProtocolError(f"the certificate request is malformed: {error}"[:200]) from None
        if not good or not isinstance(public, ec.EllipticCurvePublicKey):
            raise ProtocolError("the certificate request is not signed by an elliptic-curve key")
        if not isinstance(public.curve, ec.SECP256R1):
            raise ProtocolError("the certificate request's key is not on the curve P-256")
        return self.sign(public, role, name)

    def sign(
        self,
        public: ec.EllipticCurvePublicKey,
        role: str,
        name: str,
        days: int = limits.CERTIFICATE_DAYS,
    ) -> Issued:
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.COMMON_NAME, name),
                x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role),
            ]
        )
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role in ("head", "node"):
            purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names = x509.SubjectAlternativeName([x509.DNSName(server_name(role, name))])
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(subject, self._certificate.subject, days)
            .public_key(public)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=True)
            .add_extension(names, critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Issued(
            certificate.public_bytes(serialization.Encoding.PEM).decode(),
            f"{certificate.serial_number:X}",
            certificate.not_valid_after_utc.timestamp(),
        )

    def web_certificate(self, directory: Path, names: list[str]) -> Path:
        """Make key and certificate of the dashboard for these hosts, anew at each start."""
        key = new_key()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal dashboard")])
        certificate = (
            _builder(subject, self._certificate.subject, limits.CERTIFICATE_DAYS)
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=True)
            .add_extension(x509.SubjectAlternativeName([_host(name) for name in names]), False)
            .sign(self._key, hashes.SHA256())
        )
        path = directory / "web.pem"
        made = certificate.public_bytes(serialization.Encoding.PEM).decode()
        paths.write_private(path, key_pem(key) + made + self.pem)
        return path

    def own_identity(self, directory: Path, role: str, name: str, now: float) -> Identity:
        """Return the identity of one of the head's own processes; renew it before it expires."""
        path = directory / f"{role}.pem"
        if path.exists():
            kept = Identity.load(path)
            certificate = x509.load_pem_x509_certificate(kept.certificate.encode())
            days_left = (certificate.not_valid_after_utc.timestamp() - now) / 86400
            if days_left > limits.RENEW_DAYS and kept.authority == self.pem and kept.name == name:
                return kept
        key = new_key()
        issued = self.sign(key.public_key(), role, name)
        made = Identity(path, name, role, "", key_pem(key), issued.pem, self.pem)
        made.save()
        return made


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def expiry_of(certificate_pem: str) -> float:
    """When a certificate ends, in Unix time."""
    certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
    return certificate.not_valid_after_utc.timestamp()


def _builder(subject: x509.Name, issuer: x509.Name, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _key_usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
