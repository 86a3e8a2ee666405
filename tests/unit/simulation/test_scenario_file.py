"""Scenario files say where they are wrong, and commands of `rose sim` print what was run."""

import json
import shlex
from pathlib import Path

import pytest

from rose.cli.main import main, parser_of
from rose.command_line.examples import EXAMPLES
from rose.errors import ConfigError
from rose.simulation import Algorithm, commands, tables
from rose.simulation.commands import COMMANDS
from rose.simulation.policies import CONSTANTS, usual_value
from rose.simulation.scenario_file import read_scenario
from rose.simulation.setups import setup_scenario
from slo import StepProfile

WHOLE = """\
name: mine
until_s: 30
cluster:
  training_cards: 2
  dedicated:
    replicas: 1
    engine: {model: 8b, card: h100, max_sequences: 32}
  serving:
    hosts: 2
    engine: {model: 8b, card: h100, kv_tokens: 200000}
    slo: {preset: rose-7b}
    guest: {engine: {model: 8b, card: h100}, kv_base_tokens: 20000, slack_share: 0.25}
  links: {slow_bytes_s: 1.0e+9}
trainer:
  groups: 1
  samples: 2
  train_s_per_token: 0.00001
  weight_bytes: 1000000000
  algorithm: dapo
  steps: 1
rollouts: {environment: alfworld}
traffic: {azure: conversation, requests_per_s: 2}
options: {slack_share: 0.4}
"""


