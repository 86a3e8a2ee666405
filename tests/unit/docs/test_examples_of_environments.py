"""Examples on real environments ask and note what they say: environments and tokenizer stand in.

The environments themselves, textarena, TextWorld, verifiers, GEM and reasoning-gym, are not
installed here; with them and a real engine the examples run in
tests/trainers/test_environment_examples.py.
"""

import importlib.util
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest

from rose.client import BlockingRolloutClient, RolloutClient
from rose.client.blocking import LoopThread
from tests.fakes.gateway import StandInGateway

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


class StandInTokenizer:
    """A letter is a token; what was sampled reads as it is told."""

    def __init__(self, says: str = "") -> None:
        self._says = says

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(letter) % 100 for letter in text]

    def decode(self, token_ids: object, **_: object) -> str:
        return self._says


def module(monkeypatch: pytest.MonkeyPatch, name: str, **names: object) -> None:
    made = ModuleType(name)
    made.__dict__.update(names)
    monkeypatch.setitem(sys.modules, name, made)


def example(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """The example as a module, without the weight of transformers."""
    module(monkeypatch, "transformers", AutoTokenizer=None, PreTrainedTokenizerBase=object)
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, loaded)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def gateway() -> Iterator[StandInGateway]:
    standin, thread = StandInGateway(version=3), LoopThread("standin-gateway")
    thread.call(standin.__aenter__())
    yield standin
    thread.call(standin.__aexit__())
    thread.stop()


@pytest.fixture
def client(gateway: StandInGateway) -> Iterator[BlockingRolloutClient]:
    with BlockingRolloutClient(gateway.url, 30.0) as client:
        yield client


class StandInGame:
    """Two players in turn; what was played is told to both."""

    def __init__(self, moves: int) -> None:
        self._left, self._told, self.player = moves, "Take the last one.", 0
        self.played: list[str] = []

    def reset(self, num_players: int, seed: int) -> None:
        assert num_players == 2

    def get_observation(self) -> tuple[int, str]:
        return self.player, self._told

    def step(self, move: str) -> tuple[bool, dict[str, object]]:
        self.played.append(move)
        self._told += f" Player {self.player} took {move}."
        self._left, self.player = self._left - 1, 1 - self.player
        return not self._left, {}

    def close(self) -> tuple[dict[int, float], dict[str, object]]:
        return {0: -1.0, 1: 1.0}, {}


def test_each_seat_of_a_game_is_a_trajectory_and_a_session(
    monkeypatch: pytest.MonkeyPatch, client: BlockingRolloutClient, gateway: StandInGateway
) -> None:
    game = StandInGame(4)
    module(monkeypatch, "textarena", make=lambda name: game)
    self_play = example(monkeypatch, "textarena_self_play")
    rows = self_play.play(client, StandInTokenizer("[0 1]"), 5, oldest=3)
    assert game.played == ["[0 1]"] * 4
    assert [(row["seat"], row["reward"], row["moves"]) for row in rows] == [(0, -1, 2), (1, 1, 2)]
    first, second = gateway.sessions[:2]
    assert gateway.sessions == [first, second, first, second]
    assert sorted(gateway.ended_sessions) == sorted([first, second])
    for row, asked in zip(rows, gateway.asked[2:], strict=True):
        assert len(row["tokens"]) == len(row["logprobs"]) == len(row["mask"])
        # The second turn's prompt is all before it, as it was sampled.
        assert row["tokens"][: len(asked["token_ids"])] == asked["token_ids"]
        assert sum(row["mask"]) == 2 * self_play.MOVE.max_tokens
        assert row["versions"] == [3]
    assert {asked["min_version"] for asked in gateway.asked} == {3}


