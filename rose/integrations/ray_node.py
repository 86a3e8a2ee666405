"""PoolNode: the file of one node of a pool on Ray, completed on its own machine.

It is apart from Ray, so that it can be tested without a cluster.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from rose.errors import ConfigError
from rose.node.config import NodeConfig

# Placeholder for the node's name in the paths of certificates.
NODE_MARK = "{node}"
_OWN = ("id", "kind", "port", "device")
_PLACED = ("host", "port")


@dataclass(frozen=True, slots=True)
class PoolNode:
    """Configuration of one pool replica's `rose node`, without the port, GPU and proxy address that
    only its machine knows.
    """

    name: str
    config: Mapping[str, Any]
    replica: Mapping[str, Any]
    proxy: Mapping[str, Any] | None = None

    def write(
        self, port: int, device: int | str | None, proxied: tuple[str, int] | None = None
    ) -> Path:
        """Write the complete configuration to RUN_DIR/NAME/node.json and return its path.

        port: the engine's. device: GPU index or UUID, None for the CPU. proxied: host and port of
        the node's proxy.
        """
        folder = Path(self.config["run_dir"]) / self.name
        folder.mkdir(parents=True, exist_ok=True)
        own = self._content(port, device, proxied)
        file = folder / "node.json"
        file.write_bytes(msgspec.json.encode(own))
        return file

    def check(self) -> None:
        """Raise `ConfigError` if the configuration is invalid, before anything starts; folders are
        checked on their own machine.
        """
        for name in ("node", "replicas", "proxy"):
            if name in self.config:
                raise ConfigError(f"the pool sets {name!r} itself; leave it out of `node`")
        for name in _OWN:
            if name in self.replica:
                raise ConfigError(f"the pool sets {name!r} itself; leave it out of `replica`")
        for name in _PLACED:
            if name in (self.proxy or {}):
                raise ConfigError(f"the pool sets {name!r} itself; leave it out of `proxy`")
        try:
            placed = None if self.proxy is None else ("127.0.0.1", 2)
            config = NodeConfig.model_validate(self._content(1, None, placed))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"the pool's node: {where}: {first['msg']}") from error
        if config.keys is None and not config.unsigned:
            raise ConfigError(
                "the pool's node: verify_key is missing: give the job's key, or say unsigned=True"
            )

    def _content(
        self, port: int, device: int | str | None, proxied: tuple[str, int] | None
    ) -> dict[str, Any]:
        replica = {**self.replica, "id": self.name, "kind": "dedicated", "port": port}
        folders = self.config.keys() & {"run_dir", "weights_dir", "log_dir"}
        made: dict[str, Any] = {
            **self.config,
            "node": self.name,
            **{name: str(Path(self.config[name]) / self.name) for name in folders},
            "replicas": [replica | ({} if device is None else {"device": device})],
        }
        if "certificates" in made:
            files = made["certificates"].items()
            made["certificates"] = {k: str(v).replace(NODE_MARK, self.name) for k, v in files}
        if proxied is not None:
            host, at = proxied
            made["proxy"] = {**(self.proxy or {}), "host": host, "port": at}
        return made
