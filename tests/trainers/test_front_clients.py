"""Client files of prime-rl, slime and AReaL, unchanged, drive `rose front` on a real replica."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.trainers.stack import rose_process
from rose.addresses import free_port
from tests.harness.waiting import until
from tests.trainers.stack import ROOT, TrainerStack, save_policy

pytestmark = [pytest.mark.engine, pytest.mark.trainers, pytest.mark.timeout(600)]

DRIVE_S, LISTEN_S = 240.0, 60.0


@pytest.fixture(scope="module")
def clients() -> Path:
    folder = Path(os.environ.get("ROSE_TRAINER_CLIENTS") or ROOT / ".trainer-clients")
    if not (folder / "libraries").is_dir():
        pytest.skip(f"the clients' files are not in {folder}: scripts/trainer-clients")
    return folder


@pytest.fixture(scope="module")
def stack(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerStack]:
    folder = tmp_path_factory.mktemp("front")
    with TrainerStack(folder, save_policy(folder / "model")) as stack:
        stack.wait_ready()
        yield stack


class Front:
    """`rose front` of a fleet's job, in all its lives."""

    def __init__(self, stack: TrainerStack) -> None:
        self.saved = stack.folder / "saved"
        self.saved.mkdir()
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        settings = stack.settings()
        self.log = stack.folder / "front.log"
        self.member = rose_process(
            "front",
            (
                "front",
                f"--port={self._port}",
                f"--weights-root={self.saved}",
                f"--job={settings.job}",
                f"--scheduler={settings.scheduler}",
                f"--gateway={settings.gateway}",
                f"--checkpoint={settings.checkpoint}",
                f"--root={settings.root}",
                f"--signing-key={settings.key}",
            ),
            self.log,
        )

    def start(self) -> None:
        before = self.said("listening")
        self.member.start()

        def listens() -> bool:
            assert self.member.running, self.log.read_text()
            return self.said("listening") > before

        until(listens, LISTEN_S, "a front that listens")

    def said(self, word: str) -> int:
        return self.log.read_text().count(word) if self.log.exists() else 0


def drive(stack: TrainerStack, front: Front, clients: Path, seed: int, *whats: str) -> list[Any]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.trainers.drive_front",
            str(clients),
            front.url,
            stack.gateway,
            str(stack.model),
            str(front.saved),
            str(seed),
            *whats,
        ],
        cwd=ROOT,
        env={**stack.environ(), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=DRIVE_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr[-3_000:]}\n{front.log.read_text()[-2_000:]}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_greedy_tokens_are_the_trainers_after_each_update(
    stack: TrainerStack, clients: Path
) -> None:
    front = Front(stack)
    front.start()
    try:
        whats = ["slime-delta", "slime-delta", "prime", "slime", "areal", "areal-vllm", "prime"]
        first = drive(stack, front, clients, 0, *whats)
        # Kill it between two updates; the next life continues at its version.
        front.member.kill()
        front.start()
        assert "at version 7" in front.log.read_text().splitlines()[-1]
        second = drive(stack, front, clients, 100, *whats[2:], "abort")
    finally:
        front.member.end()
    # No front any more: others go on where it was.
    third = drive(stack, front, clients, 200, "vllm", "watch")
    updates = [*first, *second[:-1]]
    for each in [*updates, *third]:
        sys.stdout.write(json.dumps(each) + "\n")
    assert [each["what"] for each in updates] == [*whats, *whats[2:]]
    for each in [*updates, *third]:
        assert each["served"] == each["own"], each
    assert len({tuple(each["own"]) for each in updates}) > 5
    assert second[-1]["ends"] == ["abort"] * 4