def test_a_file_says_everything_or_changes_a_set_up(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(WHOLE)
    scenario = read_scenario(file)
    serving = scenario.cluster.serving
    assert serving is not None
    assert (serving.hosts, serving.engine.kv_tokens, serving.slo.ttft_s) == (2, 200_000, 0.5)
    assert serving.guest is not None
    assert serving.guest.slack_share == 0.25
    assert scenario.trainer.algorithm is Algorithm.DAPO
    assert scenario.options == {"slack_share": 0.4}
    file.write_text("setup: frozen_lake-8b\ntrainer: {steps: 7}\n")
    changed = read_scenario(file)
    usual = setup_scenario("frozen_lake-8b")
    assert changed.trainer.steps == 7
    assert changed.cluster == usual.cluster


def test_a_profile_of_ones_own_gives_the_step_times(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(StepProfile(0.01, 1e-5).to_json())
    engine = (
        "{profile: p.json, model: x, cards: 1, kv_tokens: 9999, kv_bytes_per_token: 10,"
        " weight_bytes: 10}"
    )
    file = tmp_path / "scenario.yaml"
    file.write_text(WHOLE.replace("{model: 8b, card: h100, max_sequences: 32}", engine))
    assert read_scenario(file).cluster.dedicated.engine.profile.base_s == 0.01


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            ("replicas: 1", "replicaz: 1"),
            ":6: cluster.dedicated.replicaz: unknown key; did you mean",
        ),
        (("    replicas: 1\n", ""), ":6: cluster.dedicated.replicas: it is missing"),
        (("trainer:", "trainers:"), ":15: trainers: unknown key; did you mean 'trainer'?"),
        (("rollouts: {environment: alfworld}", ""), ":1: rollouts: it is missing; give it, or a"),
        (
            ("hosts: 2", "hosts: two"),
            ":9: cluster.serving.hosts: 'two'; it should be a valid integer",
        ),
        (("hosts: 2", "hosts:"), ":9: cluster.serving.hosts: it has no value"),
        (("until_s: 30", "until_s: .nan"), ":2: until_s: nan; it should be a finite number"),
        (("samples: 2", "samples: -2"), ":16: trainer.samples: -2; it should be greater than or"),
        (("dapo", "dpo"), ":19: trainer.algorithm: 'dpo'; it should be 'grpo' or 'dapo'"),
        (
            ("model: 8b, card: h100, max", "model: 9b, max"),
            ":7: cluster.dedicated.engine.model: model",
        ),
        (
            ("{model: 8b, card: h100, max_s", "{profile: no.json, max_s"),
            ":7: cluster.dedicated.engine.p",
        ),
        (
            ("alfworld", "alfwrld"),
            ":21: rollouts.environment: 'alfwrld'; it should be 'frozen_lake'",
        ),
        (("{environment: alfworld}", "{}"), ":21: rollouts: give either environment or sessions"),
        (("card: h100}, kv", "cards: 2}, kv"), ":9: cluster.serving: guest.engine.cards is 2; its"),
        (
            ("slack_share: 0.4", "slackshare: 0.4"),
            ":23: options.slackshare: there is no option 'sl",
        ),
        (("{preset: rose-7b}", "{ttft: 1}"), ":11: cluster.serving.slo.ttft: unknown key; did you"),
        (("rose-7b", "rose-8b"), ":11: cluster.serving.slo.preset: there is no 'rose-8b'; did"),
        (("{preset: rose-7b}", "{ttft_s: -1, tpot_s: 1}"), ":11: cluster.serving.slo: ttft_s of"),
        (("name: mine", "name: mine\nname: x"), ":2: the file: it cannot be read: the key name is"),
        (("name: mine", "[mine]: 1"), ":1: the file: a key is no text"),
        (
            ("name: mine", "setup: frozen_lake"),
            ":1: setup: there is no 'frozen_lake'; did you mean",
        ),
        (("cluster:", "cluster: ["), ":5: the file: it cannot be read: expected"),
        (
            ("azure: conversation", "trace: none.csv"),
            ":22: traffic: give azure with requests_per_s",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line_and_key(
    tmp_path: Path, wrong: tuple[str, str], said: str
) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(WHOLE.replace(*wrong, 1))
    with pytest.raises(ConfigError) as error:
        read_scenario(file)
    assert said in str(error.value)
    assert str(error.value).startswith(str(file))


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    for name in ("empty.yaml", "none.yaml"):
        with pytest.raises(ConfigError, match=name):
            read_scenario(tmp_path / name)


def test_a_run_prints_its_table_and_saves_its_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "scenario.yaml", tmp_path / "out.json"
    file.write_text(WHOLE)
    words = ["sim", "run", str(file), "--until-s", "1", "--out", str(out), "--policy", "fixed"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "mine, seed 0" in said.out
    assert "1 steps were not done after 1 s" in said.err
    (saved,) = json.loads(out.read_text())
    assert (saved["policy"], saved["duration_s"]) == ("fixed", 1.0)
    assert main([*words[:2], *words[2:5], "--policy", "fixed", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [saved]


def test_several_runs_are_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(WHOLE)
    common = [str(file), "--until-s", "0.5", "--workers", "1"]
    assert main(["sim", "compare", *common, "--policies", "fixed,rose", "--seeds", "2"]) == 0
    assert "rose (seed 1)" in capsys.readouterr().out
    assert main(["sim", "sweep", *common, "--vary", "slack_share=0,1", "--vary", "hedges=0"]) == 0
    assert "slack_share=1 hedges=0" in capsys.readouterr().out


def test_a_sweep_around_says_which_constants_matter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(WHOLE)
    few = {name: CONSTANTS[name] for name in ("sticky_margin", "linger_s")}
    for module in (commands, tables):
        monkeypatch.setattr(module, "CONSTANTS", few)
    words = ["sweep", str(file), "--until-s", "0.5", "--workers", "1", "--around", "0.2"]
    assert main(["sim", *words, "-o", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1 + 2 * len(few)
    assert main(["sim", *words]) == 0
    said = capsys.readouterr().out
    assert "as it is" in said
    assert "linger_s=20" in said
    assert "linger_s=30" in said
    assert "MATTERS" in said
    assert usual_value("linger_s") == 25


def test_a_scaled_set_up_leaves_each_card_its_work() -> None:
    def sizes(scale: float) -> tuple[int, ...]:
        scenario = setup_scenario("alfworld-32b", scale=scale)
        cluster = scenario.cluster
        assert cluster.serving is not None
        cards = cluster.dedicated.replicas, cluster.training_cards, cluster.serving.hosts
        return (scenario.trainer.batch, *cards)

    assert sizes(1.0) == tuple(4 * each for each in sizes(0.25))
    assert sizes(1.0)[0] == 1_024


def test_wrong_words_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["run", "nothing"], "nothing is no file and no set-up"),
        (["run", "frozen_lake-8b", "--policy", "libre"], "did you mean 'libra'?"),
        (["run", "frozen_lake-8b", "--set", "linger=1"], "did you mean 'linger_s'?"),
        (["run", "frozen_lake-8b", "--set", "linger_s=nan"], "nan is no finite number"),
        (["sweep", "frozen_lake-8b", "--vary", "linger_s"], "write NAME=A,B,C"),
        (["compare", "frozen_lake-8b", "--seeds", "0"], "--seeds is 0"),
        (["paper", "--setups", "frozen"], "there is no set-up 'frozen'"),
        (["paper", "--scale", "0.3"], "rollout_cards would be 2.4"),
        (["run", "frozen_lake-8b", "--scale", "0"], "--scale is 0.0; give a share above 0"),
        (["sweep", "frozen_lake-8b"], "give either --vary NAME=A,B,C or --around SHARE"),
        (["sweep", "frozen_lake-8b", "--around", "1"], "--around is 1.0; give a share above 0"),
        (["rum"], "did you mean 'run'?"),
    ):
        assert main(["sim", *words]) == 2, words
        said_err = capsys.readouterr().err
        assert said in said_err
        assert said_err.count("\n") == 1


def test_every_command_has_an_example_that_its_parser_takes() -> None:
    parser = parser_of("sim")
    for name in COMMANDS:
        for line in EXAMPLES[f"sim {name}"]:
            assert parser.parse_args(shlex.split(line)[2:]).command == name


def test_the_scenario_of_the_manual_can_be_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "simulator.md"
    file = tmp_path / "scenario.yaml"
    file.write_text(page.read_text().split("```yaml\n")[1].split("```")[0])
    scenario = read_scenario(file)
    assert scenario.trainer.max_staleness == 1
    assert scenario.cluster.serving is not None
    assert scenario.cluster.serving.slo.ttft_s == 1.0
