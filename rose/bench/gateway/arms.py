"""What is compared: the engine itself, ROSE's gateway, and other routers in front of it."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from rose.bench.gateway.wires import COMPLETIONS, REPLICA, SGLANG, TOKEN_STREAM, TOKENS, Wire
from rose.errors import ConfigError

DIRECT, ROSE = "direct", "rose"
# Peers by the module that holds them; all take the same options.
PEERS = {"vllm-router": "vllm_router", "sglang-router": "sglang_router"}
# sglang-router takes token ids on SGLang's own route only.
PEER_WIRES = {"vllm-router": COMPLETIONS, "sglang-router": SGLANG}
MANY = "100000"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to the engine. `router` is whose process stands between, DIRECT for nobody's.

    `stock`: the engine is one without ROSE. `baseline`: the wire of the direct arm beside it.
    """

    router: str
    wire: Wire
    baseline: Wire
    stock: bool = False

    @property
    def engine(self) -> str:
        """As the table says it; it is never a real one's name."""
        return "standin stock" if self.stock else "standin replica"

    @property
    def process(self) -> str:
        """The router process: ROSE's gateway runs once for each kind of engine."""
        return f"{self.router}-stock" if self.router == ROSE and self.stock else self.router


def arms_over_standin(peers: Sequence[str]) -> list[Arm]:
    """All arms of one round."""
    arms = [
        Arm(DIRECT, REPLICA, REPLICA),
        Arm(ROSE, TOKENS, REPLICA),
        Arm(ROSE, TOKEN_STREAM, REPLICA),
        Arm(DIRECT, COMPLETIONS, COMPLETIONS, stock=True),
        Arm(ROSE, TOKEN_STREAM, COMPLETIONS, stock=True),
    ]
    wires = {peer: PEER_WIRES.get(peer, COMPLETIONS) for peer in peers}
    others = dict.fromkeys(wire for wire in wires.values() if wire is not COMPLETIONS)
    arms += [Arm(DIRECT, wire, wire, stock=True) for wire in others]
    return arms + [Arm(peer, wire, wire, stock=True) for peer, wire in wires.items()]


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


def peer_command(text: str, port: int, metrics_port: int, urls: Sequence[str]) -> list[str]:
    """A peer's command line: `{port}`, `{metrics_port}` and `{urls}` filled in."""
    values = {"port": str(port), "metrics_port": str(metrics_port), "urls": " ".join(urls)}
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return shlex.split(text)


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
            f" --prometheus-port {{metrics_port}}"
        )
    return found, missing
