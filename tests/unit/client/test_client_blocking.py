"""The client from plain threads, from other processes, and from Ray where it is installed."""

import asyncio
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from rose.client import (
    BlockingRolloutClient,
    ClientClosed,
    RequestRefused,
    Retry,
    RolloutClient,
    Sampling,
    TurnCancelled,
)
from tests.fakes.gateway import StandInGateway
from tests.harness.waiting import PATIENCE_S

TEN = Sampling(max_tokens=10)
PROMPT = [1, 100]
COUNT = tuple(range(101, 111))


def test_one_client_serves_many_threads(gateway: StandInGateway) -> None:
    with BlockingRolloutClient(gateway.url) as client, ThreadPoolExecutor(8) as pool:
        turns = [*pool.map(lambda k: client.generate([1, k], TEN), range(40))]
        assert [turn.token_ids[0] for turn in turns] == [*range(1, 41)]
        assert client.progress().finished == 40


def test_streams_groups_and_sessions_are_plain_iterators(gateway: StandInGateway) -> None:
    with BlockingRolloutClient(gateway.url) as client:
        chunks = [*client.stream(PROMPT, TEN)]
        assert [t for chunk in chunks for t in chunk.token_ids] == [*COUNT]
        assert {m.index for m in client.gather_group(PROMPT, TEN, 3, hedges=1)} == {0, 1, 2}
        with client.session("traj") as session:
            assert session.generate(PROMPT, TEN).token_ids == COUNT
            assert len([*session.stream(PROMPT, TEN)]) == 10
    assert gateway.ended_sessions == ["traj"]


def test_a_closed_iterator_ends_its_turn(gateway: StandInGateway) -> None:
    gateway.delay_s = 0.01
    with BlockingRolloutClient(gateway.url) as client:
        chunks = client.stream(PROMPT, Sampling(max_tokens=500))
        next(chunks)
        assert len(client.progress().running) == 1
        chunks.close()  # type: ignore[attr-defined]
        assert client.progress().running == ()


def test_errors_are_typed_and_cancel_works_from_another_thread(gateway: StandInGateway) -> None:
    with BlockingRolloutClient(gateway.url) as client, ThreadPoolExecutor(1) as pool:
        gateway.delay_s = 5
        slow = pool.submit(client.generate, PROMPT, TEN, request_id="slow")
        while not gateway.asked:
            pass
        assert client.cancel("slow")
        with pytest.raises(TurnCancelled):
            slow.result(5)
        gateway.refuse_with = (400, {})
        with pytest.raises(RequestRefused, match="says 400"):
            client.generate(PROMPT, TEN)


def test_closing_ends_waiting_threads_and_further_use(gateway: StandInGateway) -> None:
    gateway.delay_s = 5
    client = BlockingRolloutClient(gateway.url)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, PROMPT, TEN)
        while not gateway.asked:
            pass
        client.close()
        with pytest.raises(TurnCancelled):
            waiting.result(5)
    with pytest.raises(ClientClosed, match="make another"):
        client.generate(PROMPT, TEN)


def test_it_may_be_used_inside_a_running_loop(gateway: StandInGateway) -> None:
    async def from_a_coroutine() -> tuple[int, ...]:
        with BlockingRolloutClient(gateway.url) as client:
            return await asyncio.to_thread(lambda: client.generate(PROMPT, TEN).token_ids)

    assert asyncio.run(from_a_coroutine()) == COUNT


@pytest.mark.parametrize("kind", [BlockingRolloutClient, RolloutClient])
def test_clients_pickle_as_what_they_were_built_from(kind: type) -> None:
    client = kind(["http://a:1/", "http://b:2"], 7.0, retry=Retry(3, 0.5, 1.0))
    copy = pickle.loads(pickle.dumps(client))
    assert copy.settings.urls == ("http://a:1", "http://b:2")
    assert (copy.settings.timeout_s, copy.settings.retry) == (7.0, Retry(3, 0.5, 1.0))


def _turn_of(client: BlockingRolloutClient) -> tuple[int, ...]:
    try:
        return client.generate(PROMPT, TEN).token_ids
    finally:
        client.close()


def _used_here_and_in_a_child(url: str, method: str) -> None:
    with BlockingRolloutClient(url) as client:
        assert client.generate(PROMPT, TEN).token_ids == COUNT
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply(_turn_of, (client,)) == COUNT
        assert client.generate(PROMPT, TEN).token_ids == COUNT


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_an_open_client_works_in_another_process(gateway: StandInGateway, method: str) -> None:
    # From a process of its own: one that has run other tests has threads that no fork survives.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        fresh.submit(_used_here_and_in_a_child, gateway.url, method).result(PATIENCE_S)


@pytest.mark.filterwarnings("ignore")
def test_a_ray_actor_holds_a_client(gateway: StandInGateway) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")

    class RayWorker:
        def __init__(self, client: BlockingRolloutClient) -> None:
            self.client = client

        def turn(self) -> tuple[int, ...]:
            return self.client.generate(PROMPT, TEN).token_ids

        def fails(self) -> None:
            self.client.generate(PROMPT, TEN, request_id="bad")

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        worker = ray.remote(RayWorker).remote(BlockingRolloutClient(gateway.url))
        assert ray.get(worker.turn.remote()) == COUNT
        gateway.refuse_with = (400, {})
        with pytest.raises(RequestRefused, match="says 400"):
            ray.get(worker.fails.remote())
    finally:
        ray.shutdown()
