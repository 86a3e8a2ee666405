"""DedicatedPool: dedicated replicas on a Ray cluster: actors whose body is `rose node`.

    scale(n)   placement group ── bundle ── actor ── `rose node` ── engine
    drain()    turns continue elsewhere; engines, actors and placement groups end

A killed actor takes its node and engine with it, and Ray starts it again in the same bundle; a node
that ends by itself ends its actor. Turns of a lost replica continue on another one.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rose.addresses import free_ports
from rose.direct_http import open_directly
from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.integrations.ray_node import PoolNode
from rose.process import launcher

T = TypeVar("T")
Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
# A node that ends sooner has failed: its actor waits before it ends and is restarted.
SHORT_LIFE_S, PAUSE_S = 30.0, 5.0
LOOK_S = 0.2
# Time for Ray to create a process that imports ROSE.
ANSWER_S = 60.0


class NodeActor:
    """Ray actor that runs one `rose node` as a child process; if the node ends by itself, so does
    the actor.
    """

    def __init__(self, node: PoolNode, gpus: int) -> None:
        self._node = node
        self._port, proxy_port = free_ports(2)
        self._draining = threading.Event()
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        given = ray.get_gpu_ids() if gpus else []
        if len(given) < gpus:
            raise RefusedError(f"{node.name} was given {len(given)} GPUs of {gpus} by Ray")
        self._device = _device(given[0]) if given else None
        self._proxy = None if node.proxy is None else (_own_address(), proxy_port)
        file = node.write(self._port, self._device, self._proxy)
        # The kernel ends the child with the thread that started it: with this one, which waits.
        threading.Thread(target=self._run, args=(file,), name="rose-node", daemon=True).start()

    def place(self) -> dict[str, Any]:
        """Return where the replica runs: its name, the machine's address, GPU, process id, and the
        proxy's host and port for gateways of other machines (None without a proxy).
        """
        pid = self._process.pid if self._process else None
        said = {"node": self._node.name, "host": _own_address(), "proxy": self._proxy}
        return said | {"gpu": self._device, "pid": pid}

    def healthy(self) -> bool:
        """Return True if the engine's /health answers 200 within 2 s."""
        try:
            url = f"http://127.0.0.1:{self._port}/health"
            with open_directly(url, 2.0) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def drain(self, timeout_s: float) -> bool:
        """Send SIGTERM to the node, whose turns continue on other replicas.

        Return True if it ended within `timeout_s`.
        """
        self._draining.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
        return self._ended.wait(timeout_s)

    def _run(self, file: Path) -> None:
        began_s = time.monotonic()
        placer = (sys.executable, "-I", "-S", str(launcher.__file__), f"parent={os.getpid()}")
        # Its earlier life may still be ending.
        node = (sys.executable, "-m", "rose.main.node", "--standby", "--config", str(file))
        with (file.parent / "node.log").open("ab") as log:
            self._process = subprocess.Popen([*placer, "--", *node], stdout=log, stderr=log)  # noqa: S603
        if self._draining.is_set():
            self._process.terminate()
        self._process.wait()
        self._ended.set()
        if not self._draining.is_set():
            if time.monotonic() - began_s < SHORT_LIFE_S:
                time.sleep(PAUSE_S)
            os._exit(1)  # Ray starts the actor again


@dataclass(slots=True)
class _PoolMember:
    node: PoolNode
    actor: Any
    group: Any


