import asyncio
import random
from itertools import pairwise
from typing import Any

import pytest

from elastic_scheduler import hedging as hedge
from elastic_scheduler.routing import cost
from rose.client import RolloutClient, Sampling
from rose.gateway import Gateway, ReplicaEntry, server
from rose.gateway.turns import hedging
from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import base_url, entry, failing_over, until

TURNS, TOKENS = 24, 20
FAULTS = ("revoke_after", "break_after", "hang_after")
NAMES = ("guest-0", "own-0")


async def _disturb(
    gateway: Gateway, replicas: list[StandInReplica], dice: random.Random, until_done: Any
) -> None:
    """Faults, drains, new leases and lost rows, in any order, until the turns are done."""
    rows: list[ReplicaEntry] = list(map(entry, replicas, NAMES))
    epoch = 1
    while not until_done.done():
        await asyncio.sleep(dice.random() * 0.02)
        which = dice.randrange(2)
        replica = replicas[which]
        for fault in FAULTS:
            setattr(replica, fault, None)
        if dice.random() < 0.5:
            setattr(replica, dice.choice(FAULTS), dice.randrange(1, 6))
        replica.draining = dice.random() < 0.1
        if dice.random() < 0.3:
            epoch += 1
            leased = dice.random() < 0.8
            rows[which] = entry(replica, NAMES[which], lease_epoch=epoch, leased=leased)
            gateway.set_table(tuple(row for row in rows if dice.random() < 0.9))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("hedges", [0, 3])
async def test_whatever_happens_each_turn_is_whole_and_no_place_is_leaked(
    seed: int, hedges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(cost, "ENOUGH_FOR_PACE", 1)
    monkeypatch.setattr(hedging, "LEAST_LEFT_S", 0.0)
    monkeypatch.setattr(hedge, "MARGIN", -9.0)
    monkeypatch.setattr(hedge, "DONE_SHARE", 0.0)
    monkeypatch.setattr(server, "SWEEP_S", 0.01)
    replicas = [StandInReplica(delay_s=0.004 if hedges else 0.001) for _ in range(2)]
    async with (
        failing_over(*replicas, stall_s=0.1, max_attempts=50) as (one, two, gateway, _),
        RolloutClient(base_url(gateway), timeout_s=30) as client,
    ):
        gateway.set_table(tuple(map(entry, (one, two), NAMES)))
        turns = asyncio.gather(
            *(
                client.generate(
                    [1, 100 + k],
                    Sampling(max_tokens=TOKENS),
                    request_id=f"r{k}",
                    session_id=f"s{k % 3}",
                    group_id=f"g{k % 4}",
                    group_size=TURNS // 4,
                    hedges=hedges,
                )
                for k in range(TURNS)
            )
        )
        await _disturb(gateway, [one, two], dice, turns)
        for k, turn in enumerate(await turns):
            assert turn.token_ids == tuple(range(101 + k, 101 + k + TOKENS))
            for spans in (turn.versions, turn.segments):
                assert (spans[0][-2], spans[-1][-1]) == (0, TOKENS)
                assert all(a[-1] == b[-2] for a, b in pairwise(spans))
        assert not any(gateway.status().live_turns.values())
        assert gateway.status().waiting == 0
        stats = gateway.stats
        assert stats.turns == TURNS
        await until(lambda: not gateway.status().hedged_groups)
        assert stats.hedge_wins <= stats.hedges <= 4 * hedges
        assert hedges or not stats.hedges
