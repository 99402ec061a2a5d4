"""TLS 1.3 between the processes of a pool, with the standard library alone: quick to import.

An identity file is one PEM file: a header line that names its owner and pool, the key, its
certificate and the pool's authority.
"""

from __future__ import annotations

import enum
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

import msgspec

from shoal.errors import PoolError, ProtocolError
from shoal.pool.base import limits, paths
from shoal.pool.wire import frames

if TYPE_CHECKING:
    import ssl

_HEADER = "# shoal identity "
_END = "-----END CERTIFICATE-----\n"
X509_NOT_YET_VALID, X509_EXPIRED = 9, 10  # OpenSSL's codes
# `reason` of the ssl.SSLError for the TLS alert with which a peer refuses an expired certificate.
_ALERT_EXPIRED = "SSLV3_ALERT_CERTIFICATE_EXPIRED"


class NoTls(PoolError):
    """OpenSSL cannot be loaded."""

    HELP = "Type: apt install libssl3 (Debian, Ubuntu), or dnf install openssl-libs (Fedora)"

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}. {self.HELP}")
        self.problem = problem


class Header(msgspec.Struct):
    name: str
    role: str
    url: str


@dataclass(frozen=True)
class Identity:
    """A key, the certificate that the pool gave for it, and the authority that it trusts."""

    path: Path
    name: str
    role: str
    url: str  # of the pool; empty for the head's own
    key: str
    certificate: str
    authority: str

    @property
    def text(self) -> str:
        header = msgspec.json.encode(Header(self.name, self.role, self.url)).decode()
        return f"{_HEADER}{header}\n{self.key}{self.certificate}{self.authority}"

    def save(self) -> None:
        paths.write_private(self.path, self.text)

    @classmethod
    def load(cls, path: Path) -> Identity:
        try:
            paths.check_private(path)
            with path.open() as file:
                text = file.read(limits.IDENTITY_BYTES_MAX)
            first, _, rest = text.partition("\n")
            header = msgspec.json.decode(first.removeprefix(_HEADER), type=Header)
            key, begin, certificates = rest.partition("-----BEGIN CERTIFICATE-----")
            certificate, end, authority = (begin + certificates).partition(_END)
            if not (first.startswith(_HEADER) and key and end and authority):
                raise ValueError("it is incomplete")
        except FileNotFoundError:
            raise PoolError(f"there is no identity at {path}. Type: shoal join CODE@HOST") from None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise PoolError(
                f"{path} is not an identity file: {error}. Join again: shoal join CODE@HOST"
            ) from None
        return cls(path, header.name, header.role, header.url, key, certificate + end, authority)


def default_identity() -> Identity | None:
    """Return the identity that `shoal join` wrote, if there is one."""
    path = paths.identity_file()
    return Identity.load(path) if os.path.exists(path) else None


def server_name(role: str, name: str) -> str:
    """Return the name in the certificate of a server."""
    return "head.shoal" if role == "head" else f"{name}.{role}.shoal"


def library() -> ModuleType:
    """Return Python's ssl module. Only connections to other machines need OpenSSL."""
    try:
        import ssl
    except ImportError as error:
        raise NoTls(
            f"connections to other machines need OpenSSL 3, which cannot be loaded: {error}"
        ) from None
    return ssl


def _context(purpose: str) -> ssl.SSLContext:
    module = library()
    context: ssl.SSLContext = module.SSLContext(getattr(module, purpose))
    context.minimum_version = module.TLSVersion.TLSv1_3
    return context


def server_context(identity: Identity, *, strangers: bool = False) -> ssl.SSLContext:
    """Return a listener's context. `strangers`: peers without a certificate may connect, to join."""
    context = _context("PROTOCOL_TLS_SERVER")
    context.load_cert_chain(identity.path)
    context.load_verify_locations(cadata=identity.authority)
    module = library()
    context.verify_mode = module.CERT_OPTIONAL if strangers else module.CERT_REQUIRED
    context.num_tickets = 0  # no resumption: every connection shows its certificate
    return context


def client_context(identity: Identity) -> ssl.SSLContext:
    """Return the context of connections to the pool that issued `identity`."""
    context = _context("PROTOCOL_TLS_CLIENT")
    context.load_cert_chain(identity.path)
    context.load_verify_locations(cadata=identity.authority)
    return context


