"""The APIs that trainers and clients speak: one file a dialect, wire to turn requests and back."""

from rose.gateway.apis.chat import ChatDialect
from rose.gateway.apis.completions import CompletionDialect
from rose.gateway.apis.sglang import SglangDialect
from rose.gateway.apis.vllm import VllmDialect

__all__ = ["ChatDialect", "CompletionDialect", "SglangDialect", "VllmDialect"]
