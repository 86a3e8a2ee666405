"""PolicyVersions: what tests publish for one replica, version by version."""

from itertools import count
from pathlib import Path

from weight_transfer.chunk_store import ChunkStore
from weight_transfer.format.checkpoint import read_model_dir
from weight_transfer.format.signing import SigningKey
from weight_transfer.format.tensors import TensorBits, tensor_bits, tensor_of
from weight_transfer.publish.version_publisher import VersionPublisher


class PolicyVersions:
    """`version` is the newest one, and `active` its weights; the model's own are `base`.

    All are below `folder`, the only one that the replica reads versions from.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.key = SigningKey.generate()
        self.base = read_model_dir(model)
        self._lives = count()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin anew, for an engine that has just started."""
        self.store = ChunkStore(self.folder / f"life-{next(self._lives)}")
        self.publisher = VersionPublisher(self.store, job="test", trainer="test", key=self.key)
        self.version = 0
        self.active = self.base

    def next(self, new: dict[str, TensorBits]) -> dict[str, str]:
        """Publish a version based on the newest one; returns the body that applies it."""
        parent = self.version
        self.publisher.publish(parent + 1, parent, self.active, new)
        self.version, self.active = parent + 1, new
        return self.paths(parent + 1)

    def paths(self, version: int) -> dict[str, str]:
        """Return the paths of a published version, as the route takes them."""
        manifest, chunks = self.store.manifest_path(version), self.store.chunks_dir
        return {"manifest": str(manifest), "chunks": str(chunks)}

    def changed(self, seed: int) -> dict[str, TensorBits]:
        """The newest weights, each a little different."""
        import torch

        torch.manual_seed(seed)
        new = {}
        for name, bits in self.active.items():
            weight = tensor_of(bits)
            new[name] = tensor_bits(name, weight + 0.05 * torch.randn_like(weight))
        return new
