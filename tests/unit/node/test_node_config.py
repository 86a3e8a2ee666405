"""A wrong node file is refused in one line that names what is wrong."""

import json
from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.node.config import NodeConfig

REPLICA = {"id": "guest", "kind": "guest", "model_dir": "m", "port": 9000}
NODE = {"node": "n", "scheduler": "127.0.0.1:1", "run_dir": "r", "log_dir": "l"}


def _load(tmp_path: Path, config: object) -> NodeConfig:
    path = tmp_path / "node.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return NodeConfig.load(path)


def test_a_guest_without_a_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a host"):
        _load(tmp_path, NODE | {"replicas": [REPLICA]})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"replicas": [REPLICA | {"port": 0}]}, "port"),
        ({"replicas": [REPLICA | {"kind": "lodger"}]}, "kind"),
        ({"replicas": [], "surprise": 1}, "surprise"),
    ],
)
def test_the_wrong_field_is_named(tmp_path: Path, change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _load(tmp_path, NODE | change)


def test_a_file_that_is_no_json_or_is_missing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no JSON"):
        _load(tmp_path, "{")
    with pytest.raises(ConfigError, match="cannot be read"):
        NodeConfig.load(tmp_path / "absent.json")


def test_the_kill_file_lies_in_the_run_folder(tmp_path: Path) -> None:
    config = _load(tmp_path, NODE | {"replicas": [REPLICA | {"kind": "dedicated"}]})
    assert config.kill_file == Path("r/KILL")
