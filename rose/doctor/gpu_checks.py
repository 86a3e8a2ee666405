"""The GPUs of a node: driver, card, who else is on it, MPS, and what a guest needs to give back."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from rose.doctor.finding import Finding, checked, note, ok, wrong
from rose.errors import RoseError
from rose.node.claim import tenures
from rose.node.config import NodeConfig
from rose.node.engine_config import ReplicaConfig
from rose.node.gpu import Gpus, control_daemon_at, insist_mps, pipe_folder
from rose.nvml import Card, Client, Usage, version_text
from rose.procfs import group_members

GIB = 1 << 30
# What a driver keeps for itself on a card that nobody uses.
DRIVERS_OWN_BYTES = 2 << 30
ATTEMPT_TIMEOUT_S = 10.0
_LOOK = "from importlib.util import find_spec; print(find_spec('cuda.bindings') is not None)"


def gpu_checks(config: NodeConfig, gpus: Gpus) -> Iterator[Finding]:
    """Findings about every GPU that the node's file names, nothing without one."""
    replicas = [replica for replica in config.replicas if replica.device is not None]
    named = [replica.device for replica in replicas]
    if config.host and config.host.device is not None:
        named.append(config.host.device)
    if not named:
        return
    yield checked("gpu", partial(_usable, config, gpus))
    for device in dict.fromkeys(device for device in named if device is not None):
        try:
            card = gpus.card(device)
        except RoseError:
            continue  # That is what is wrong above.
        yield checked(f"gpu {device}", partial(_card, f"gpu {device}", card))
        yield checked(
            f"gpu {device} load", partial(_load, f"gpu {device} load", config, gpus, card)
        )
    for replica in replicas:
        yield checked(f"{replica.id} mps", partial(_mps, replica))
        if replica.kind == "guest":
            yield checked(f"{replica.id} gives back", partial(_gives_back, replica))
            if replica.core is not None:
                yield _pinned(replica)


def _usable(config: NodeConfig, gpus: Gpus) -> Finding:
    try:
        gpus.insist_all(config)
    except RoseError as error:
        what, _, do = str(error).partition("; ")
        return wrong("gpu", what, do or "see what nvidia-smi says")
    return ok("gpu", "every replica has a card that it can run on")


def _card(subject: str, card: Card) -> Finding:
    what = f"{card.name}, driver {card.driver}, CUDA {version_text(card.cuda)}, {card.uuid}"
    if card.persistence is False:
        return note(
            subject, f"{what}, persistence off", "its owner may turn it on: starts are slow"
        )
    return ok(subject, what)


def _load(subject: str, config: NodeConfig, gpus: Gpus, card: Card) -> Finding:
    """Who computes there beside host and guests, as far as the driver tells."""
    usage, clients = gpus.reader.usage(card), gpus.reader.clients(card)
    what = _free(card, usage)
    if not clients and usage.used_bytes > DRIVERS_OWN_BYTES:
        do = "run the node in the machine's process namespace, or the ladder goes by pages alone"
        return note(subject, f"{what}, and none of its processes is seen from here", do)
    others = _others(config, clients)
    if others:
        pids = ", ".join(map(str, others))
        do = "end it, or expect less: it is neither gated nor asked for memory"
        return note(subject, f"{what}, and another process is on it (pid {pids})", do)
    if usage.slowed:
        return note(subject, f"{what}, slowed by {', '.join(usage.slowed)}", "look at power, heat")
    return ok(subject, what)


def _free(card: Card, usage: Usage) -> str:
    return f"{usage.free_bytes / GIB:.1f} of {card.memory_bytes / GIB:.1f} GiB free"


def _others(config: NodeConfig, clients: tuple[Client, ...]) -> list[int]:
    leaders = [tenure.identity.pid for tenure in tenures(config.run_dir).values()]
    known = {pid for leader in leaders for pid, _ in group_members(leader)}
    if config.host and config.host.pid is not None:
        known |= {pid for pid, _ in group_members(os.getpgid(config.host.pid))}
    return [client.pid for client in clients if client.pid not in known]


def _mps(replica: ReplicaConfig) -> Finding:
    subject = f"{replica.id} mps"
    if replica.wants_mps:
        try:
            pipes = insist_mps(replica)
        except RoseError as error:
            what, _, do = str(error).partition("; ")
            return wrong(subject, what, do)
        do = "know that a fatal fault of one client ends every client of that GPU, the host too"
        return note(subject, f"a client of the control daemon at {pipes}", do)
    pipes = pipe_folder({})
    if control_daemon_at(pipes):
        what = f"a control daemon is at {pipes}, and this replica is no client of it"
        if replica.kind == "guest":
            return note(subject, what, "it then takes turns with the host; see mps_priority")
    return ok(subject, "off")


def _gives_back(replica: ReplicaConfig) -> Finding:
    subject = f"{replica.id} gives back"
    if replica.kv_backend != "cuda":
        what = f"kv_backend is {replica.kv_backend}: it gives no KV memory of a GPU back"
        return note(subject, what, 'set "kv_backend": "cuda", which gates its start as well')
    python = str(replica.engine_python or sys.executable)
    found = subprocess.run(  # noqa: S603 -- the operator's own interpreter
        [python, "-c", _LOOK],
        env={**os.environ, **replica.extra_env},
        capture_output=True,
        text=True,
        timeout=ATTEMPT_TIMEOUT_S,
        check=False,
    )
    if found.stdout.strip() != "True":
        what = f"{python} has no cuda-bindings, which kv_backend cuda needs"
        return wrong(subject, what, "install rose-rollout[cuda] there")
    return ok(subject, "KV pages, through cuda-bindings")


def _pinned(replica: ReplicaConfig) -> Finding:
    what = f"it is pinned to core {replica.core}: its launches wait for that core alone"
    return note(f"{replica.id} core", what, "leave `core` out on a GPU")
