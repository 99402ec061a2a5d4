"""Joining a pool: makes a key here, sends a code to the head, and keeps the certificate."""

from __future__ import annotations

import datetime
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import PoolError, ProtocolError
from shoal.pool.access import codes
from shoal.pool.base import limits, paths
from shoal.pool.base.addresses import NETWORK_PREFIX, join_address, split_address
from shoal.pool.wire import frames, join_messages, messages, tls

if TYPE_CHECKING:
    import ssl


def join(invitation: str, role: str, name: str, path: Path) -> tls.Identity:
    """Join with "CODE@HOST" and write the identity to `path`. The key never leaves this machine."""
    from shoal.pool.access import certificates

    text, at, address = invitation.rpartition("@")
    if not at:
        raise PoolError(f"{invitation!r}: write CODE@HOST, as `shoal code` prints it")
    try:
        code = codes.parse(text)
    except codes.CodeError as error:
        raise PoolError(str(error)) from None
    host, port = split_address(address)
    paths.check_writable(path)  # before the code is used up
    key = certificates.new_key()
    request = join_messages.Join(
        code.code_id, code.secret, role, name, certificates.request_pem(key)
    )
    joined = _ask(host, port, code.pin, request)
    url = NETWORK_PREFIX + join_address(host, port)
    made = tls.Identity(
        path, joined.name, joined.role or role, url, certificates.key_pem(key), joined.certificate,
        joined.authority,
    )  # fmt: skip
    made.save()
    return made


def _ask(host: str, port: int, pin: str, request: join_messages.Join) -> join_messages.Joined:
    address = join_address(host, port)
    try:
        with socket.create_connection((host, port), timeout=limits.HANDSHAKE_S) as plain:
            with tls.stranger_context().wrap_socket(plain) as connection:
                check_pin(connection, pin, address)  # before the secret is sent
                frames.send(connection, request)
                answer, _ = frames.receive(connection, join_messages.FROM_HEAD)
    except ProtocolError as error:
        raise PoolError(f"{address} did not answer the request to join: {error}. {HELP}") from None
    except OSError as error:
        raise PoolError(
            f"{address} cannot be reached: {error}. Is the pool up (`shoal status` there), opened with "
            "`shoal up --listen`, and the port not behind a firewall?"
        ) from None
    if isinstance(answer, messages.Refusal):
        raise PoolError(answer.reason)
    return answer


HELP = "Is it the head of a pool, of this version of Shoal? Try again in a minute."


def check_pin(connection: ssl.SSLSocket, pin: str, address: str) -> None:
    certificate = connection.getpeercert(binary_form=True)
    if certificate is None or codes.pin_of(certificate) != pin:
        raise PoolError(
            f"{address} is not the head that made this code: it has another key. Nothing was sent. "
            "Check the address; if it is right, another machine may intercept the connection."
        )
    check_clock(certificate)


def check_clock(certificate: bytes) -> None:
    """Refuse to join with a clock by which the pool could not be used, before the code is used up."""
    from cryptography import x509

    head = x509.load_der_x509_certificate(certificate)
    now = datetime.datetime.now(datetime.UTC)
    if now < head.not_valid_before_utc:
        cause = tls.CertificateCause.NOT_YET_VALID
    elif now > head.not_valid_after_utc:
        cause = tls.CertificateCause.EXPIRED
    else:
        return
    raise PoolError(f"{tls.CertificateProblem(cause)}. The code is still good.")
