"""Capabilities in which engines differ: the node, `rose doctor` and the docs use this table.

What every engine has to do is not a capability but a promise: tests/engine/contract.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from rose.engines.spec import EngineKind


class Capability(StrEnum):
    """A capability by its name in docs/engines.md."""

    LEND_HOST_MEMORY = "a host lends KV memory of the machine"
    LEND_GPU = "a host lends KV memory of a GPU"
    LEND_RANKS = "a host of several ranks lends"
    RETURN_HOST_MEMORY = "a guest gives back KV memory of the machine"
    RETURN_GPU = "a guest gives back KV memory of a GPU"
    POOLING = "a replica serves a model that is not generative"
    SEED = "a turn that names a seed is repeated by it"
    WHITESPACE = "structured outputs have a turn's own rule for whitespace"
    RANKS = "a prompt's logprobs come with ranks"
    PIECEWISE_PROOF = "an update is proved with one layer of the new version in memory at a time"
    SLEEP = "a dedicated replica gives up its weights on request"


LACKS: Final[Mapping[EngineKind, Mapping[Capability, str]]] = MappingProxyType(
    {
        EngineKind.VLLM: MappingProxyType(
            {Capability.LEND_RANKS: "its pages belong to processes that its scheduler does not see"}
        ),
        EngineKind.SGLANG: MappingProxyType(
            {
                Capability.LEND_GPU: "ROSE does not reserve its memory on a GPU",
                Capability.LEND_RANKS: "the ranks' prefix caches have to forget the same",
                Capability.RETURN_GPU: "ROSE does not reserve its memory on a GPU",
                Capability.POOLING: "its replica serves turns only",
                Capability.SEED: "it takes seeds with --enable-deterministic-inference only",
                Capability.WHITESPACE: "it has one rule for all of them",
                Capability.RANKS: "it does not tell them",
                Capability.PIECEWISE_PROOF: "its layers hand on more than their output",
                Capability.SLEEP: "its route frees memory of an idle engine only",
            }
        ),
    }
)
"""Missing capabilities of each engine, with the reason."""


def lacking(engine: EngineKind, capability: Capability) -> str | None:
    """Return the reason why an engine lacks it, None if it has it."""
    return LACKS[engine].get(capability)
