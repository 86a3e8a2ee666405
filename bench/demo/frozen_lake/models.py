"""`python -m bench.demo.frozen_lake.models --cache DIR`: make the demo's models, once.

stdout  {"event":"progress","label","share"} …  {"event":"models","policy_dir","host_dir"}

The policy is a Qwen2 small enough to learn on one core, in a folder that any engine serves.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from bench.demo.frozen_lake import vocab

MAX_POSITIONS = 1024
HOST_VOCABULARY = 320
REPORT_EVERY = 0.02
MAX_THREADS = 2
WARM_START_FILE = "warm_start.json"


def policy_config() -> Qwen2Config:
    """Return the configuration of a policy of 0.66 M parameters."""
    return Qwen2Config(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=384,
        vocab_size=vocab.VOCABULARY_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=vocab.PAD_ID,
    )


def host_config() -> Qwen2Config:
    """Return a host of 10 M parameters: a decode step of some five milliseconds on one core.

    Small, so that a run of minutes holds enough requests to judge their tail.
    """
    return Qwen2Config(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        intermediate_size=1_056,
        vocab_size=HOST_VOCABULARY,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def new_policy(seed: int) -> Qwen2ForCausalLM:
    """Return a fresh policy in fp32."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(policy_config())


def save_model(
    model: Qwen2ForCausalLM, folder: Path, words: tuple[str, ...], end: str = ""
) -> None:
    """Write bf16 weights, config and tokenizer; `end` is the word that ends a text."""
    model.to(torch.bfloat16).save_pretrained(folder)
    _tokenizer(words, model.config.vocab_size, end or words[0]).save_pretrained(folder)


def _tokenizer(words: tuple[str, ...], size: int, end: str) -> PreTrainedTokenizerFast:
    table = {word: index for index, word in enumerate(words)}
    table |= {f"<{index}>": index for index in range(len(words), size)}
    tokenizer = Tokenizer(WordLevel(table, unk_token=words[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    # Named, or engines that take it for Qwen2's add words of that, outside the model's vocabulary.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=words[0], unk_token=words[0], eos_token=end
    )


@dataclass(frozen=True, slots=True)
class Models:
    """Folders in Hugging Face's layout: the policy's version 0, and the host's model."""

    policy_dir: Path
    host_dir: Path


def ensure_models(cache: Path, long_turns: bool, progress: Callable[[str, float], None]) -> Models:
    """Return the cached models, made first where missing or of another recipe."""
    key = _recipe_hash()
    policy = cache / f"policy-{'long-' if long_turns else ''}{key}"
    host = cache / f"host-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    if not host.is_dir():
        _make(host, lambda folder: _save_host(folder))
    if not policy.is_dir():
        _make(policy, lambda folder: _save_policy(folder, long_turns, progress))
    return Models(policy, host)


def _save_host(folder: Path) -> None:
    # Torch is slow to import: only when something is really made.
    import torch
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    words = tuple(f"<{index}>" for index in range(HOST_VOCABULARY))
    save_model(Qwen2ForCausalLM(host_config()), folder, words)


def _save_policy(folder: Path, long_turns: bool, progress: Callable[[str, float], None]) -> None:
    import torch

    from bench.demo.frozen_lake import vocab
    from bench.demo.training.warm_start import LEAST_SUCCESS, MOST_SUCCESS, warm_start

    torch.set_num_threads(min(MAX_THREADS, torch.get_num_threads()))
    model, reached = warm_start(
        long_turns, lambda share: progress("warm start of the policy", share)
    )
    save_model(model, folder, vocab.WORDS, vocab.STOP)
    (folder / WARM_START_FILE).write_text(json.dumps(asdict(reached)) + "\n")
    if not reached.leaves_room:
        sys.stderr.write(
            f"models: the warm start crosses {reached.success:.2f} of the validation lakes after"
            f" {reached.steps} steps, not {LEAST_SUCCESS} to {MOST_SUCCESS}:"
            " the demo may not see it learn\n"
        )


def _make(target: Path, write: Callable[[Path], None]) -> None:
    """Write into a folder beside `target` and rename it: a half-made model is never found."""
    draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=".making-"))
    try:
        write(draft)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _recipe_hash() -> str:
    """Return a digest of all files that the models are made by."""
    demo = Path(__file__).parents[1]
    sources = (
        *("frozen_lake/vocab", "frozen_lake/task", "frozen_lake/data", "frozen_lake/models"),
        *("training/forward", "training/warm_start", "training/rollouts"),
    )
    content = b"".join((demo / f"{name}.py").read_bytes() for name in sources)
    return hashlib.sha256(content).hexdigest()[:12]


def main(argv: Sequence[str] | None = None) -> int:
    """Make the models that the arguments name."""
    parser = argparse.ArgumentParser(prog="bench.demo.frozen_lake.models", description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--long-turns", action="store_true")
    args = parser.parse_args(argv)
    reported = 0.0

    def progress(label: str, share: float) -> None:
        nonlocal reported
        if share - reported >= REPORT_EVERY or share >= 1.0:
            reported = share
            _say({"event": "progress", "label": label, "share": share})

    models = ensure_models(args.cache, args.long_turns, progress)
    _say(
        {"event": "models", "policy_dir": str(models.policy_dir), "host_dir": str(models.host_dir)}
    )
    return 0


def _say(event: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
