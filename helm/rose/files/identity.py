"""Keep the certificate of the Kubernetes node that this pod runs on.

It asks the API server by the pod's own token, and again once two thirds of a life are over.
The key never leaves the pod, and the names in the certificate are the signer's to choose.
"""

import base64
import json
import os
import signal
import ssl
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

TLS, GIVEN = Path(os.environ.get("TLS", "/etc/rose/tls")), Path("/certificates")
ACCOUNT = Path(os.environ.get("ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
HOST = f"{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
REQUESTS = f"https://{HOST}/apis/certificates.k8s.io/v1/certificatesigningrequests"
ANSWER_S, LOOK_S, AGAIN_S = 60, 60, 5


def call(path: str = "", body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the API server's answer."""
    headers = {
        "Authorization": f"Bearer {(ACCOUNT / 'token').read_text().strip()}",
        "Content-Type": "application/json",
    }
    data = None if body is None else json.dumps(body).encode()
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    request = urllib.request.Request(REQUESTS + path, data, headers)  # noqa: S310 - https
    with opener.open(request, timeout=10) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def written(name: str, data: bytes) -> None:
    """Write a file of the node by renaming a complete one over it."""
    (TLS / f".{name}").write_bytes(data)
    (TLS / f".{name}").replace(TLS / name)


def due_s() -> float:
    """Return the Unix seconds at which the certificate is to be renewed, 0 without one."""
    try:
        own = x509.load_pem_x509_certificate((TLS / "tls.crt").read_bytes())
    except (OSError, ValueError):
        return 0
    begin, end = own.not_valid_before_utc.timestamp(), own.not_valid_after_utc.timestamp()
    return begin + (end - begin) * 2 / 3


def renew() -> None:
    """Ask for a certificate of a new key and write both. Raises OSError."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    asked = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    spec = {
        "signerName": os.environ["SIGNER"],
        "request": base64.b64encode(asked.public_bytes(pem)).decode(),
        "usages": ["digital signature", "server auth", "client auth"],
    }
    head = {"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest"}
    made = call(body={**head, "metadata": {"generateName": "rose-node-"}, "spec": spec})
    until_s = time.monotonic() + ANSWER_S
    while time.monotonic() < until_s:
        status = call(f"/{made['metadata']['name']}").get("status") or {}
        for each in status.get("conditions") or ():
            if each["type"] in ("Denied", "Failed"):
                raise OSError(f"{made['metadata']['name']} is denied: {each.get('message')}")
        if status.get("certificate"):
            private, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            written("tls.crt", base64.b64decode(status["certificate"]))
            written("tls.key", key.private_bytes(pem, private, plain))
            return
        time.sleep(1)
    raise OSError(f"{made['metadata']['name']} is not signed; is the Deployment signer running?")


def main() -> None:
    """Keep the files current until the pod ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    os.umask(0o077)
    while True:
        pause_s = LOOK_S
        try:
            authority = (Path(os.environ.get("GIVEN", GIVEN)) / "ca.crt").read_bytes()
            if not (TLS / "ca.crt").exists() or (TLS / "ca.crt").read_bytes() != authority:
                written("ca.crt", authority)
            if time.time() >= due_s():
                renew()
        except (OSError, ValueError, KeyError) as error:
            sys.stderr.write(f"identity: {error}\n")
            pause_s = AGAIN_S
        time.sleep(pause_s)


main()
