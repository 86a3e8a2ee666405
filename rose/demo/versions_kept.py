"""The published versions that the trainer remembers, to check what engines say they sampled."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from rose.demo.sequences import allowed_mask, pieces, reply_logprobs
from rose.demo.trajectory import Trajectory
from weight_transfer import TensorBits, tensor_bits, tensor_of

KEPT = 4


class PublishedVersions:
    """bf16 bits of the last versions, evaluated in fp32."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        """`model`: any model of the policy's shape; its weights are overwritten at will."""
        self._model = model.eval()
        self._allowed = allowed_mask()
        self._bits: dict[int, dict[str, TensorBits]] = {}

    def remember(self, version: int, bits: dict[str, TensorBits]) -> None:
        """Keep a version; the oldest beyond KEPT is forgotten."""
        self._bits[version] = bits
        for old in sorted(self._bits)[:-KEPT]:
            del self._bits[old]

    def bits(self, version: int) -> dict[str, TensorBits]:
        """The tensors of a version in checkpoint names."""
        return self._bits[version]

    @torch.no_grad()
    def logprobs(self, batch: Sequence[Trajectory]) -> list[list[float | None]]:
        """Per trajectory the logprob of each reply token under the version stamped on it.

        None where a token carries no version, or one that is no longer kept.
        """
        scored: list[list[float | None]] = [[None] * len(t.token_versions()) for t in batch]
        for version in sorted({v for t in batch for v in t.versions if v in self._bits}):
            self._load(version)
            members = [i for i, t in enumerate(batch) if version in t.versions]
            for piece in pieces([len(batch[i].tokens) for i in members]):
                self._score([members[i] for i in piece], batch, version, scored)
        return scored

    def _score(
        self,
        members: Sequence[int],
        batch: Sequence[Trajectory],
        version: int,
        scored: list[list[float | None]],
    ) -> None:
        longest = max(len(batch[i].tokens) for i in members)
        chosen = torch.tensor([batch[i].chosen(longest) for i in members])
        tokens = [batch[i].tokens for i in members]
        values: Tensor = reply_logprobs(self._model, tokens, chosen, self._allowed)
        flat = iter(values.tolist())
        for i in members:
            for at, stamped in enumerate(batch[i].token_versions()):
                value = next(flat)
                if stamped == version:
                    scored[i][at] = value

    def _load(self, version: int) -> None:
        parameters = dict(self._model.named_parameters())
        for name, bits in self._bits[version].items():
            parameters[name].data.copy_(tensor_of(bits).to(torch.float32))


def published_bits(model: Qwen2ForCausalLM) -> dict[str, TensorBits]:
    """The bf16 bits of a model in checkpoint names; tied tensors once."""
    return {
        name: tensor_bits(name, parameter.detach().to(torch.bfloat16))
        for name, parameter in model.named_parameters()
    }
