"""Program: a guest and a host of each named family on SGLang, as a node starts them.

`python -m tests.engine.families.family_sglang FOLDER NAME…` writes FOLDER/NAME.sglang.json: a
family's cells of docs/models.md. The guest's KV memory is taken and given back between two turns,
then it takes an update of its weights; the host lends its idle KV memory, and answers as the guest
did.
"""

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from executor import ControlPage
from rose.addresses import free_port
from rose.engines import EngineKind, EngineProcess, EngineRole, EngineSpec, module_path
from tests.engine.families.family_updates import changed
from tests.engine.families.tiny_families import make_family
from tests.engine.policy_versions import PolicyVersions
from tests.engine.sglang_python import PYTHON
from tests.engine.standin_node import StandInNode

PROMPT = [(7 * k + 3) % 400 for k in range(60)]
KV_BYTES = 48 << 20


@asynccontextmanager
async def started(role: EngineRole, folder: Path, model: Path, **more: Any) -> Any:
    spec = EngineSpec(
        name="sglang",
        role=role,
        model_dir=model,
        port=free_port(),
        log=folder / f"{role.value}.log",
        dtype="bfloat16",
        kv_bytes=KV_BYTES,
        max_model_len=256,
        max_num_seqs=8,
        engine=EngineKind.SGLANG,
        python=Path(PYTHON),
        extra_args=("--skip-tokenizer-init",),
        **more,
    )
    process = await EngineProcess.start(spec)
    try:
        await process.wait_healthy(120)
        yield process
    except Exception as error:
        raise RuntimeError(line_of(error, spec.log)) from error
    finally:
        await process.stop()


def line_of(error: Exception, log: Path) -> str:
    """The last error that the engine's log names, else the error itself."""
    text = log.read_text(errors="replace") if log.exists() else ""
    named = re.findall(r"^(?:\w+\.)*(\w*Error: .+|\w*Exception: .+)$", text, re.MULTILINE)
    return (named[-1] if named else f"{type(error).__name__}: {error}").splitlines()[0][:200]


async def until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    for _ in range(round(seconds / 0.02)):
        if holds():
            return True
        await asyncio.sleep(0.02)
    return False


async def guest(family: str, folder: Path, model: Path) -> tuple[dict[str, str], list[int]]:
    versions = PolicyVersions(folder / "versions", model)
    page = ControlPage.create(folder / "guest-page")
    node = StandInNode(page)
    node.start()
    environment = {"PYTHONPATH": module_path(folder / "metadata")}
    more: dict[str, Any] = {"control_page": page.path, "orphan_s": 60.0, "warm_up_s": 60.0}
    more |= {"verify_key": versions.key.verify_key.hex, "weights_dir": versions.folder}
    cells: dict[str, str] = {}
    try:
        async with (
            started(EngineRole.GUEST, folder, model, extra_env=environment, **more) as engine,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http,
        ):

            async def call(path: str, body: object) -> Any:
                url = f"{engine.spec.url}/rose/v1/{path}"
                async with http.post(url, json=body, headers=engine.headers) as answer:
                    lines = [json.loads(line) async for line in answer.content if line.strip()]
                    assert answer.status == 200, lines
                    return lines

            async def turn() -> list[int]:
                sampling = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
                body = {"request_id": "turn", "token_ids": PROMPT, "sampling": sampling}
                return [
                    t for line in await call("generate", body) for t in line.get("token_ids", [])
                ]

            await call("admit", {"epoch": 1})
            tokens = await turn()
            state = page.guest.read()
            assert state is not None
            node.kv_granule_cap = max(1, state.granules_total // 4)
            gone = await until(lambda: page.guest.peek().bytes_mapped < state.bytes_mapped // 2)
            again = await turn()
            node.kv_granule_cap = 0
            same = [again, await turn()] == [tokens, tokens]
            cells["guest"] = "works" if gone and same else f"gone {gone}, same answers {same}"
            try:
                paths = versions.next(changed(versions.active, 1))
                (report,) = await call("weights/apply", paths)
                proven = report["digest_ok"] and report["probe_ok"]
                cells["weights"] = "works" if proven else f"not proven: {report}"
            except AssertionError as error:
                cells["weights"] = str(error)[:200]
            return cells, tokens
    finally:
        node.stop()
        page.close()


async def host(folder: Path, model: Path, tokens: list[int]) -> str:
    page = ControlPage.create(folder / "host-page")
    lend = {"ROSE_HOST_LEVEL": "lend", "ROSE_HOST_RESERVE": "0.2"}
    environment = {"PYTHONPATH": module_path(folder / "metadata"), **lend}
    more = {"control_page": page.path, "ttft_target_s": 0.5, "tpot_target_s": 0.15}
    try:
        async with (
            started(EngineRole.HOST, folder, model, extra_env=environment, **more) as engine,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http,
        ):
            lends = await until(lambda: (page.host.peek() or no_host()).bytes_lent > KV_BYTES // 3)
            sampling = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
            body = {"input_ids": PROMPT, "sampling_params": sampling}
            async with http.post(f"{engine.spec.url}/generate", json=body) as answer:
                same = (await answer.json())["output_ids"] == tokens
            if lends and same:
                return "works"
            return "serves, lends no KV memory" if same else "answers differ"
    finally:
        page.close()


def no_host() -> Any:
    from executor import HostState

    return HostState()


async def cells_of(family: str, folder: Path) -> dict[str, str]:
    model = make_family(family, folder / "model")
    try:
        cells, tokens = await guest(family, folder, model)
    except Exception as error:
        return {"guest": str(error)}
    try:
        return cells | {"host": await host(folder, model, tokens)}
    except Exception as error:
        return cells | {"host": str(error)}


def main(folder: Path, families: list[str]) -> None:
    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    for family in families:
        work = folder / f"sglang-{family}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True, mode=0o700)
        cells = asyncio.run(cells_of(family, work))
        found = {"family": family, "engine": "SGLang", **cells}
        (folder / f"{family}.sglang.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
