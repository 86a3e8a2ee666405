"""A trainer's settings and its version are checked before it starts, wherever they come from."""

import importlib.metadata
import pickle
from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.integrations import TrainerSettings, tested
from rose.integrations.tested import check_tested
from tests.harness.policies import trainer_environment
from weight_transfer import SigningKey


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return trainer_environment(tmp_path)


def test_the_environment_says_all_of_it(environ: dict[str, str], tmp_path: Path) -> None:
    more = {"ROSE_REPLICAS": "2", "ROSE_TIMEOUT_S": "1.5", "ROSE_TAKE_OVER": "yes"}
    settings = TrainerSettings.from_env(environ | more)
    assert (settings.job, settings.checkpoint, settings.replicas) == ("grpo", tmp_path, 2)
    assert (settings.timeout_s, settings.take_over, settings.port) == (1.5, True, 0)
    assert pickle.loads(pickle.dumps(settings)) == settings
    given = TrainerSettings.from_env(environ, job="other", checkpoint=str(tmp_path))
    assert (given.job, given.checkpoint) == ("other", tmp_path), "text and what is given first"


@pytest.mark.parametrize("name", ["JOB", "SCHEDULER", "GATEWAY", "CHECKPOINT", "ROOT", "KEY"])
def test_what_is_missing_is_said_with_its_variable(environ: dict[str, str], name: str) -> None:
    del environ[f"ROSE_{name}"]
    with pytest.raises(ConfigError, match=f"set ROSE_{name}"):
        TrainerSettings.from_env(environ)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("SCHEDULER", "7400", "no address"),
        ("GATEWAY", "127.0.0.1:8000", "no address"),
        ("CHECKPOINT", "nowhere", "no such folder"),
        ("REPLICAS", "two", "ROSE_REPLICAS='two' cannot be read"),
        ("REPLICAS", "-1", "0 or more"),
        ("TIMEOUT_S", "nan", "is none"),
        ("TIMEOUT_S", "0", "is none"),
        ("TAKE_OVER", "maybe", "cannot be read"),
        ("BUCKET", "policies", "no bucket"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    environ: dict[str, str], name: str, value: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        TrainerSettings.from_env(environ | {f"ROSE_{name}": value})
    assert "\n" not in str(refused.value)


def test_a_key_that_is_not_there_is_said_with_how_to_make_one(environ: dict[str, str]) -> None:
    settings = TrainerSettings.from_env(environ)
    with pytest.raises(ConfigError, match="rose token key"):
        settings.signing_key()
    key = SigningKey.generate()
    key.save(settings.key)
    assert settings.signing_key().verify_key.hex == key.verify_key.hex


def test_gateways_may_ask_for_a_token_where_the_scheduler_asks_for_nothing(
    environ: dict[str, str], tmp_path: Path
) -> None:
    more = {"ROSE_TOKEN_FILE": str(tmp_path / "token"), "ROSE_CA": str(tmp_path / "ca.pem")}
    settings = TrainerSettings.from_env(environ | more)
    assert settings.certificates() is None
    assert settings.credentials().token_file == tmp_path / "token"
    client = settings.client()
    assert (client.settings.job, client.settings.credentials) == ("grpo", settings.credentials())


# ---- versions of trainers ----


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "version", {"trl": "1.17.0"}.__getitem__)
    monkeypatch.delenv("ROSE_UNTESTED", raising=False)


def test_an_untried_version_is_refused_unless_it_is_let_in_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check_tested("trl", ("1.16.0", "1.17.0")) == "1.17.0"
    said = r"trl 1\.17\.0 .* 1\.16\.0 was; .*ROSE_UNTESTED=trl"
    for untested in ("", "verl"):
        monkeypatch.setenv("ROSE_UNTESTED", untested)
        with pytest.raises(ConfigError, match=said) as refused:
            check_tested("trl", ("1.16.0",))
        assert "\n" not in str(refused.value)
    monkeypatch.setenv("ROSE_UNTESTED", "verl, trl")
    assert check_tested("trl", ("1.16.0",)) == "1.17.0"


def test_one_that_is_not_there_is_said_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "version", importlib.metadata.version)
    with pytest.raises(ConfigError, match=r"rose-rollout\[no-such-trainer\]"):
        check_tested("no-such-trainer", ())
