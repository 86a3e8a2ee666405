"""What is compared: the engine itself, ROSE's gateway, and other routers in front of it."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from rose.bench.gateway.wires import COMPLETIONS, REPLICA, TOKEN_STREAM, TOKENS, Wire
from rose.errors import ConfigError

DIRECT = "direct"
# Peers by the module that holds them; all take the same options.
PEERS = {"vllm-router": "vllm_router", "sglang-router": "sglang_router"}
MANY = "100000"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to the engine. `router` is whose process stands between, DIRECT for nobody's.

    `baseline` is the wire of the direct arm that it is compared with.
    """

    engine: str
    router: str
    wire: Wire
    baseline: Wire

    @property
    def name(self) -> str:
        """As the table says it."""
        return f"{self.router}, {self.wire.name}" if self.router != DIRECT else DIRECT


def arms_over_standin(routers: Sequence[str], streams: bool, stock: bool) -> list[Arm]:
    """All arms of one round; `streams`, `stock`: what the gateway at hand can do."""
    arms = [Arm("standin replica", DIRECT, REPLICA, REPLICA)]
    if "rose" in routers:
        arms.append(Arm("standin replica", "rose", TOKENS, REPLICA))
        if streams:
            arms.append(Arm("standin replica", "rose", TOKEN_STREAM, REPLICA))
    peers = [router for router in routers if router != "rose"]
    if peers or stock:
        arms.append(Arm("standin vllm", DIRECT, COMPLETIONS, COMPLETIONS))
    if stock:
        arms.append(Arm("standin vllm", "rose", COMPLETIONS, COMPLETIONS))
    return arms + [Arm("standin vllm", peer, COMPLETIONS, COMPLETIONS) for peer in peers]


def rose_command(port: int, urls: Sequence[str], max_sequences: int) -> list[str]:
    """ROSE's gateway over replicas that are named."""
    replicas = [f"--replica=e{k}=dedicated={url}" for k, url in enumerate(urls)]
    return [
        sys.executable,
        "-m",
        "rose.gateway.main",
        f"--port={port}",
        f"--replica-max-sequences={max_sequences}",
        "--max-waiting=4096",
        *replicas,
    ]


def peer_command(text: str, port: int, urls: Sequence[str]) -> list[str]:
    """A peer's command line: `{port}` and `{urls}` filled in."""
    return shlex.split(text.replace("{port}", str(port)).replace("{urls}", " ".join(urls)))


def peers(given: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Commands by name: those that were given, and those that are installed; and who is missing."""
    found: dict[str, str] = {}
    for text in given:
        name, mark, command = text.partition("=")
        if not mark or "{port}" not in command or "{urls}" not in command:
            raise ConfigError(f"--peer {text}: write NAME=COMMAND with {{port}} and {{urls}} in it")
        found[name] = command
    missing = []
    for name, module in PEERS.items():
        if name in found:
            continue
        if find_spec(module) is None:
            missing.append(name)
            continue
        found[name] = (
            f"{shlex.quote(sys.executable)} -m {module}.launch_router --host 127.0.0.1"
            f" --port {{port}} --worker-urls {{urls}} --max-concurrent-requests {MANY}"
        )
    return found, missing
