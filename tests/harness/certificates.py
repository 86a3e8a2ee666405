"""Certificates of a cluster for tests: one CA in a folder, issued as they are asked for."""

from pathlib import Path

from rose.security import CertificateFiles, Role
from rose.security.development_ca import DevelopmentCa


class Certificates:
    """A development CA and what it issued."""

    def __init__(self, folder: Path, cluster: str = "prod") -> None:
        self.ca = DevelopmentCa.make(folder, cluster)

    def of(self, role: Role, name: str, **options: float) -> CertificateFiles:
        """Files of a new certificate."""
        issued = self.ca.issue(role, name, **options)  # type: ignore[arg-type]
        return CertificateFiles(self.ca.file, issued.certificate, issued.key)
