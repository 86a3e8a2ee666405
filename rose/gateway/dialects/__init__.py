"""The APIs that trainers and clients speak: one file a dialect, wire to turn requests and back."""

from rose.gateway.dialects.chat import ChatDialect
from rose.gateway.dialects.completions import CompletionDialect
from rose.gateway.dialects.sglang import SglangDialect
from rose.gateway.dialects.vllm import VllmDialect

__all__ = ["ChatDialect", "CompletionDialect", "SglangDialect", "VllmDialect"]
