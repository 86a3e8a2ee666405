"""Options with which a guest of each engine is refused: one line, with the change to make.

The node refuses what it can read off the command line; the engine refuses all of it by itself, and
has to if another program starts it.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from contract_engines import ContractEngine
from tiny_model import save_tiny_model

from executor import ControlPage
from rose.addresses import free_port
from rose.engines import EngineKind, EngineProcess, EngineRole, EngineSpec, launch
from rose.errors import ConfigError, EngineStartError

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

START_S = 240.0
DRAFTS = {"method": "draft_model", "num_speculative_tokens": 2, "model": "MODEL"}
TRANSFER = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@dataclass(frozen=True, slots=True)
class Bad:
    """Options of each engine for the same, and what it is called; MODEL is the guest's folder."""

    meaning: str
    vllm: str
    sglang: str
    vllm_meaning: str = ""


BAD = [
    Bad(
        "speculative decoding",
        f"--speculative-config={json.dumps(DRAFTS)}",
        "--speculative-algorithm=NGRAM",
        "drafts of method 'draft_model', but of ngram, suffix, mtp, eagle",
    ),
    Bad(
        "disaggregated prefill and decode",
        f"--kv-transfer-config={json.dumps(TRANSFER)}",
        "--disaggregation-mode=decode",
    ),
    Bad(
        "custom samplers",
        "--logits-processors=vllm.v1.sample.logits_processor:MinPLogitsProcessor",
        "--enable-custom-logit-processor",
    ),
]
# Loaded before an engine is: it takes its own version from there.
OTHER_VERSION = """
import sys, types
found = types.ModuleType("{package}._version")
found.__version__, found.__version_tuple__ = "0.99.1", (0, 99, 1)
sys.modules[found.__name__] = found
"""


def guest_of(engine: ContractEngine, folder: Path, *options: str) -> EngineSpec:
    save_tiny_model(folder / "model", dtype="float32")
    ControlPage.create(folder / "page").close()
    return engine.spec(
        folder,
        "guest",
        EngineRole.GUEST,
        free_port(),
        control_page=folder / "page",
        kv_bytes=96 << 20,
        max_model_len=256,
        max_num_seqs=4,
        extra_args=options,
    )


async def said_of(spec: EngineSpec) -> str:
    """Return the error of a guest that does not start."""
    process = await EngineProcess.start(spec)
    try:
        with pytest.raises(EngineStartError, match="ended at start") as refused:
            await process.wait_healthy(START_S)
    finally:
        await process.stop()
    return str(refused.value)


@pytest.mark.promise("guest.refuses")
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.meaning)
async def test_a_feature_that_breaks_a_promise(
    contract_engine: ContractEngine, bad: Bad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_vllm = contract_engine.kind is EngineKind.VLLM
    option = bad.vllm.replace("MODEL", str(tmp_path / "model")) if on_vllm else bad.sglang
    meaning = (on_vllm and bad.vllm_meaning) or bad.meaning
    spec = guest_of(contract_engine, tmp_path, option)
    refusal = f"does not have {meaning}; leave out {option.partition('=')[0]}"
    with pytest.raises(ConfigError, match=refusal):
        await EngineProcess.start(spec)
    monkeypatch.setattr(launch, "check_options", lambda _: None)
    said = await said_of(spec)
    assert refusal in said
    assert "\n" not in said


@pytest.mark.promise("guest.refuses")
async def test_another_version(contract_engine: ContractEngine, tmp_path: Path) -> None:
    spec = guest_of(contract_engine, tmp_path)
    package = contract_engine.kind.value
    (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION.format(package=package))
    path = f"{tmp_path}:{spec.extra_env.get('PYTHONPATH', '')}".rstrip(":")
    said = await said_of(replace(spec, extra_env={**spec.extra_env, "PYTHONPATH": path}))
    assert "ROSE works with" in said
    assert "this is 0.99.1; install one of" in said
    assert "\n" not in said
