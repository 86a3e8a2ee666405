"""Steps of a dedicated pool on Ray, each printed as a line of JSON; see `test_ray.py`.

ray_pool_main.py NODE REPLICA FOLDER lifecycle | training | proxied CA CERTIFICATE KEY
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray

from rose.addresses import is_loopback
from rose.contract.replica import GENERATE
from rose.errors import ConfigError, UnavailableError
from rose.gateway.backends.http_pool import ClusterTls, Upstream
from rose.integrations import PolicyPublisher, TrainerSettings
from rose.integrations.ray import DedicatedPool
from rose.security.certificates import CertificateFiles

NODE, REPLICA = json.loads(sys.argv[1]), json.loads(sys.argv[2])
FOLDER, SCENARIO = Path(sys.argv[3]), sys.argv[4]
WAIT_S, LOOK_S = 120.0, 0.1


def said(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def until(holds: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < deadline_s, f"never {what}"
        time.sleep(LOOK_S)
    return found


def listeners() -> set[str]:
    """Addresses at which this process and Ray's listen."""
    mine = psutil.Process()
    found = [each.net_connections("tcp") for each in (mine, *mine.children(recursive=True))]
    return {each.laddr.ip for many in found for each in many if each.status == "LISTEN"}


def pids(pool: DedicatedPool) -> list[int]:
    return [place["pid"] for place in pool.places() if place.get("pid")]


def lifecycle() -> None:
    """Actors and their nodes come, are killed, come back and go; engines do not matter here."""
    said(listens=sorted({is_loopback(ip.removeprefix("::ffff:")) for ip in listeners()}))
    try:
        DedicatedPool(1, 0, node=NODE, replica={**REPLICA, "prot": 1})
    except ConfigError as error:
        said(refused=str(error))
    with DedicatedPool(2, 0, node=NODE, replica=REPLICA, timeout_s=10.0) as pool:
        first = until(lambda: len(found := pids(pool)) == 2 and found, "two nodes")
        said(names=[place["node"] for place in pool.places()])
        actor = pool._members[0].actor
        ray.kill(actor, no_restart=False)
        until(lambda: not psutil.pid_exists(first[0]), "an end of the killed actor's node")
        second = until(lambda: len(found := pids(pool)) == 2 and found, "two nodes again")
        psutil.Process(second[1]).kill()
        third = until(
            lambda: len(found := pids(pool)) == 2 and second[1] not in found and found,
            "another node in place of the killed one",
        )
        said(restarted=[first[0] != second[0], third[1] != second[1]])
        try:
            pool.scale(40)
        except UnavailableError as error:
            said(full=str(error))
        said(after_full=len(pool))
        pool.scale(1)
        said(scaled=[place["node"] for place in pool.places()])
        until(lambda: not psutil.pid_exists(third[1]), "an end of the node that was scaled away")
        until(lambda: ray.available_resources().get("CPU") == 3, "its resources given back")
        pool.scale(2)
        fourth = until(lambda: len(found := pids(pool)) == 2 and found, "two nodes once more")
    until(lambda: not any(map(psutil.pid_exists, fourth)), "an end of all nodes")
    whole = ray.cluster_resources()["CPU"]
    said(free=until(lambda: ray.available_resources().get("CPU") == whole, "all free again"))


@ray.remote(num_cpus=0)
class TrainerActor:
    """An actor that was handed what it trains with."""

    def __init__(self, publisher: PolicyPublisher, client: Any) -> None:
        self._publisher, self._client = publisher, client

    def step(self, scale: float) -> dict[str, Any]:
        """Publish a version, and sample from it."""
        from rose.client import Sampling
        from weight_transfer import tensor_of

        start = getattr(self, "_bits", None) or self._publisher.restore()
        self._bits = start
        named = ((name, tensor_of(bits).float() * scale) for name, bits in start.items())
        version = self._publisher.publish(named)
        turn = self._client.generate([5, 6, 7], Sampling(max_tokens=4), min_version=version)
        return {"version": version, "turn": turn.versions, "tokens": len(turn.token_ids)}


def training() -> None:
    """Turns and versions before and after an actor of the pool is killed."""
    settings = TrainerSettings.from_env()
    with DedicatedPool(1, 0, node=NODE, replica=REPLICA) as pool:
        pool.wait_healthy()
        trainer = TrainerActor.remote(PolicyPublisher(settings), settings.client())
        said(before=ray.get(trainer.step.remote(1.0)))
        ray.kill(pool._members[0].actor, no_restart=False)
        pool.wait_healthy()
        said(after=ray.get(trainer.step.remote(1.5)))


class TurnAnswer:
    """Receives an answer's status, and how it ended."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.over: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def status(self, code: int) -> None:
        self.code = code

    def body(self, data: bytes) -> None:
        pass

    def ended(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(error)


async def asked(url: str, tls: ClusterTls | None) -> int | None:
    """Status with which a turn was answered; None where the connection was refused."""
    upstream = Upstream(tls)
    try:
        answer = TurnAnswer()
        await upstream.post(url, b"{}", answer)
        await answer.over
    except OSError:
        return None
    finally:
        upstream.close()
    return answer.code


def proxied() -> None:
    """A gateway reaches a replica by its node's proxy, and nobody else does."""
    gateway = ClusterTls(CertificateFiles(*map(Path, sys.argv[5:8])))
    with DedicatedPool(1, 0, node=NODE, replica=REPLICA, proxy={}) as pool:
        [place] = until(lambda: [each for each in pool.places() if each], "a node")
        host, port = place["proxy"]
        url = f"https://{host}:{port}/{place['node']}{GENERATE}"
        said(gateway=until(lambda: asyncio.run(asked(url, gateway)), "an answer of its proxy"))
        said(stranger=asyncio.run(asked(url, None)))


if __name__ == "__main__":
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100_000_000,
        _temp_dir=str(FOLDER),
    )
    try:
        globals()[SCENARIO]()
    finally:
        ray.shutdown()
