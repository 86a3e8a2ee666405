"""The benchmark end to end on real engines, a few short blocks of it."""

import json
from pathlib import Path

import pytest
from sglang_python import MISSING, PYTHON

from bench.coserve.__main__ import main
from bench.coserve.plan import ARMS, quick_settings
from bench.coserve.rows import arm_of
from bench.coserve.run import run_bench
from rose.engines import EngineKind
from tests.harness.processes import first_of

# The rehearsal of the GPU benchmark drives the same player and the same analysis in every run.
pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(420)]


VLLM, SGLANG = EngineKind.VLLM, EngineKind.SGLANG
WITH_SGLANG = pytest.mark.skipif(not PYTHON, reason=MISSING)


@pytest.mark.parametrize(
    ("host", "guest"),
    [
        pytest.param(VLLM, VLLM, id="vllm-vllm"),
        pytest.param(SGLANG, VLLM, id="sglang-vllm", marks=WITH_SGLANG),
        pytest.param(VLLM, SGLANG, id="vllm-sglang", marks=WITH_SGLANG),
        pytest.param(SGLANG, SGLANG, id="sglang-sglang", marks=WITH_SGLANG),
    ],
)
def test_a_short_run_measures_every_arm_and_every_figure_can_be_recomputed(
    tmp_path: Path, host: EngineKind, guest: EngineKind
) -> None:
    settings = quick_settings(
        tmp_path,
        busy_targets=(0.6,),
        only_traffic="poisson",
        block_s=4.0,
        idle_block_s=3.0,
        calibration_s=2.5,
        calibration_tries=2,
        event_rounds=0,
        ttft_target_s=0.5,
        tpot_target_s=0.15,
        port_base=first_of(3),
        host=host,
        guest=guest,
        **({"sglang_python": Path(PYTHON)} if PYTHON else {}),
    )
    run_bench(settings)
    main(["report", str(tmp_path)])
    result = json.loads((tmp_path / "coserve.json").read_text())
    rows = {arm_of(row): row for row in result["rows"]}
    assert rows.keys() == set(ARMS)
    for arm, row in rows.items():
        assert row["host"]["requests"] > 10
        assert row["host"]["failed"] == row["token_mismatches"] == row["host_preemptions"] == 0
        assert 0.2 < row["busy"] < 0.95
        if arm.guest != "none":
            assert row["guest_tok_s"] > 0
            assert row["guest_alone_tok_s"] > 0
        if arm.guest == "rose":
            assert row["guest_step_cpu_p99_s"] > 0
    assert result["run"]["capacity_rps"] > 0
    assert main(["verify", str(tmp_path)]) == 0
