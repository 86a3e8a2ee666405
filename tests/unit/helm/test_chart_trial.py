"""A trial needs no values but itself: its pods issue their certificates, its store is a file."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from helm_python import Chart, HelmError

from rose.cli.exit_codes import ExitCode
from rose.cli.main import parser_of
from rose.security.certificates import CertificateFiles
from rose.security.roles import Role
from tests.unit.helm.rendering import (
    ACTIVE,
    CHART,
    LEAST,
    NAMESPACE,
    SECRETS,
    SELF_MADE,
    TRIAL,
    Object,
    containers,
    joined,
    node_pod,
    notes,
    objects,
    pods,
)

SCHEDULER = "Deployment/r-scheduler"


def test_a_trial_is_one_scheduler_on_a_file_and_no_etcd() -> None:
    found = objects(TRIAL)
    assert not [key for key in found if "etcd" in key or key.startswith("PodDisruption")]
    assert found[SCHEDULER]["spec"]["replicas"] == 1
    assert found[SCHEDULER]["spec"]["strategy"] == {"type": "Recreate"}
    assert found["Deployment/r-gateway"]["spec"]["replicas"] == 1
    pod = pods(TRIAL)[SCHEDULER]
    (container,) = pod["containers"]
    (store,) = [a for a in container["args"] if a.startswith("--store=")]
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert str(Path(store.removeprefix("--store=")).parent) in mounts
    claim = volumes[mounts["/var/lib/rose"]]["persistentVolumeClaim"]["claimName"]
    assert f"PersistentVolumeClaim/{claim}" in found
    assert (
        found["Service/r-leader"]["spec"]["selector"]
        == found["Service/r-scheduler"]["spec"]["selector"]
    )
    assert next(c["name"] for c in containers(node_pod(TRIAL))) == "shared-folder"
    assert "not for production" in (CHART / "values.yaml").read_text()


# ---- certificates ----

IDENTITIES = {
    SCHEDULER: (Role.SCHEDULER, "scheduler"),
    "Deployment/r-gateway": (Role.GATEWAY, "gateway"),
    "Deployment/r-toolbox": (Role.OPERATOR, "r"),
    "DaemonSet/r-node": (Role.NODE, "n0"),
    "Job/r-policy": (Role.OPERATOR, "r"),
    "CronJob/r-stop-all": (Role.OPERATOR, "r"),
    "Pod/r-test-hold": (Role.OPERATOR, "r"),
}


@pytest.fixture
def issued(tmp_path: Path) -> Path:
    """A folder in the place of a pod's volumes, with the CA's secret in it."""
    for name in ("ca", "issuing", "tls", "bin"):
        (tmp_path / name).mkdir()
    secret = objects(TRIAL)["Secret/r-ca"]["data"]
    for name, key in (("ca.pem", "tls.crt"), ("ca.key", "tls.key")):
        (tmp_path / "ca" / name).write_bytes(base64.b64decode(secret[key]))
    rose = f'#!/bin/sh\nexec {sys.executable} -m rose.cli.main "$@"\n'
    # The first pause is the end of the test.
    for name, text in (("rose", rose), ("sleep", "#!/bin/sh\nkill -TERM $PPID\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("key", IDENTITIES)
def test_a_pod_of_a_trial_issues_its_own_certificate(key: str, issued: Path) -> None:
    pod = pods(TRIAL)[key]
    (issuer,) = [c for c in pod["initContainers"] if c["name"] == "identity"]
    others = [c for c in containers(pod) if c is not issuer]
    for each in others:
        assert not {m["name"] for m in each["volumeMounts"]} & {"ca", "issuing"}, each["name"]
    words = [w.replace("$(NODE_NAME)", "n0") for w in (*issuer["command"], *issuer["args"])]
    for said, meant in {"/etc/rose/tls": "tls", "/issuing": "issuing", "/ca/": "ca/"}.items():
        words[2] = words[2].replace(said, f"{issued}/{meant}")
    env = {**os.environ, "PATH": f"{issued / 'bin'}:{os.environ['PATH']}"}
    ended = subprocess.run(words, env=env, timeout=60, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    ca, certificate, key_file = (issued / "tls" / f for f in ("ca.crt", "tls.crt", "tls.key"))
    identity = CertificateFiles(ca, certificate, key_file).identity
    assert (identity.cluster, identity.role, identity.name) == ("rose", *IDENTITIES[key])
    # OpenSSL looks for an issuer by the identifier that Go gave it, which is not Python's.
    leaf, above = (x509.load_pem_x509_certificate(f.read_bytes()) for f in (certificate, ca))
    asked = leaf.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    own = above.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    assert asked.key_identifier == own.digest
    assert key_file.stat().st_mode & 0o777 == 0o600
    # A pod that goes on renews it; one that ends, a job's, does not wait for that.
    assert (issuer.get("restartPolicy") == "Always") is ("Deployment" in key or "Daemon" in key)


def test_self_made_certificates_are_for_looking_alone() -> None:
    assert "Secret/r-ca" in objects(SELF_MADE)
    assert "can pose as any process" in notes(SELF_MADE)
    for values in (SECRETS, {}, joined(ACTIVE, SECRETS)):
        assert "Secret/r-ca" not in objects(values)


def with_lookup(tmp_path: Path, kind: str, found: Object) -> Chart:
    """Return the chart as Helm renders it where the API server has an object of that kind."""
    copy = tmp_path / "rose"
    shutil.copytree(CHART, copy)
    said = json.dumps(json.dumps(found))
    for file in (copy / "templates").iterdir():
        if file.is_file():
            looked = re.compile(
                rf'lookup "[^"]+" "{kind}" \.Release\.Namespace (\([^()]*\([^()]*\)[^()]*\)|\S+)'
            )
            file.write_text(looked.sub(lambda _: f"fromJson {said}", file.read_text()))
    return Chart.load(str(copy))


def test_an_upgrade_keeps_the_ca(tmp_path: Path) -> None:
    kept = {"data": {"ca.crt": "YQ==", "tls.crt": "YQ==", "tls.key": "Yg=="}}
    text = with_lookup(tmp_path, "Secret", kept).render(values=TRIAL, name="r")
    assert "tls.key: Yg==" in text["rose/templates/selfmade.yaml"]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"store": {"own": {"members": 1}}}, "set store.own.members=3"),
        ({"trial": True}, "leave trial out"),
        ({}, ""),
        ({"store": {"own": {"enabled": False}, "endpoints": ["e:2379"]}}, ""),
    ],
)
def test_an_etcd_stays_as_it_was_installed(tmp_path: Path, values: Object, sentence: str) -> None:
    chart = with_lookup(tmp_path, "StatefulSet", {"spec": {"replicas": 3}})
    if sentence:
        with pytest.raises(HelmError, match=sentence):
            chart.render(values=joined(LEAST, values), name="r")
    else:
        chart.render(values=joined(LEAST, values), name="r")


# ---- the toolbox, and what the notes print ----

TOOLBOX = "Deployment/r-toolbox"


@pytest.mark.parametrize("values", [{}, SECRETS, SELF_MADE], ids=["insecure", "secrets", "made"])
def test_the_toolbox_has_what_a_command_needs(
    values: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TOOLBOX not in pods(values)
    (container,) = pods(values, {"toolbox": {"enabled": True}})[TOOLBOX]["containers"]
    for each in container["env"]:
        monkeypatch.setenv(each["name"], each["value"])
    args = parser_of("status").parse_args([])
    assert args.scheduler == f"r-scheduler.{NAMESPACE}.svc:7400"
    files = [args.ca, args.certificate, args.key]
    tls = Path("/etc/rose/tls")
    assert files == (
        [None] * 3 if values == {} else [tls / f for f in ("ca.crt", "tls.crt", "tls.key")]
    )


@pytest.mark.parametrize("values", [TRIAL, joined(SECRETS, {"toolbox": {"enabled": True}})])
def test_every_command_of_the_notes_runs_as_it_is_printed(values: Object, tmp_path: Path) -> None:
    found = objects(values)
    printed = [line.strip() for line in notes(values).splitlines() if line.startswith("  ")]
    # A shell takes each, and what it names is there.
    stub = tmp_path / "kubectl"
    stub.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/said\n[ "$3" != get ] || echo pod/r-node-x\n'
    )
    stub.chmod(0o755)
    (tmp_path / "helm").symlink_to(stub)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NODE": "n0"}
    for line in printed:
        subprocess.run(["/bin/sh", "-euc", line], check=True, env=env)
    said = (tmp_path / "said").read_text()
    assert not re.search(r"[A-Z]{3,}|<", said), "no word of it is left to be replaced"
    for name in re.findall(r"cronjob/(\S+)", said):
        assert f"CronJob/{name}" in found
    for name in re.findall(r"deploy/(\S+)", said):
        assert f"Deployment/{name}" in found
    (ports,) = re.findall(r"port-forward svc/r-leader (.+)", said)
    service = {str(p["port"]) for p in found["Service/r-leader"]["spec"]["ports"]}
    assert set(ports.split()) == service
    for words in re.findall(r"-- rose (.+)", said):
        name, *rest = words.split()
        assert callable(parser_of(name).parse_args(rest).run)


def test_a_bad_policy_ends_its_job_at_once(tmp_path: Path) -> None:
    job = objects()["Job/r-policy"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    (check,) = [
        c
        for c in job["template"]["spec"]["initContainers"]
        if c["name"] == rule["onExitCodes"]["containerName"]
    ]
    file = tmp_path / "policy.json"
    for text, code in (
        ('{"name": "r", "mode": "Advisory"}', 0),
        ('{"name": "r", "mod": "Off"}', 2),
    ):
        file.write_text(text)
        words = [w.replace("/etc/rose/policy/policy.json", str(file)) for w in check["command"]]
        ended = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
        assert ended.returncode == code
        assert len(ended.stderr.splitlines()) == (1 if code else 0)
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [ExitCode.BAD_INPUT]