class StandInWorld:
    """Two doors, of which the second is the way out."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.closed = False

    def _state(self) -> SimpleNamespace:
        return SimpleNamespace(
            objective="Get out.",
            feedback="A door." + " Dust." * 60,
            admissible_commands=["look", f"open door {len(self.did) + 1}"],
            score=len(self.did),
            max_score=4,
        )

    def reset(self) -> SimpleNamespace:
        return self._state()

    def step(self, command: str) -> tuple[SimpleNamespace, float, bool]:
        self.did.append(command)
        return self._state(), 1.0, len(self.did) == 2

    def close(self) -> None:
        self.closed = True


def test_a_quests_turns_are_calls_of_the_commands_that_the_game_has_now(
    monkeypatch: pytest.MonkeyPatch, client: BlockingRolloutClient, gateway: StandInGateway
) -> None:
    world = StandInWorld()
    infos = SimpleNamespace
    module(monkeypatch, "textworld", EnvInfos=infos, start=lambda game, infos: world)
    tools = example(monkeypatch, "textworld_tools")
    call = tools.calls(["look"])[0]
    row = tools.quest(client, StandInTokenizer(call), "quest.z8", 7)
    assert world.did == ["look", "look"]
    assert world.closed
    assert (row["quest"], row["reward"], row["turns"], row["done"]) == (7, 0.5, 2, True)
    offered = [asked["sampling_params"]["structured_outputs"]["choice"] for asked in gateway.asked]
    assert offered == [list(tools.calls(["look", f"open door {n}"])) for n in (1, 2)]
    assert len(set(gateway.sessions)) == 1
    assert len(row["tokens"]) == len(row["logprobs"]) == len(row["mask"])
    assert sum(row["mask"]) == sum(a["sampling_params"]["max_tokens"] for a in gateway.asked)


class StandInPart:
    """A class of verifiers: keeps what it is given, and may be subscripted."""

    def __init__(self, *given: object, **fields: object) -> None:
        self.data = given[0] if given else None
        self.__dict__.update(fields)

    def __class_getitem__(cls, item: object) -> type["StandInPart"]:
        return cls


class StandInInteraction(AsyncMock):
    """A player that guesses one number after the other."""

    async def turn(self, said: str = "") -> SimpleNamespace:
        self.heard(said)
        return SimpleNamespace(terminated=False, last_reply=f" {self.heard.call_count} is it")


class StandInNumber:
    """GEM's game: the number is 3."""

    def reset(self, seed: int) -> None:
        assert seed == 5

    def step(self, move: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        guess = int(move.removeprefix("\\boxed{").removesuffix("}"))
        return "the number is higher", float(guess == 3), guess == 3, False, {}


async def test_an_environment_of_verifiers_answers_guesses_until_the_game_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("TaskData", "Task", "Taskset", "EnvConfig", "Env", "AgentConfig")
    parts = {name: type(name, (StandInPart,), {}) for name in names}
    others = dict.fromkeys(("State", "TaskConfig", "TasksetConfig", "Agents"), object)
    module(monkeypatch, "verifiers.v1", **parts, **others)
    module(monkeypatch, "verifiers", v1=sys.modules["verifiers.v1"])
    module(monkeypatch, "gem", make=lambda name, max_turns: StandInNumber())
    numbers = example(monkeypatch, "verifiers_numbers")
    task = SimpleNamespace(data=SimpleNamespace(seed=5))
    interaction = StandInInteraction(heard=Mock(), trace=Mock())
    interaction.__aenter__.return_value = interaction
    interaction.__aexit__.return_value = None
    player = SimpleNamespace(interaction=lambda task: interaction)
    await numbers.NumbersEnv().run(task, SimpleNamespace(player=player))
    assert [said.args[0] for said in interaction.heard.call_args_list] == ["", "too low", "too low"]
    interaction.trace.record_reward.assert_called_once_with("won", 1.0, 1.0)
    settings = tomllib.loads((EXAMPLES / "verifiers_numbers.toml").read_text())
    assert (EXAMPLES / f"{settings['env']['taskset']['id']}.py").is_file()
    assert settings["client"]["type"] == "train"


async def test_a_task_is_solved_by_a_long_answer_and_judged_by_a_long_prompt(
    monkeypatch: pytest.MonkeyPatch, gateway: StandInGateway
) -> None:
    tasks = MagicMock(score_answer=Mock(return_value=0.25))
    tasks.__getitem__.side_effect = lambda number: {"question": f"{number} + 1 = ?"}
    module(monkeypatch, "reasoning_gym", create_dataset=Mock(return_value=tasks))
    two_pools = example(monkeypatch, "two_pools")
    placed = {"solve": Counter[str](), "judge": Counter[str]()}
    async with RolloutClient(gateway.url, 30.0) as client:
        with ThreadPoolExecutor(2) as pool:
            reward = await two_pools.task(client, StandInTokenizer(" 2 "), pool, 1, placed)
    assert reward == 0.25
    solve, judge = gateway.asked
    assert len(solve["token_ids"]) < 16
    assert len(judge["token_ids"]) == two_pools.TRANSCRIPT
    assert placed == {
        "solve": Counter(r=two_pools.SOLVE.max_tokens),
        "judge": Counter(r=two_pools.JUDGE.max_tokens),
    }
    # No session binds the two: each goes to the cards that suit it.
    assert gateway.sessions == ["", ""]
