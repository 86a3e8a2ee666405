"""A node gets its certificate without a list of nodes, and none for another's name."""

import asyncio
import base64
import json
import os
import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from rose.cli.main import parser_of
from rose.controller.kube_api import REQUESTS, ApiError, KubeApi
from rose.controller.node_signer import NODE, NodeSigner, node_of
from rose.errors import ConfigError, RefusedError
from rose.security.certificates import CertificateFiles
from rose.security.development_ca import DevelopmentCa, _builder, _usage
from rose.security.roles import Role
from tests.harness.waiting import PATIENCE_S, until
from tests.unit.helm.rendering import (
    ASK,
    CERT_MANAGER,
    CHART,
    OWN_CA,
    Object,
    containers,
    node_container,
    node_pod,
    objects,
    pods,
)

ACCOUNT, SIGNER = "rose-system:r-node", "rose.dev/rose-system.r"
USERNAME = f"system:serviceaccount:{ACCOUNT}"
PEM = serialization.Encoding.PEM
LISTED: Object = CERT_MANAGER


def request(key: Any = None, **changes: Any) -> Object:
    """The spec of a request as the API server stores it, for any names that it likes."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "operator ada")])
    uri = x509.UniformResourceIdentifier("spiffe://rose/rose/operator/ada")
    asked = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(name)
        .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
        .sign(key, hashes.SHA256())
    )
    spec = {
        "signerName": SIGNER,
        "request": base64.b64encode(asked.public_bytes(PEM)).decode(),
        "username": USERNAME,
        "extra": {NODE: ["n0"]},
    }
    return {**spec, **changes}


def forged() -> str:
    """A request whose key is not the one that signed it."""
    text = base64.b64decode(request()["request"])
    der = bytearray(x509.load_pem_x509_csr(text).public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    body = base64.encodebytes(bytes(der)).decode()
    pem = f"-----BEGIN CERTIFICATE REQUEST-----\n{body}-----END CERTIFICATE REQUEST-----\n"
    return base64.b64encode(pem.encode()).decode()


REFUSED: list[tuple[Object, str]] = [
    ({"username": "system:serviceaccount:default:r-node"}, "rose-system:r-node alone may ask"),
    ({"username": "ada"}, "alone may ask, not ada"),
    ({"username": None}, "alone may ask"),
    ({"extra": None}, "names no node"),
    ({"extra": {NODE: []}}, "names no node"),
    ({"extra": {NODE: ["n0", "n1"]}}, "names no node"),
    ({"extra": {"n": ["n0"]}}, "names no node"),
    ({"request": ""}, "no certificate request"),
    ({"request": "%%%"}, "no certificate request"),
    ({"request": base64.b64encode(b"-----BEGIN").decode()}, "no certificate request"),
    ({"request": forged()}, "not signed by"),
]


@pytest.mark.parametrize(("changes", "line"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_what_is_no_nodes_own_request_is_refused_in_one_line(changes: Object, line: str) -> None:
    with pytest.raises(RefusedError, match=line) as caught:
        node_of(request(**changes), ACCOUNT)
    assert "\n" not in str(caught.value)


def test_a_key_of_another_kind_is_refused() -> None:
    with pytest.raises(RefusedError, match="elliptic curve"):
        node_of(request(rsa.generate_private_key(65537, 2048)), ACCOUNT)


class ApiServer:
    """The requests of an API server: it adds who asks, and keeps verdict and certificate apart."""

    def __init__(self, extra: Object) -> None:
        self.extra = extra
        self.requests: dict[str, Object] = {}
        self.denies = ""

    def signing_requests(self, signer: str) -> bytes:
        if self.denies:
            raise ApiError(403, self.denies)
        items = [r for r in self.requests.values() if r["spec"]["signerName"] == signer]
        return json.dumps({"items": items}).encode()

    def judge_request(self, name: str, verdict: str, why: str) -> None:
        said = {"type": verdict, "message": why}
        self.requests[name].setdefault("status", {}).setdefault("conditions", []).append(said)

    def certify(self, name: str, certificate: str) -> None:
        status = self.requests[name]["status"]
        assert [each["type"] for each in status["conditions"]] == ["Approved"]
        status["certificate"] = certificate

    def put(self, spec: Object) -> Object:
        name = f"rose-node-{len(self.requests)}"
        spec = {**spec, "username": spec.get("username", USERNAME), "extra": self.extra}
        self.requests[name] = {"metadata": {"name": name}, "spec": spec}
        return self.requests[name]


def intermediate(folder: Path) -> tuple[Path, Path]:
    """The CA of a cluster and, in `folder`, one for nodes that it signed, as cert-manager would."""
    top = ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ROSE nodes")])
    above = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])

    def made(subject: x509.Name, public: Any) -> bytes:
        builder = _builder(subject, above, public, 86_400.0)
        builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
        return (
            builder.add_extension(_usage(ca=True), critical=True)
            .sign(top, hashes.SHA256())
            .public_bytes(PEM)
        )

    (folder / "ca.crt").write_bytes(made(above, top.public_key()))
    (folder / "ca.pem").write_bytes(made(name, key.public_key()))
    private = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    (folder / "ca.key").write_bytes(key.private_bytes(PEM, *private))
    return folder / "ca.crt", folder


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return intermediate(tmp_path_factory.mktemp("ca"))


def signer(api: object, folder: Path, life_s: float = 3_600.0) -> NodeSigner:
    return NodeSigner(
        api,  # type: ignore[arg-type]
        partial(DevelopmentCa.open, folder, "rose"),
        SIGNER,
        ACCOUNT,
        life_s,
    )


def test_names_that_a_request_asks_for_are_not_taken(authority: tuple[Path, Path]) -> None:
    api = ApiServer({NODE: ["n7"]})
    asked = api.put(request())
    [line] = signer(api, authority[1]).look()
    assert line.endswith("a certificate of node n7")
    pem = base64.b64decode(asked["status"]["certificate"])
    leaf, above = x509.load_pem_x509_certificates(pem)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [each.value for each in names] == [
        "spiffe://rose/rose/node/n7",
        "node.rose.rose.internal",
    ]
    leaf.verify_directly_issued_by(above)
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert signer(api, authority[1]).look() == [], "it is answered once"


def test_a_strangers_request_is_denied_and_holds_nobody_up(authority: tuple[Path, Path]) -> None:
    api = ApiServer({NODE: ["n0"]})
    stranger = api.put(request(username="system:serviceaccount:evil:evil"))
    other = api.put(request(signerName="kubernetes.io/kubelet-serving"))
    mine = api.put(request())
    lines = signer(api, authority[1]).look()
    assert len(lines) == 2
    assert stranger["status"]["conditions"][0]["type"] == "Denied"
    assert "certificate" not in stranger["status"]
    assert "status" not in other, "another signer's is not looked at"
    assert mine["status"]["certificate"]
    assert signer(api, authority[1]).look() == []


def test_without_a_ca_or_a_right_the_signer_says_so_and_goes_on(tmp_path: Path) -> None:
    api = ApiServer({NODE: ["n0"]})
    asked = api.put(request())
    [line] = signer(api, tmp_path).look()
    assert "has no CA" in line
    assert "status" not in asked, "it is asked again"
    api.denies = "cannot list certificatesigningrequests"
    assert signer(api, tmp_path).look() == ["cannot list certificatesigningrequests"]


# ---- the two together, as the chart runs them ----


class Http(BaseHTTPRequestHandler):
    """The API server's routes, over TLS; `api` answers."""

    api: ApiServer
    seen: list[str]

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        if path.path == REQUESTS:
            (wanted,) = parse_qs(path.query)["fieldSelector"]
            self._reply(self.api.signing_requests(wanted.removeprefix("spec.signerName=")))
        else:
            self._reply(json.dumps(self.api.requests[path.path.rpartition("/")[2]]).encode())

    def do_POST(self) -> None:
        self.seen.append(self.headers["Authorization"])
        self._reply(json.dumps(self.api.put(self._body()["spec"])).encode())

    def do_PATCH(self) -> None:
        *_, name, part = self.path.split("/")
        status = self._body()["status"]
        if part == "approval":
            (said,) = status["conditions"]
            self.api.judge_request(name, said["type"], said["message"])
        else:
            self.api.certify(name, status["certificate"])
        self._reply(b"{}")

    def _body(self) -> Object:
        found: Object = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return found

    def _reply(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def https(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Port of an API server, and a folder with a pod's token and the server's CA."""
    account = tmp_path / "account"
    ca = DevelopmentCa.make(tmp_path / "kube", "kube")
    own = ca.issue(Role.SCHEDULER, "api", ["127.0.0.1"])
    account.mkdir()
    (account / "token").write_text("t0ken\n")
    (account / "ca.crt").write_bytes(ca.file.read_bytes())
    Http.api, Http.seen = ApiServer({NODE: ["n0"]}), []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Http)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port, account
    server.shutdown()
    thread.join()
    server.server_close()


class Configuration:
    """Configuration of the official client, of an address alone."""

    def __init__(self, host: str) -> None:
        self.host = host

    def auth_settings(self) -> Object:
        return {}


@pytest.mark.parametrize("values", [ASK, OWN_CA], ids=["cert-manager", "own CA"])
def test_a_node_of_an_autoscaler_gets_its_certificate_and_again_before_it_ends(
    values: Object, tmp_path: Path, https: tuple[int, Path], authority: tuple[Path, Path]
) -> None:
    port, account = https
    given, tls = tmp_path / "given", tmp_path / "tls"
    for folder in (given, tls):
        folder.mkdir()
    (given / "ca.crt").write_bytes(authority[0].read_bytes())
    (keeper,) = [c for c in node_pod(values)["initContainers"] if c["name"] == "identity"]
    said = {each["name"]: each.get("value", "") for each in keeper["env"]}
    env = {
        **os.environ,
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(port),
        "SIGNER": said["SIGNER"],
        "ACCOUNT": str(account),
        "GIVEN": str(given),
        "TLS": str(tls),
    }
    script = keeper["command"][2].replace(
        "LOOK_S, AGAIN_S = 60, 60, 5", "LOOK_S, AGAIN_S = 60, 0.05, 0.05"
    )
    assert script != keeper["command"][2]
    process = subprocess.Popen([sys.executable, "-c", script], env=env)
    try:
        with urllib3.PoolManager(ca_certs=str(account / "ca.crt")) as pool:
            api = KubeApi(pool, Configuration(f"https://127.0.0.1:{port}"))
            # Two thirds of three seconds.
            signs = signer(api, authority[1], life_s=3.0)
            seen: set[bytes] = set()

            def renewed() -> bool:
                signs.look()
                if (tls / "tls.key").exists():
                    seen.add((tls / "tls.key").read_bytes())
                return len(seen) > 1

            until(renewed, PATIENCE_S, "a second certificate", every_s=0.05)
    finally:
        process.terminate()
        assert process.wait(20) == 0, "a pod's first process ends at SIGTERM"
    assert set(Http.seen) == {"Bearer t0ken"}
    assert (tls / "tls.key").stat().st_mode & 0o777 == 0o600
    assert (tls / "ca.crt").read_bytes() == authority[0].read_bytes()


async def test_a_chain_of_the_signer_is_trusted_by_who_has_the_root(
    tmp_path: Path, authority: tuple[Path, Path]
) -> None:
    api = ApiServer({NODE: ["n0"]})
    key = ec.generate_private_key(ec.SECP256R1())
    asked = api.put(request(key))
    signer(api, authority[1]).look()
    (tmp_path / "tls.crt").write_bytes(base64.b64decode(asked["status"]["certificate"]))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "tls.key").write_bytes(key.private_bytes(PEM, *private))
    files = CertificateFiles(authority[0], tmp_path / "tls.crt", tmp_path / "tls.key")
    assert (files.identity.role, files.identity.name) == (Role.NODE, "n0")
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    served.verify_mode = ssl.CERT_REQUIRED
    served.load_verify_locations(authority[0])
    asks = ssl.create_default_context(cafile=str(authority[0]))
    asks.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=served)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=asks, server_hostname="node.rose.rose.internal"
    )
    assert await reader.readline() == b"hello\n"
    writer.close()
    server.close()


# ---- the chart ----


@pytest.mark.parametrize("values", [ASK, OWN_CA], ids=["cert-manager", "own CA"])
def test_the_token_is_one_containers_and_the_key_of_the_ca_another_pods(values: Object) -> None:
    pod = node_pod(values)
    assert pod["automountServiceAccountToken"] is False
    holders = [
        c["name"] for c in containers(pod) if "token" in [m["name"] for m in c["volumeMounts"]]
    ]
    assert holders == ["identity"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["certificates"]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert "certificates" not in [m["name"] for m in node_container(values)["volumeMounts"]]
    name = volumes["certificates"]["secret"]["secretName"]
    signing = [
        key
        for key, each in pods(values).items()
        for volume in each.get("volumes", [])
        if volume.get("secret", {}).get("secretName") == name
    ]
    assert sorted(signing) == ["DaemonSet/r-node", "Deployment/r-signer"]
    found = objects(values)
    assert ("Certificate/r-node-ca" in found) is (values is ASK)
    assert not [key for key in found if key.startswith("Certificate/r-node-n")]


def test_the_signers_command_and_its_rights_are_of_one_name() -> None:
    (container,) = pods(ASK)["Deployment/r-signer"]["containers"]
    args = parser_of(container["args"][0]).parse_args(container["args"][1:])
    assert (args.signer, args.account, args.cluster) == (SIGNER, ACCOUNT, "rose")
    assert args.ttl == 720 * 3_600
    found = objects(ASK)
    (signs,) = [
        rule for rule in found["ClusterRole/r-signer"]["rules"] if rule["resources"] == ["signers"]
    ]
    assert signs["resourceNames"] == [SIGNER]
    asks = found["ClusterRole/r-node-requests"]["rules"]
    assert asks == [
        {
            "apiGroups": ["certificates.k8s.io"],
            "resources": ["certificatesigningrequests"],
            "verbs": ["create", "get"],
        }
    ]
    ca = found["Certificate/r-node-ca"]["spec"]
    assert ca["isCA"] is True
    # A certificate of a node never outlives the CA that signed it.
    hours = [int(ca[key].removesuffix("h")) for key in ("duration", "renewBefore")]
    assert hours[1] > 720
    assert hours[0] > hours[1]
    for kind in ("node", "signer"):
        egress = found[f"NetworkPolicy/r-{kind}"]["spec"]["egress"]
        assert [{"protocol": "TCP", "port": p} for p in (443, 6443)] in [e["ports"] for e in egress]
    assert "ingress" not in found["NetworkPolicy/r-signer"]["spec"]


@pytest.mark.parametrize("values", [LISTED, {}], ids=["listed", "insecure"])
def test_where_nodes_are_listed_nobody_signs(values: Object) -> None:
    found = objects(values)
    assert not [key for key in found if "signer" in key or "requests" in key]
    assert "token" not in [each["name"] for each in node_pod(values)["volumes"]]


def test_the_script_in_the_pod_is_the_file() -> None:
    (keeper,) = [c for c in node_pod(ASK)["initContainers"] if c["name"] == "identity"]
    file = (CHART / "files" / "identity.py").read_text()
    assert keeper["command"][2].strip() == file.strip()
    assert not re.search(r"\{\{", file)


def test_a_ca_that_names_no_cluster_is_given_one(
    tmp_path: Path, authority: tuple[Path, Path]
) -> None:
    with pytest.raises(ConfigError, match="or --cluster NAME"):
        DevelopmentCa.open(authority[1]).cluster  # noqa: B018
    assert DevelopmentCa.open(authority[1], "rose").cluster == "rose"
