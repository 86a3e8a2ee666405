"""Records outlive pods where an operator says so, and the store is backed up each night."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from rose.cli.machine.store import parser
from rose.node.config import NodeConfig
from tests.unit.helm.rendering import (
    NODES_ONLY,
    TRIAL,
    Object,
    node_container,
    node_file,
    node_pod,
    notes,
    objects,
    pods,
)

KEPT: Object = {"records": {"persistence": {"enabled": True}}}
CLAIM: Object = {"records": {"persistence": {"enabled": True, "existingClaim": "shared"}}}
BACKUP: Object = {"backup": {"enabled": True}}
KINDS = ("scheduler", "gateway")


def log_folder(container: Object) -> str:
    (folder,) = [a.split("=")[1] for a in container["args"] if a.startswith("--log-dir=")]
    return folder  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_each_pod_has_a_disk_of_its_own(kind: str) -> None:
    more = {"storageClass": "fast", "size": "5Gi"}
    values = {"records": {"persistence": {"enabled": True, **more}}}
    found = objects(values)
    assert f"Deployment/r-{kind}" not in found
    spec = found[f"StatefulSet/r-{kind}"]["spec"]
    assert f"Service/{spec['serviceName']}" in found
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    assert spec["podManagementPolicy"] == "Parallel"
    assert "strategy" not in spec
    pod = spec["template"]["spec"]
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "logs"]
    assert claim["metadata"]["name"] == mount["name"]
    assert mount["mountPath"] == log_folder(pod["containers"][0])
    assert not [v for v in pod["volumes"] if v["name"] == "logs"]


@pytest.mark.parametrize("kind", KINDS)
def test_pods_that_share_a_claim_write_to_folders_of_their_own(kind: str) -> None:
    spec = objects(CLAIM)[f"StatefulSet/r-{kind}"]["spec"]
    assert "volumeClaimTemplates" not in spec
    pod = spec["template"]["spec"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == "logs"]
    assert volume["persistentVolumeClaim"]["claimName"] == "shared"
    (container,) = pod["containers"]
    assert log_folder(container) == "/var/log/rose/$(POD_NAME)"
    # Kubernetes puts in only names that the list of the container has.
    assert "POD_NAME" in {each["name"] for each in container["env"]}


@pytest.mark.parametrize(
    ("folder", "log_dir", "mount"),
    [("", "/run/rose/records", "/run/rose"), ("/var/log/rose", "/var/log/rose", "/var/log/rose")],
)
def test_a_node_keeps_its_records_on_its_machine(
    folder: str, log_dir: str, mount: str, tmp_path: Path
) -> None:
    values = {"records": {"persistence": {"enabled": True, "nodeFolder": folder}}}
    file = node_file(values)
    assert file["log_dir"] == log_dir
    config = tmp_path / "node.json"
    config.write_text(json.dumps(file))
    loaded = NodeConfig.load(config)
    assert loaded.log_dir == Path(log_dir)
    # The shared folder may be memory of the host.
    assert loaded.logs.file_bytes == (64 << 20 if folder else 4 << 20)
    (name,) = [m["name"] for m in node_container(values)["volumeMounts"] if m["mountPath"] == mount]
    (volume,) = [v for v in node_pod(values)["volumes"] if v["name"] == name]
    assert volume["hostPath"]["path"] == mount
    assert len([v for v in node_pod(values)["volumes"] if v["name"] == "logs"]) == bool(folder)


def test_notes_say_what_goes_with_its_pod() -> None:
    assert "records.persistence.enabled=true keeps them" in notes()
    assert "backup.enabled=true makes one each night" in notes()
    assert "standard output" in notes()
    assert "standard output" not in notes({"logFormat": "text"})
    for word in ("records:", "backup:"):
        assert word not in notes(KEPT, BACKUP)
        assert word not in notes(TRIAL)
    assert not [key for key in objects() if key.startswith("PersistentVolumeClaim/")]


# ---- the backup ----


def test_the_backups_command_is_one() -> None:
    store = {"tlsSecret": "t", "user": "u", "passwordSecret": "p"}
    spec = objects(BACKUP, {"store": store})["CronJob/r-backup"]["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert "suspend" not in spec
    (container,) = pods(BACKUP, {"store": store})["CronJob/r-backup"]["containers"]
    args = parser("rose store").parse_args(["backup", *container["args"], "file"])
    assert args.store.startswith("etcd://r-etcd-0.")
    assert (args.store_user, str(args.store_ca)) == ("u", "/etc/rose/store/ca.crt")
    named = {str(each) for each in (args.store_password_file, args.store_cert, args.store_key)}
    folders = {m["mountPath"] for m in container["volumeMounts"]}
    assert {str(Path(each).parent) for each in named} <= folders


def test_the_newest_backups_stay_and_one_that_fails_removes_none(tmp_path: Path) -> None:
    values = {"backup": {"enabled": True, "keep": 2}}
    (container,) = pods(values)["CronJob/r-backup"]["containers"]
    words = [word.replace("/backups", str(tmp_path)) for word in container["command"]]
    tool = tmp_path / "bin" / "rose"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nfor file; do :; done\n[ "$3" = good ] && echo "$@" >"$file"\n')
    tool.chmod(0o755)
    for day in (1, 2, 3):
        (tmp_path / f"store-2026-11-0{day}T03-17-00Z.backup").write_text("old")
    env = {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    assert subprocess.run([*words, "bad"], env=env, timeout=20).returncode != 0
    assert len(list(tmp_path.glob("*.backup"))) == 3
    subprocess.run([*words, "good"], env=env, timeout=20, check=True)
    kept = sorted(tmp_path.glob("*.backup"))
    assert kept[0].name.startswith("store-2026-11-03")
    assert kept[1].read_text() == f"store backup good {kept[1]}\n"


def test_its_disk_outlives_the_release_unless_it_is_somebody_elses() -> None:
    claim = objects(BACKUP)["PersistentVolumeClaim/r-backup"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    values = {"backup": {"enabled": True, "existingClaim": "mine"}}
    assert "PersistentVolumeClaim/r-backup" not in objects(values)
    volumes = {v["name"]: v for v in pods(values)["CronJob/r-backup"]["volumes"]}
    assert volumes["backups"]["persistentVolumeClaim"]["claimName"] == "mine"
    assert "CronJob/r-backup" not in objects(BACKUP, NODES_ONLY)


def test_backups_reach_the_store_and_nobody_else() -> None:
    found = objects(BACKUP)
    own = found["NetworkPolicy/r-backup"]["spec"]
    assert "ingress" not in own
    ports = [port["port"] for rule in own["egress"] for port in rule["ports"]]
    assert ports == [53, 53, 2379]
    peers = found["NetworkPolicy/r-etcd"]["spec"]["ingress"][0]["from"]
    kinds = [p["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for p in peers]
    assert kinds == ["scheduler", "backup"]
