"""Certificates as cert-manager would issue them from `Certificate` resources."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

USAGES = {"server auth": ExtendedKeyUsageOID.SERVER_AUTH, "client auth": ExtendedKeyUsageOID.CLIENT_AUTH}
DAY = timedelta(days=1)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


@dataclass
class Authority:
    """A certificate authority of its own."""

    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        builder = self._builder("daskcnn", self.key, until=30 * DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        # certificates are what it may sign
        signing = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self.certificate = builder.add_extension(signing, critical=True).sign(self.key, hashes.SHA256())

    def _builder(self, common: str, key: ec.EllipticCurvePrivateKey, until: timedelta) -> x509.CertificateBuilder:
        issuer = self.certificate.subject if hasattr(self, "certificate") else _name(common)
        builder = x509.CertificateBuilder().subject_name(_name(common)).issuer_name(issuer)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(self.now - 3 * DAY).not_valid_after(self.now + until)
        return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)

    def write(self, folder: Path, spec: dict[str, Any], *, until: timedelta = DAY) -> None:
        """The secret of a Certificate's `spec`, as files: ca.crt, tls.crt, tls.key. `until`: less than 0 is expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName(name) for name in spec["dnsNames"]])
        usages = x509.ExtendedKeyUsage([USAGES[usage] for usage in spec["usages"] if usage in USAGES])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = self._builder(spec["commonName"], key, until)
        for extension in (names, usages, issuer):
            builder = builder.add_extension(extension, critical=False)
        pem = serialization.Encoding.PEM
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath("ca.crt").write_bytes(self.certificate.public_bytes(pem))
        folder.joinpath("tls.crt").write_bytes(builder.sign(self.key, hashes.SHA256()).public_bytes(pem))
        folder.joinpath("tls.key").write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