@dataclass(eq=False)
class DedicatedPool:
    """Pool of dedicated replicas of one job, on resources of a Ray cluster.

    Use it as a context manager, or `drain` it. It belongs to its driver: its replicas end when the
    driver ends, in any way. It starts `replicas` of them; `wait_healthy` waits for their engines.

    num_gpus, num_cpus: for each replica; with 0 GPUs it computes on the CPU. node: as in a node's
    file (docs/node.md), without `node` and `replicas`; each replica has folders of its own in its
    `run_dir` and `log_dir`; `{node}` in paths of its `certificates` is its name. replica: as there,
    without `id`, `kind`, `port` and `device`. proxy: as there, without `host` and `port`, {} with
    certificates; gateways of other machines reach replicas through it, and without one only those
    of their own machine.

    placement: of replicas that are started together. With all but PACK Ray has their resources back
    once the last of them ended. max_restarts: of each actor. timeout_s: seconds of each wait.

    Raises `ConfigError`, and `UnavailableError` if Ray has no room.
    """

    replicas: InitVar[int]
    num_gpus: int = 1
    _: KW_ONLY
    node: Mapping[str, Any]
    replica: Mapping[str, Any]
    proxy: Mapping[str, Any] | None = None
    placement: Placement = "PACK"
    num_cpus: float = 1
    name: str = "rose"
    max_restarts: int = 16
    timeout_s: float = 300.0
    _members: list[_PoolMember] = field(default_factory=list, init=False)

    def __post_init__(self, replicas: int) -> None:
        if self.placement not in get_args(Placement):
            known = ", ".join(get_args(Placement))
            raise ConfigError(f"placement {self.placement!r} is none of {known}")
        if self.num_gpus not in (0, 1):
            raise ConfigError(
                f"{self.num_gpus} GPUs for a replica; a dedicated replica has one, or none"
            )
        self._pool_node(f"{self.name}-0").check()
        self._actor = ray.remote(NodeActor)
        self.scale(replicas)

    def _pool_node(self, name: str) -> PoolNode:
        return PoolNode(name, dict(self.node), dict(self.replica), self.proxy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drain()

    def __len__(self) -> int:
        return len(self._members)

    def scale(self, replicas: int) -> None:
        """Change the number of replicas; surplus ones are drained, the newest first.

        A replica that Ray no longer restarts is replaced. Raises `UnavailableError` if Ray has no
        room.
        """
        if replicas < 0:
            raise ConfigError(f"{replicas} replicas are none; give 0 or more")
        gone = [member for member in self._members if not self._lives(member)]
        kept = [member for member in self._members if member not in gone]
        self._members = kept[:replicas]
        self._end([*gone, *kept[replicas:]])
        if missing := replicas - len(self._members):
            self._members += self._begin(missing)

    def drain(self) -> None:
        """End all replicas and return their resources to Ray; their turns continue on other
        replicas.
        """
        members, self._members = self._members, []
        self._end(members)

    def wait_healthy(self) -> None:
        """Block until the engines of all replicas answer.

        Raises `UnavailableError` after `timeout_s`, with the names of those that do not.
        """
        until_s = time.monotonic() + self.timeout_s
        waits = list(self._members)
        while waits:
            waits = [m for m in waits if not self._asked(m.actor.healthy.remote(), False)]
            if waits and time.monotonic() > until_s:
                names = ", ".join(member.node.name for member in waits)
                raise UnavailableError(
                    f"{names} not healthy after {self.timeout_s:g} s; see node.log and the"
                    f" engines' logs in {self.node['run_dir']} and {self.node['log_dir']}"
                )
            time.sleep(LOOK_S if waits else 0)

    def places(self) -> list[dict[str, Any]]:
        """Return a dictionary for each replica that says where it runs, as `NodeActor.place`; {}
        for one that does not answer now.
        """
        return [self._asked(member.actor.place.remote(), {}) for member in self._members]

    # ---- actors ----

    def _begin(self, count: int) -> list[_PoolMember]:
        bundles = self._bundles(count)
        taken = {member.node.name for member in self._members}
        names = (
            name for k in range(count + len(taken)) if (name := f"{self.name}-{k}") not in taken
        )
        made = []
        for group, index in bundles:
            node = self._pool_node(next(names))
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            actor = self._actor.options(
                num_cpus=self.num_cpus,
                num_gpus=self.num_gpus,
                scheduling_strategy=strategy,
                max_restarts=self.max_restarts,
                # A drain waits while other calls ask.
                max_concurrency=4,
            ).remote(node, self.num_gpus)
            made.append(_PoolMember(node, actor, group))
        return made

    def _bundles(self, count: int) -> list[tuple[Any, int]]:
        """Return places for `count` replicas, each a pair of placement group and bundle index.

        Raises `UnavailableError` if Ray has no room within `timeout_s`.
        """
        bundle = {"CPU": self.num_cpus} | ({"GPU": self.num_gpus} if self.num_gpus else {})
        # Groups of one are packed too, and each is returned with its replica.
        sizes = [1] * count if self.placement == "PACK" else [count]
        groups = [placement_group([bundle] * size, strategy=self.placement) for size in sizes]
        until_s = time.monotonic() + self.timeout_s
        if not all(group.wait(max(0.1, until_s - time.monotonic())) for group in groups):
            has = ray.available_resources()
            for group in groups:
                remove_placement_group(group)
            raise UnavailableError(
                f"Ray has no room for {count} times {bundle} ({self.placement}) after"
                f" {self.timeout_s:g} s; it has {has}"
            )
        return [(group, index) for group in groups for index in range(group.bundle_count)]

    def _end(self, members: list[_PoolMember]) -> None:
        asked = [(m, m.actor.drain.remote(self.timeout_s)) for m in members]
        for member, answer in asked:
            self._asked(answer, None, self.timeout_s)
            ray.kill(member.actor)
        used = [member.group for member in self._members]
        for group in {member.group.id: member.group for member in members}.values():
            if all(group.id != each.id for each in used):
                remove_placement_group(group)

    def _lives(self, member: _PoolMember) -> bool:
        """Return True if the member's actor answers, or Ray is restarting it."""
        try:
            ray.get(member.actor.place.remote(), timeout=ANSWER_S)
        except ray.exceptions.ActorUnavailableError:
            return True
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return False
        return True

    def _asked(self, answer: "ray.ObjectRef", otherwise: T, timeout_s: float = ANSWER_S) -> T:
        try:
            found: T = ray.get(answer, timeout=timeout_s)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return otherwise
        return found


def _own_address() -> str:
    """Return this machine's IP address, by which other machines of the Ray cluster reach it."""
    return str(ray.util.get_node_ip_address())


def _device(given: int | str) -> int | str:
    """Return a GPU that Ray assigned as a node's file names it: an index as int, or a UUID as
    str.
    """
    return int(given) if str(given).isdigit() else str(given)