def accept_again(
    connection: socket.socket, key: str, certificate: str, authority: str
) -> ssl.SSLSocket:
    """Begin TLS on a client's connection with a session's own key, in the process that made it.

    The client has a certificate of the pool; ours it has been told (`connect_again`).
    """
    context = _context("PROTOCOL_TLS_SERVER")
    memory_fd = os.memfd_create("shoal-identity")  # Python reads keys from files only
    try:
        os.write(memory_fd, f"{key}{certificate}".encode())
        context.load_cert_chain(f"/proc/self/fd/{memory_fd}")
    finally:
        os.close(memory_fd)
    context.load_verify_locations(cadata=authority)
    context.verify_mode = library().CERT_REQUIRED
    context.num_tickets = 0
    return context.wrap_socket(connection, server_side=True)


def connect_again(
    connection: ssl.SSLSocket, identity: Identity, certificate: str, server_name: str
) -> ssl.SSLSocket:
    """End TLS on a connection, and begin it again with the process that has this certificate.

    Its own signature stands under the certificate: the other side has vouched for it. The caller's
    time-out holds.
    """
    timeout_s = connection.gettimeout()
    plain = socket.socket(fileno=connection.detach())
    try:
        plain.settimeout(timeout_s)
        context = _context("PROTOCOL_TLS_CLIENT")
        context.load_cert_chain(identity.path)
        context.load_verify_locations(cadata=certificate)
        return context.wrap_socket(plain, server_hostname=server_name)
    except BaseException:
        plain.close()
        raise


class CertificateCause(enum.Enum):
    """Why a certificate is not accepted. Nearly always a clock is wrong."""

    NOT_YET_VALID = "is not valid yet"
    EXPIRED = "has expired"
    OWN_EXPIRED = "own certificate has expired"


class CertificateProblem(PoolError):
    """A certificate is not valid now; the text says what to do."""

    def __init__(self, cause: CertificateCause) -> None:
        self.cause = cause
        if cause is CertificateCause.OWN_EXPIRED:
            text = (
                "the head reports that this machine's certificate has expired. Compare the clocks of "
                "both machines (date -u); if they agree, join again: shoal join CODE@HOST"
            )
        else:
            now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
            text = (
                f"the head's certificate {cause.value} by this machine's clock, which shows {now}. If "
                "that is wrong, set it: timedatectl set-ntp true. If it is right, check the clock of "
                "the head's machine"
            )
        super().__init__(text)


def certificate_problem(error: Exception) -> CertificateProblem | None:
    """Return why a certificate is not valid now, or None for any other error."""
    if isinstance(error, frames.Broken):
        error = error.error
    code = getattr(error, "verify_code", None)  # of an ssl.SSLCertVerificationError
    if code == X509_NOT_YET_VALID:
        return CertificateProblem(CertificateCause.NOT_YET_VALID)
    if code == X509_EXPIRED:
        return CertificateProblem(CertificateCause.EXPIRED)
    if getattr(error, "reason", None) == _ALERT_EXPIRED:
        return CertificateProblem(CertificateCause.OWN_EXPIRED)
    return None


def stranger_context() -> ssl.SSLContext:
    """Return the context of a first connection. The caller checks the code's pin before it sends."""
    context = _context("PROTOCOL_TLS_CLIENT")
    context.check_hostname = False
    context.verify_mode = library().CERT_NONE
    return context


@dataclass(frozen=True)
class Peer:
    """The other end of a connection, as a certificate of the pool names it."""

    name: str
    role: str
    serial: str


def peer_of(tls: ssl.SSLObject | ssl.SSLSocket) -> Peer | None:
    """Return the verified peer, or None for a stranger."""
    certificate = tls.getpeercert()
    if not certificate:
        return None
    subject = cast("tuple[tuple[tuple[str, str], ...], ...]", certificate["subject"])
    parts = dict(pair for names in subject for pair in names)
    name, role = parts.get("commonName"), parts.get("organizationalUnitName")
    if not name or not role:
        raise ProtocolError("the peer's certificate does not have a name and a role")
    return Peer(str(name), str(role), f"{int(str(certificate['serialNumber']), 16):X}")
