"""Signer of nodes' certificates: one for each Kubernetes node, without a list of nodes.

    a node's pod ── its public key ──> CertificateSigningRequest; the API server adds who asks
    signer       ── a certificate of the Kubernetes node that the asking pod runs on ──> its status

The token of a pod is bound to its node (Kubernetes 1.30), and the API server writes account and
node into the request, which nobody can change. No name that the request asks for itself is taken.
"""

import base64
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec

from rose.controller.kube_api import ApiError, KubeApi
from rose.errors import ConfigError, RefusedError
from rose.security.development_ca import DevelopmentCa
from rose.security.roles import Role

NODE: Final = "authentication.kubernetes.io/node-name"
LOOK_S: Final = 1.0


def node_of(spec: Mapping[str, Any], account: str) -> tuple[str, ec.EllipticCurvePublicKey]:
    """Return the node, and its key, of a CertificateSigningRequest's spec. Raises RefusedError.

    account: the service account of nodes, NAMESPACE:NAME.
    """
    if spec.get("username") != f"system:serviceaccount:{account}":
        raise RefusedError(f"{account} alone may ask, not {str(spec.get('username'))[:200]}")
    names = list((spec.get("extra") or {}).get(NODE) or ())
    if len(names) != 1:
        raise RefusedError(
            "the token of the request names no node; Kubernetes 1.30 binds it to one"
        )
    try:
        asked = x509.load_pem_x509_csr(base64.b64decode(spec["request"]))
        key, own = asked.public_key(), asked.is_signature_valid
    except (ValueError, KeyError, TypeError, UnsupportedAlgorithm) as error:
        raise RefusedError("spec.request is no certificate request in PEM") from error
    if not own or not isinstance(key, ec.EllipticCurvePublicKey):
        raise RefusedError("spec.request is not signed by an elliptic curve key of its own")
    return str(names[0]), key


@dataclass(frozen=True, slots=True)
class NodeSigner:
    """Signer of the requests for one signer's name; its CA is opened for each, as its files are."""

    api: KubeApi
    open_ca: Callable[[], DevelopmentCa]
    signer: str
    account: str
    life_s: float

    def run(self, said: Callable[[str], object]) -> None:
        """Sign until interrupted; `said` gets a line of each request and of each new trouble."""
        before: list[str] = []
        while True:
            lines = self.look()
            for line in lines:
                if line not in before:
                    said(line)
            before = lines
            time.sleep(LOOK_S)

    def look(self) -> list[str]:
        """Answer the pending requests; return a line of each, or of why there is no answer."""
        try:
            items = json.loads(self.api.signing_requests(self.signer))["items"]
        except ApiError as error:
            return [str(error)]
        pending = [each for each in items if not (each.get("status") or {}).get("certificate")]
        return [line for each in pending if (line := self._answer(each))]

    def _answer(self, request: Mapping[str, Any]) -> str:
        name = request["metadata"]["name"]
        verdicts = {each["type"] for each in (request.get("status") or {}).get("conditions") or ()}
        if verdicts & {"Denied", "Failed"}:
            return ""
        try:
            try:
                node, key = node_of(request["spec"], self.account)
            except RefusedError as error:
                self.api.judge_request(name, "Denied", str(error))
                return f"{name}: denied: {error}"
            chain = self.open_ca().signed(Role.NODE, node, key, life_s=self.life_s)
            if "Approved" not in verdicts:
                self.api.judge_request(name, "Approved", f"the node {node} asks for itself")
            self.api.certify(name, base64.b64encode(chain).decode())
        except (ApiError, ConfigError) as error:
            return f"{name}: {error}"
        return f"{name}: a certificate of node {node}"
