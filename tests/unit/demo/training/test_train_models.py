"""The models of the demo: made whole or not at all, and read back as they were written."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from bench.demo.frozen_lake import vocab
from bench.demo.frozen_lake.models import load_policy, new_policy, save_model
from bench.demo.training.forward import values_of
from weight_transfer import read_model_dir

LONG_REPLY_AT_LEAST = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    save_model(new_policy(0), path, vocab.WORDS, vocab.STOP)
    return path


def test_the_saved_tokenizer_speaks_the_vocabulary(folder: Path) -> None:
    # AutoTokenizer, and so an engine, puts Qwen2's own class in its place whatever the folder says:
    # turns carry tokens, never text.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    spoken = [token for token in range(len(vocab.WORDS)) if token != vocab.PAD_ID]
    assert tokenizer.encode(vocab.words(spoken)) == spoken


def test_the_trainer_starts_from_the_bits_that_engines_load(folder: Path) -> None:
    ours = values_of(read_model_dir(folder))
    theirs = dict(load_policy(folder).named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
