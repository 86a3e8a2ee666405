"""Identity in a cluster: certificates with roles, job tokens, the table of who may call what.

certificate files ──► TLS on gRPC and HTTP ──► Identity ──► RPCS: may it call this, for whom?
token (HTTP)      ──► signature, audience, time, job ──► Caller
"""

from rose.security.certificates import CertificateFiles, Peer, files_of
from rose.security.roles import RPCS, Identity, Role

__all__ = ["RPCS", "CertificateFiles", "Identity", "Peer", "Role", "files_of"]
