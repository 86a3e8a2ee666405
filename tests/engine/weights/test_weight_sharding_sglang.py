"""SGLang's loaders at TP 1 and 2: each rank's map is proved, and an update lands as a load does."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import save_tiny_model

from rose.addresses import free_port
from weight_transfer.apply.probe import Part, judge
from weight_transfer.apply.receiver import Receiver
from weight_transfer.chunk_store import ChunkStore
from weight_transfer.format.checkpoint import read_model_dir
from weight_transfer.format.signing import SigningKey
from weight_transfer.publish.version_publisher import VersionPublisher

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "contract"))
from contract_engines import ROOT, SGLANG  # noqa: E402 -- the contract's, which is no package

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SGLANG.there, reason=SGLANG.missing),
]


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_is_mapped_and_updated_in_place(tmp_path: Path, size: int) -> None:
    save_tiny_model(tmp_path / "model", dtype="float32")
    base = read_model_dir(tmp_path / "model")
    new = {}
    for name, tensor in base.items():
        bits = tensor.bits.copy()
        bits[:: 7 + len(name) % 5] ^= np.uint32(1 << 12)
        new[name] = replace(tensor, bits=bits)
    store = ChunkStore(tmp_path / "store")
    key = SigningKey.generate()
    VersionPublisher(store, job="test", trainer="test", key=key).publish(1, 0, base, new)
    port = free_port()
    ranks = [
        subprocess.Popen(
            [
                str(SGLANG.python),
                str(HERE / "sglang_rank_main.py"),
                *map(str, (tmp_path / "model", rank, size, port)),
                *map(str, (store.manifest_path(1), store.chunks_dir)),
            ],
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": str(ROOT), "VLLM_TARGET_DEVICE": "cpu", "PATH": "/usr/bin:/bin"},
            text=True,
        )
        for rank in range(size)
    ]
    said: list[dict[str, Any]] = []
    for rank in ranks:
        out, _ = rank.communicate(timeout=500)
        assert rank.returncode == 0
        said.append(json.loads(out.strip().rpartition("\n")[2]))
    for answer in said:
        assert answer["same"], "what was written is what a fresh load holds"
        assert (answer["wrong"], answer["transformed"], answer["loose"]) == ([], {}, [])
    parts = [Part(n, tuple(key), e, t) for answer in said for n, key, e, t in answer["parts"]]
    elements = {name: tensor.bits.size for name, tensor in base.items()}
    findings = judge(parts, Receiver(new).digests, elements)
    assert (findings.flipped, findings.unjudged) == ((), ())
