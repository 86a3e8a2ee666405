"""The models of the demo: made whole or not at all, and read back as they were written."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from bench.demo.frozen_lake import vocab
from bench.demo.frozen_lake.models import new_policy, save_model
from bench.demo.training.forward import values_of
from weight_transfer import read_model_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    save_model(new_policy(0), path, vocab.WORDS, vocab.STOP)
    return path


def test_the_trainer_starts_from_the_bits_that_engines_load(folder: Path) -> None:
    ours = values_of(read_model_dir(folder))
    theirs = dict(Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
