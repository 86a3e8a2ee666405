"""API frontends: one file for each API that trainers speak, wire to turn requests and back."""

from rose.gateway.apis.chat import ChatFrontend
from rose.gateway.apis.completions import CompletionFrontend
from rose.gateway.apis.messages import MessagesFrontend
from rose.gateway.apis.responses import ResponsesFrontend
from rose.gateway.apis.sglang import SglangFrontend
from rose.gateway.apis.vllm import VllmFrontend

__all__ = [
    "ChatFrontend",
    "CompletionFrontend",
    "MessagesFrontend",
    "ResponsesFrontend",
    "SglangFrontend",
    "VllmFrontend",
]
