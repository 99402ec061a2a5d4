"""TLS 1.3 between the parts of a pool, with the standard library alone: quick to import.

An identity file is one PEM file: a first line that says what it is for, the key, its certificate and
the pool's authority.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

import msgspec

from shoal.errors import PoolError, ProtocolError
from shoal.pool.base import paths

if TYPE_CHECKING:
    import ssl

_HEADER = "# shoal identity "
_END = "-----END CERTIFICATE-----\n"
X509_NOT_YET_VALID, X509_EXPIRED = 9, 10  # OpenSSL's codes
LIBSSL_HELP = "Type: apt install libssl3 (Debian, Ubuntu), or dnf install openssl-libs (Fedora)"
IDENTITY_BYTES_MAX = 64 * 1024


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

    def save(self) -> None:
        header = msgspec.json.encode(Header(self.name, self.role, self.url)).decode()
        text = f"{_HEADER}{header}\n{self.key}{self.certificate}{self.authority}"
        paths.write_private(self.path, text)

    @classmethod
    def load(cls, path: Path) -> Identity:
        try:
            paths.check_private(path)
            with path.open() as file:
                text = file.read(IDENTITY_BYTES_MAX)
            first, _, rest = text.partition("\n")
            header = msgspec.json.decode(first.removeprefix(_HEADER), type=Header)
            key, begin, certificates = rest.partition("-----BEGIN CERTIFICATE-----")
            certificate, end, authority = (begin + certificates).partition(_END)
            if not (first.startswith(_HEADER) and key and end and authority):
                raise ValueError("parts are missing")
        except FileNotFoundError:
            raise PoolError(f"there is no identity at {path}. Type: shoal join CODE@HOST") from None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise PoolError(f"{path} is no identity file: {error}. Join again.") from None
        return cls(path, header.name, header.role, header.url, key, certificate + end, authority)


def default_identity() -> Identity | None:
    """What `shoal join` wrote, if it did."""
    path = paths.identity_file()
    return Identity.load(path) if os.path.exists(path) else None


def server_name(role: str, name: str) -> str:
    """What the certificate of a server says that it is."""
    return "head.shoal" if role == "head" else f"{name}.{role}.shoal"


def library() -> ModuleType:
    """Python's ssl module, for connections to other machines: all else works without OpenSSL."""
    try:
        import ssl
    except ImportError as error:
        raise PoolError(
            f"connections to other machines need OpenSSL 3, which cannot be loaded: {error}. "
            f"{LIBSSL_HELP}"
        ) from None
    return ssl


def _context(purpose: str) -> ssl.SSLContext:
    module = library()
    context: ssl.SSLContext = module.SSLContext(getattr(module, purpose))
    context.minimum_version = module.TLSVersion.TLSv1_3
    return context


def server_context(identity: Identity, *, strangers: bool = False) -> ssl.SSLContext:
    """For a listener. `strangers`: also those without a certificate, who may then only join."""
    context = _context("PROTOCOL_TLS_SERVER")
    context.load_cert_chain(identity.path)
    context.load_verify_locations(cadata=identity.authority)
    module = library()
    context.verify_mode = module.CERT_OPTIONAL if strangers else module.CERT_REQUIRED
    context.num_tickets = 0  # no resumption: every connection shows its certificate
    return context


def client_context(identity: Identity) -> ssl.SSLContext:
    """For connections to the pool that gave `identity`."""
    context = _context("PROTOCOL_TLS_CLIENT")
    context.load_cert_chain(identity.path)
    context.load_verify_locations(cadata=identity.authority)
    return context


def certificate_problem(error: Exception) -> str | None:
    """Why a certificate was not accepted, in words; None for any other error.

    A certificate that is not valid *now* is nearly always a wrong clock.
    """
    code = getattr(error, "verify_code", None)  # of an ssl.SSLCertVerificationError
    if code in (X509_NOT_YET_VALID, X509_EXPIRED):
        return clock_problem("is not valid yet" if code == X509_NOT_YET_VALID else "has expired")
    if "CERTIFICATE_EXPIRED" in str(error):
        return (
            "the head says that this machine's certificate has expired. Compare the clocks of both "
            "machines (date -u); if they agree, join again: shoal join CODE@HOST"
        )
    return None


def clock_problem(what: str) -> str:
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        f"the head's certificate {what} by this machine's clock, which says {now}. If that is wrong, "
        "set it: timedatectl set-ntp true. If it is right, look at the clock of the head's machine"
    )


def stranger_context() -> ssl.SSLContext:
    """For a first connection: whom we reached is checked by the code's pin, before anything is said."""
    context = _context("PROTOCOL_TLS_CLIENT")
    context.check_hostname = False
    context.verify_mode = library().CERT_NONE
    return context


@dataclass(frozen=True)
class Peer:
    """Who is at the other end, as a certificate of our pool says."""

    name: str
    role: str
    serial: str


def peer_of(tls: ssl.SSLObject | ssl.SSLSocket) -> Peer | None:
    """The verified peer; None for a stranger."""
    certificate = tls.getpeercert()
    if not certificate:
        return None
    subject = cast("tuple[tuple[tuple[str, str], ...], ...]", certificate["subject"])
    parts = dict(pair for names in subject for pair in names)
    name, role = parts.get("commonName"), parts.get("organizationalUnitName")
    if not name or not role:
        raise ProtocolError("the peer's certificate names nobody")
    return Peer(str(name), str(role), f"{int(str(certificate['serialNumber']), 16):X}")
