"""Engines that the contract suite runs against: how each is found, started and asked.

vLLM of this environment is there always, and `scripts/engine-matrix` puts other versions in its
place. SGLang is where `sglang_python` finds one, with ROSE_TEST_SGLANG_RANKS=2 over two
tensor-parallel ranks.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from sglang_python import MISSING, PYTHON

from rose.engines import EngineKind, EngineRole, EngineSpec, module_path

ROOT = Path(__file__).parents[3]
TOKENS_ONLY = "--skip-tokenizer-init"


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """Output of an engine for one prompt."""

    tokens: list[int]


@dataclass(frozen=True, slots=True)
class ContractEngine:
    """One engine in one version. `python`: None for this interpreter, empty where there is none."""

    name: str
    kind: EngineKind
    python: str | None
    missing: str = ""
    ranks: int = 1

    @property
    def there(self) -> bool:
        return self.python != ""

    @property
    def rank_env(self) -> dict[str, str]:
        """SGLang binds a rank to its cores and memory; here the ranks share what there is."""
        cores = range(os.cpu_count() or 1)
        bound = (str(cores[rank % len(cores)]) for rank in range(self.ranks))
        return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(bound)} if self.ranks > 1 else {}

    def spec(
        self, folder: Path, name: str, role: EngineRole, port: int, **given: Any
    ) -> EngineSpec:
        """An engine of the tiny model in `folder`, in fp32, without a tokenizer."""
        extra_env: dict[str, str] = dict(given.pop("extra_env", {}))
        if self.python is not None:
            found = module_path(folder / "metadata")
            extra_env.setdefault("PYTHONPATH", f"{ROOT / 'tests/engine/counted'}:{found}")
        args = given.pop("extra_args", ())
        if self.ranks > 1:
            args = (f"--tp-size={self.ranks}", *args)
            extra_env |= self.rank_env
        return EngineSpec(
            name=name,
            role=role,
            engine=self.kind,
            python=Path(self.python) if self.python else None,
            model_dir=folder / "model",
            port=port,
            log=folder / f"{name}.log",
            dtype="float32",
            max_num_seqs=given.pop("max_num_seqs", 32),
            extra_env=extra_env,
            extra_args=(TOKENS_ONLY, *args),
            **given,
        )

    def complete(
        self,
        spec: EngineSpec,
        prompt: list[int],
        tokens: int,
        request_id: str,
        headers: Mapping[str, str] | None = None,
    ) -> PromptOutput:
        """Ask greedily for exactly so many tokens, as the engine's own clients do."""
        path, body = self._asked(spec, prompt, tokens, request_id)
        connection = HTTPConnection("127.0.0.1", spec.port, timeout=120)
        sent = {"Content-Type": "application/json", "X-Request-Id": request_id, **(headers or {})}
        try:
            connection.request("POST", path, json.dumps(body), sent)
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        assert response.status == 200, raw
        answer = json.loads(raw)
        if self.kind is EngineKind.SGLANG:
            return PromptOutput(list(answer["output_ids"]))
        return PromptOutput(list(answer["choices"][0]["token_ids"]))

    def _asked(
        self, spec: EngineSpec, prompt: list[int], tokens: int, request_id: str
    ) -> tuple[str, dict[str, Any]]:
        if self.kind is EngineKind.SGLANG:
            sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
            return "/generate", {
                "input_ids": prompt,
                "sampling_params": sampling,
                "rid": request_id,
            }
        return "/v1/completions", {
            "model": spec.name,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "detokenize": False,
            "return_token_ids": True,
        }


VLLM = ContractEngine("vLLM 0.32", EngineKind.VLLM, None)
_RANKS = int(os.environ.get("ROSE_TEST_SGLANG_RANKS", "1"))
SGLANG = ContractEngine(
    "SGLang 0.5.23" + f", {_RANKS} ranks" * (_RANKS > 1),
    EngineKind.SGLANG,
    PYTHON,
    MISSING,
    _RANKS,
)
ENGINES = (VLLM, SGLANG)
