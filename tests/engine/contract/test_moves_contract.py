"""A turn that is revoked again and again goes on, each time, on a replica of the other engine.

Both compute the same in fp32 up to rounding, so the tokens are those of a turn that stayed, unless
two of them are as good as equal at some place. Whatever they are, each is the best by the model
itself, and its logprob is the model's.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract_engines import SGLANG, VLLM
from guest_rig import Rig, client_of, started
from live_replica import PROMPT, Lines, Replica, sampled, tokens_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not SGLANG.there, reason=SGLANG.missing),
]

TURN = 160
LINES_OF_A_STAY = 3
# Logits of one engine differ from the other's by a hundredth of that.
NEAR_TIE = 1e-4
LOGPROB_GAP = 0.01


@dataclass
class LeasedPair:
    """A guest of each engine, with a lease."""

    rigs: tuple[Rig, Rig]
    replicas: tuple[Replica, Replica]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LeasedPair]:
    folders = [tmp_path_factory.mktemp(name) for name in ("vllm", "sglang")]
    async with (
        started(VLLM, folders[0]) as first,
        started(SGLANG, folders[1]) as second,
        client_of(first) as here,
        client_of(second) as there,
    ):
        yield LeasedPair((first, second), (here, there))


async def stayed(replica: Replica) -> list[int]:
    await replica.admit()
    return tokens_of(await replica.lines(PROMPT, TURN, salt="stayed"))


async def moved(pair: LeasedPair, first: int, revocations: int) -> list[tuple[int, float]]:
    """Tokens and logprobs of a turn that changes the engine so often."""
    got: list[tuple[int, float]] = []
    for stay in range(revocations):
        replica = pair.replicas[(first + stay) % 2]
        epoch = await replica.admit()
        tokens = [token for token, _ in got]
        lines: Lines = []
        async for line in replica.stream(PROMPT + tokens, TURN - len(got)):
            lines.append(line)
            if len(lines) == LINES_OF_A_STAY:
                assert (await replica.call("drain", {"epoch": epoch}))[0] == 200
        assert lines[-1] == {"finish_reason": "revoked"}, "it had not ended before"
        got += sampled(lines)
    replica = pair.replicas[(first + revocations) % 2]
    await replica.admit()
    tokens = [token for token, _ in got]
    return got + sampled(await replica.lines(PROMPT + tokens, TURN - len(got)))


def scored(model: Any, tokens: Sequence[int]) -> tuple[Any, Any]:
    """Return each token's logprob, and the margin of the best one over the next."""
    import torch

    whole = torch.tensor([[*PROMPT, *tokens]])
    with torch.no_grad():
        logits = model(whole).logits[0, len(PROMPT) - 1 : -1].float()
    found = torch.tensor(tokens)[:, None]
    best = logits.topk(2).values
    behind = best[:, 0] - logits.gather(1, found)[:, 0]
    margins = torch.where(behind > 0, -behind, best[:, 0] - best[:, 1])
    return logits.log_softmax(-1).gather(1, found)[:, 0], margins


@pytest.fixture(scope="module")
def model(pair: LeasedPair) -> Any:
    from transformers import AutoModelForCausalLM

    folder: Path = pair.rigs[0].spec.model_dir
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


@pytest.mark.parametrize("revocations", range(1, 11))
async def test_a_turn_that_moves_between_engines_goes_on_as_one_that_stays(
    pair: LeasedPair, model: Any, revocations: int
) -> None:
    expected = await stayed(pair.replicas[0])
    got = await moved(pair, revocations % 2, revocations)
    tokens = [token for token, _ in got]
    assert len(tokens) == TURN
    logprobs, margins = scored(model, tokens)
    assert margins.min() > -NEAR_TIE, "each token is the best, or as good as that"
    gaps = [abs(said - float(own)) for (_, said), own in zip(got, logprobs, strict=True)]
    assert max(gaps) <= LOGPROB_GAP
    if scored(model, expected)[1].min() > NEAR_TIE:
        assert tokens == expected


async def test_the_turn_has_no_two_tokens_as_good_as_equal(pair: LeasedPair, model: Any) -> None:
    """Otherwise the comparison above would not be one of tokens."""
    assert scored(model, await stayed(pair.replicas[0]))[1].min() > NEAR_TIE
    assert await stayed(pair.replicas[0]) == await stayed(pair.replicas[1])
