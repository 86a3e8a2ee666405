"""Files of the nodes of a pool on Ray: their names, folders, certificates and proxy."""

from pathlib import Path
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.integrations.ray_node import PoolNode
from rose.node.config import NodeConfig
from rose.security.development_ca import DevelopmentCa
from rose.security.roles import Role

HERE = ("10.0.0.7", 7_410)


def node(folder: Path, **more: Any) -> dict[str, Any]:
    said = {"scheduler": "127.0.0.1:9", "run_dir": str(folder / "run")}
    return {**said, "log_dir": str(folder / "log"), "unsigned": True, **more}


def replica(folder: Path) -> dict[str, Any]:
    return {"model_dir": str(folder)}


def told(each: PoolNode, proxied: tuple[str, int] | None = None) -> NodeConfig:
    return NodeConfig.model_validate_json(each.write(8_100, None, proxied).read_text())


def test_a_proxied_replica_is_offered_over_tls_by_its_own_certificate(tmp_path: Path) -> None:
    ca = DevelopmentCa.make(tmp_path / "ca", "c")
    own = {name: ca.issue(Role.NODE, name) for name in ("rose-0", "rose-1")}
    folder = own["rose-0"].certificate.parent
    assert folder == own["rose-1"].certificate.parent
    marked = {
        part: str(getattr(own["rose-0"], part)).replace("rose-0", "{node}")
        for part in ("certificate", "key")
    }
    config = node(tmp_path, certificates={"ca": str(ca.file), **marked})
    for name, files in own.items():
        each = PoolNode(name, config, replica(tmp_path), {})
        each.check()
        read = told(each, HERE)
        assert read.certificates.certificate == files.certificate
        assert read.certificates.key == files.key
        assert read.offered_url(read.dedicated[0]) == f"https://10.0.0.7:7410/{name}"


def test_without_a_proxy_turns_stay_on_their_machine(tmp_path: Path) -> None:
    read = told(PoolNode("rose-0", node(tmp_path), replica(tmp_path)))
    assert read.proxy is None
    assert read.offered_url(read.dedicated[0]) == "http://127.0.0.1:8100"


def test_a_fenced_network_is_said(tmp_path: Path) -> None:
    read = told(PoolNode("rose-0", node(tmp_path), replica(tmp_path), {"insecure": True}), HERE)
    assert read.proxy is not None
    assert read.proxy.insecure


@pytest.mark.parametrize(
    ("given", "proxy", "words"),
    [
        ({"proxy": {}}, None, "the pool sets 'proxy' itself"),
        ({}, {"port": 1}, "the pool sets 'port' itself"),
        ({}, {"insecur": True}, "proxy.insecur"),
        ({"unsigned": False}, None, "verify_key is missing"),
    ],
)
def test_what_a_pool_cannot_use_is_refused_before_anything_starts(
    tmp_path: Path, given: dict[str, Any], proxy: dict[str, Any] | None, words: str
) -> None:
    each = PoolNode("rose-0", node(tmp_path, **given), replica(tmp_path), proxy)
    with pytest.raises(ConfigError, match=words):
        each.check()
