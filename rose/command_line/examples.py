"""An example or two of every command, for its help and the reference.

A test runs each of them. Examples of processes that serve, or need an engine, run as far as their
command line; all others run to their end, against a scheduler with stand-in nodes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "init": ("rose init --host-model models/host --policy models/policy",),
        "status": ("rose status", "rose status --watch 5", "rose status -o json"),
        "nodes": ("rose nodes", "rose nodes serving-0 -o yaml"),
        "replicas": ("rose replicas --node serving-0", "rose replicas --job grpo -o json"),
        "top": ("rose top", "rose top --node serving-0 --once"),
        "jobs": ("rose jobs", "rose jobs show grpo", "rose jobs end grpo --dry-run"),
        "explain": ("rose explain episode-1 --gateway http://127.0.0.1:7450",),
        "policy": ("rose policy explain serving-0",),
        "policy get": ("rose policy get", "rose policy get chat -o yaml"),
        "policy apply": (
            "rose policy apply policy.json --dry-run",
            "rose policy apply policy.json",
        ),
        "policy diff": ("rose policy diff policy.json",),
        "policy set": (
            "rose policy set chat slackShare=0.2 --dry-run",
            "rose policy set chat mode=Advisory maxHarvest.nodes=25%",
        ),
        "policy delete": ("rose policy delete chat --dry-run",),
        "policy explain": ("rose policy explain serving-0", "rose policy explain -o json"),
        "hold": ("rose hold", "rose hold --replica guest-0"),
        "drain": ("rose drain --dry-run", "rose drain"),
        "stop-all": ("rose stop-all --dry-run", "rose stop-all"),
        "resume": ("rose resume",),
        "harvest": ("rose harvest hold --dry-run",),
        "revoke": ("rose revoke guest-0 --reason stuck",),
        "kill": ("rose kill /run/rose/node --dry-run", "rose kill /run/rose/node"),
        "unkill": ("rose unkill /run/rose/node",),
        "advise": (
            "rose advise --prometheus http://prometheus:9090 --price 2.50 --out advice.html",
            "rose advise --metrics http://gpu-1:8000/metrics http://gpu-2:8000/metrics --for-s 600",
            "rose advise --trace requests.csv --gpus 8 --model 8b",
        ),
        "audit": ("rose audit verify run/s1/audit-scheduler.jsonl",),
        "audit verify": ("rose audit verify run/s1/audit-scheduler.jsonl",),
        "audit tail": ("rose audit tail -n 5 run/s1/audit-scheduler.jsonl",),
        "usage": ("rose usage --since 7d run/s1/usage.jsonl",),
        "support-bundle": (
            "rose support-bundle --out help.tar.gz --log-dir run/s1 --scheduler 127.0.0.1:7400",
        ),
        "doctor": ("rose doctor --scheduler 127.0.0.1:7400", "rose doctor --config node.json"),
        "compare": ("rose compare serving-0 --metrics http://127.0.0.1:7490/metrics --dry-run",),
        "sim": ("rose sim compare frozen_lake-8b --policies fixed,paper,rose",),
        "sim run": (
            "rose sim run frozen_lake-8b --policy rose --steps 2 -o json",
            "rose sim run scenario.yaml --until-s 600 --out run.json",
        ),
        "sim compare": (
            "rose sim compare frozen_lake-8b",
            "rose sim compare frozen_lake-8b-async --policies fixed,rose --seeds 3",
        ),
        "sim what-if": (
            "rose sim what-if --trace trace.csv --gpus 32 --model 70b",
            "rose sim what-if --trace trace.csv --gpus 64 --model 70b --slack-share 0.3 -o json",
        ),
        "sim sweep": (
            "rose sim sweep frozen_lake-8b --vary slack_share=0,0.25,0.5 --workers 2",
            "rose sim sweep frozen_lake-8b --around 0.2 --scale 0.25 --seeds 3",
        ),
        "sim fleet": ("rose sim fleet --days 0.01",),
        "sim paper": ("rose sim paper --setups frozen_lake-8b --steps 3 --out paper.json",),
        "store": ("rose store backup --store run/rose.sqlite first.backup",),
        "store backup": ("rose store backup --store run/rose.sqlite store.backup",),
        "store show": ("rose store show store.backup",),
        "store restore": ("rose store restore --store run/new.sqlite store.backup",),
        "certs": ("rose certs init --cluster prod",),
        "certs init": ("rose certs init --cluster prod",),
        "certs issue": ("rose certs issue operator ada", "rose certs issue node serving-0"),
        "certs sign-nodes": (
            "rose certs sign-nodes --dir /ca --signer rose.dev/prod.rose --account prod:rose-node",
        ),
        "certs show": ("rose certs show certs/operator-ada.pem",),
        "token": ("rose token issue --job grpo --ttl 1h --out grpo.token",),
        "token key": ("rose token key --out token.key",),
        "token issue": ("rose token issue --job grpo --ttl 1h --out grpo.token",),
        "plugin": ("rose plugin copy rose-plugin",),
        "plugin copy": ("rose plugin copy rose-plugin",),
        "plugin webhook": (
            "rose plugin webhook --image rose --ca ca.pem --certificate hook.pem --key hook.key",
        ),
        "completion": (
            "rose completion bash > ~/.local/share/bash-completion/completions/rose",
            "rose completion zsh > ~/.zfunc/_rose",
            "rose completion fish > ~/.config/fish/completions/rose.fish",
        ),
        "scheduler": ("rose scheduler --store run/rose.sqlite --log-dir run/s1 --port 7400",),
        "gateway": ("rose gateway --port 7450 --scheduler 127.0.0.1:7400",),
        "node": ("rose node --config node.json",),
        "front": ("rose front --port 7460 --weights-root outputs",),
        "publish": ("rose publish --watch outputs/checkpoints --job grpo",),
        "profile": ("rose profile --model models/m-7b --out step_profile.json",),
        "relay": (
            "rose relay --store relay --origin http://10.0.0.9:7500 --job grpo --port 7600"
            ' --verify-key "$(cat token.key.pub)"',
        ),
        "weights": ("rose weights diff old new -o delta",),
        "weights diff": ("rose weights diff old new -o delta --codec compact",),
        "weights apply": ("rose weights apply old delta -o new",),
        "weights inspect": ("rose weights inspect delta",),
        "weights verify": ("rose weights verify new delta",),
        "demo": ("rose demo --steps 3",),
        "demo verify": ("rose demo verify out/demo",),
    }
)
"""Example command lines by the words of a command, without `rose`."""

SERVES: Final = frozenset(
    {
        "init",
        "scheduler",
        "gateway",
        "node",
        "front",
        "publish",
        "profile",
        "relay",
        "weights",
        "demo",
    }
)
"""Commands that serve until they are stopped, or need engines or checkpoints."""


def examples_of(program: str) -> str:
    """Return the examples of a program such as `rose policy get`, as the end of its help; "" if it
    has none.
    """
    words = program.removeprefix("rose").strip()
    found = EXAMPLES.get(words, ())
    if not found:
        return ""
    title = "examples" if len(found) > 1 else "example"
    return f"\n{title}:\n" + "".join(f"  {each}\n" for each in found)
