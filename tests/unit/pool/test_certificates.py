"""Keys, certificates and the file that holds them."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from shoal.errors import PoolError, ProtocolError
from shoal.pool.access import certificates
from shoal.pool.access.certificates import Authority
from shoal.pool.wire import tls


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("authority")


@pytest.fixture(scope="module")
def authority(directory: Path) -> Authority:
    return Authority.open(directory, "test")


def test_an_authority_is_made_once(directory: Path, authority: Authority) -> None:
    assert (directory / "authority.pem").stat().st_mode & 0o777 == 0o600
    assert Authority.open(directory, "test").pem == authority.pem


def test_a_certificate_says_what_we_say_not_what_was_asked_for(authority: Authority) -> None:
    key = certificates.new_key()
    wish = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "head")])
    names = x509.SubjectAlternativeName([x509.DNSName("head.shoal")])
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(wish)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = request.public_bytes(serialization.Encoding.PEM).decode()
    issued = authority.sign_request(pem, "client", "eve")
    certificate = x509.load_pem_x509_certificate(issued.pem.encode())
    assert certificate.subject.rfc4514_string() == "OU=client,CN=eve"
    extensions = certificate.extensions
    san = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert san.get_values_for_type(x509.DNSName) == ["eve.client.shoal"]
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert issued.expires - time.time() > 300 * 86400


def _request(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> str:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    signed = builder.sign(key, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM).decode()


def test_requests_that_are_none(authority: Authority) -> None:
    good = certificates.request_pem(certificates.new_key())
    body = good.splitlines()
    changed = "\n".join([body[0], body[1][:-8] + "AAAAAAAA", *body[2:]])
    for bad in (
        "", "nonsense", good[:100], changed, _request(ec.generate_private_key(ec.SECP384R1())),
        _request(rsa.generate_private_key(65537, 2048)),
    ):  # fmt: skip
        with pytest.raises(ProtocolError):
            authority.sign_request(bad, "client", "x")


def test_an_identity_file_is_read_as_it_was_written(directory: Path, authority: Authority) -> None:
    made = authority.own_identity(directory, "node", "far", time.time())
    assert tls.Identity.load(made.path) == made
    assert authority.own_identity(directory, "node", "far", time.time()) == made
    renewed = authority.own_identity(directory, "node", "far", time.time() + 320 * 86400)
    assert renewed.certificate != made.certificate
    assert "BEGIN" not in tls.Identity.load(made.path).name


def test_an_identity_that_others_can_read_is_refused(directory: Path, authority: Authority) -> None:
    made = authority.own_identity(directory, "head", "head", time.time())
    made.path.chmod(0o640)
    with pytest.raises(PoolError, match="chmod 600"):
        tls.Identity.load(made.path)
    made.path.chmod(0o600)


@pytest.mark.parametrize(
    "text", ["", "# shoal identity {}\n", "x" * 100_000, "# shoal identity \n---"]
)
def test_files_that_are_no_identity(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.pem"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(PoolError, match="not an identity file"):
        tls.Identity.load(path)
    with pytest.raises(PoolError, match="shoal join"):
        tls.Identity.load(tmp_path / "none.pem")


def test_contexts_speak_tls_1_3_only_and_ask_for_certificates(
    directory: Path, authority: Authority
) -> None:
    made = authority.own_identity(directory, "head", "head", time.time())
    contexts = {
        tls.server_context(made): ssl.CERT_REQUIRED,
        tls.server_context(made, strangers=True): ssl.CERT_OPTIONAL,
        tls.client_context(made): ssl.CERT_REQUIRED,
    }
    for context, mode in contexts.items():
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == mode
    assert tls.client_context(made).check_hostname
