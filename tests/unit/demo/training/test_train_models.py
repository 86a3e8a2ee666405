"""The models of the demo: made whole or not at all, and read back as they were written."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bench.demo.frozen_lake import models, vocab
from bench.demo.frozen_lake.data import demonstrate
from bench.demo.frozen_lake.models import load_policy, new_policy, save_model
from bench.demo.frozen_lake.task import LONG_REPLY_TOKENS, REPLY_TOKENS, random_lake
from bench.demo.training.forward import load_version_zero, values_of

LONG_REPLY_AT_LEAST = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    save_model(new_policy(0), path, vocab.WORDS, vocab.STOP)
    return path


def test_engines_add_no_word_outside_the_vocabulary(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == vocab.VOCABULARY_SIZE
    assert tokenizer.eos_token_id == vocab.STOP_ID


def test_the_saved_tokenizer_speaks_the_vocabulary(folder: Path) -> None:
    # AutoTokenizer, and so an engine, puts Qwen2's own class in its place whatever the folder says:
    # turns carry tokens, never text.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    spoken = [token for token in range(len(vocab.WORDS)) if token != vocab.PAD_ID]
    assert tokenizer.encode(vocab.words(spoken)) == spoken


def test_the_trainer_starts_from_the_bits_that_engines_load(folder: Path) -> None:
    ours = values_of(load_version_zero(folder))
    theirs = dict(load_policy(folder).named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_model_that_could_not_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    def write(draft: Path) -> None:
        (draft / "half").write_text("made")
        raise OSError("stand-in: the disk is full")

    with pytest.raises(OSError, match="full"):
        models._make(tmp_path / "policy", write)
    assert list(tmp_path.iterdir()) == []


def test_models_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(models, "_save_host", made.append)
    monkeypatch.setattr(models, "_save_policy", lambda folder, long, progress: made.append(folder))
    first = models.ensure_models(tmp_path, False, lambda label, share: None)
    assert models.ensure_models(tmp_path, False, lambda label, share: None) == first
    assert len(made) == 2
    assert first.policy_dir != models.ensure_models(tmp_path, True, lambda *_: None).policy_dir


@pytest.mark.parametrize(
    ("long_turns", "least", "most"),
    [(False, 4, REPLY_TOKENS), (True, LONG_REPLY_AT_LEAST, LONG_REPLY_TOKENS)],
)
def test_demonstrated_replies_fit_the_turn(long_turns: bool, least: int, most: int) -> None:
    rng = random.Random(0)
    for seed in range(20):
        shown = demonstrate(random_lake(seed), rng, long_turns)
        length = 0
        for token, mine in zip(shown.tokens, shown.learned, strict=True):
            length += mine
            if mine and token == vocab.STOP_ID:
                assert least <= length <= most
                length = 0
