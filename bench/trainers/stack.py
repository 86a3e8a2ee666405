"""Fleet for one trainer, on this machine: scheduler, gateway, a node with dedicated replicas.

    with TrainerStack(folder, model, replicas=2) as stack:
        stack.wait_ready()
        subprocess.run([python, "train.py"], env=stack.environ())

Each is a process of its own, started by the product's own command; any may be killed and started
again, under the same name and port. `python -m bench.trainers.stack MODEL` runs one until it
is interrupted, and prints the environment that a trainer needs.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil

from bench.common.processes import ROOT, STOP_S, BenchProcess, ProcessFleet, python
from bench.trainers.policy import save_policy
from rose.addresses import free_ports
from rose.contract.gateway import VERSIONS, Versions
from rose.errors import ConfigError, EngineStartError
from rose.integrations import TrainerSettings
from rose.integrations.settings import PREFIX
from weight_transfer import SigningKey

NODE, JOB = "train-0", "grpo"
# An engine starts in 40 s on a quiet machine.
START_S = 300.0
# Time of one training, from its program's start to its end.
RUN_S = 900.0
CORE_NAME = "VLLM::EngineCore"
# Settings of children on a small machine: one thread each, and no hub.
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def rose_process(name: str, argv: Sequence[str], log: Path) -> BenchProcess:
    """Return a process of the `rose` command, not yet started."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return BenchProcess(name, python("rose.cli", *argv), log, env={**QUIET, "PYTHONPATH": path})


def trainer_python(trainer: str) -> Path:
    """Return the interpreter of a trainer's environment. Raises ConfigError without one."""
    python = ROOT / f".venv-{trainer}" / "bin" / "python"
    if not python.exists():
        raise ConfigError(f"there is no {python}; make it: scripts/trainer-env {trainer}")
    return python


def save_trl_policy(folder: Path, python: Path) -> Path:
    """Save a policy whose chat template is one that TRL knows."""
    (template,) = python.parents[1].glob("lib/*/site-packages/trl/chat_templates/qwen2_5.jinja")
    return save_policy(folder, template.read_text(encoding="utf-8"))


def train_trl(
    python: Path, folder: Path, environ: Mapping[str, str], mode: str, **options: object
) -> list[dict[str, Any]]:
    """Return the figures of each step of a `trl_run` in a new folder, without GPUs.

    Its output goes to `log` there. Raises EngineStartError when it fails or takes over RUN_S.
    """
    folder.mkdir()
    argv = [str(python), "-m", "bench.trainers.trl_run", mode, f"--folder={folder / 'saved'}"]
    argv += [f"--{name}={value}" for name, value in options.items()]
    path = folder / "log"
    with path.open("wb") as log:
        try:
            done = subprocess.run(  # noqa: S603 - a program of our own
                [*argv, f"--out={folder / 'out'}"],
                cwd=folder,
                env={**environ, **QUIET, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
                stdout=log,
                stderr=log,
                timeout=RUN_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise EngineStartError(str(error)) from error
    if done.returncode:
        output = path.read_text(errors="replace")[-2_000:]
        raise EngineStartError(f"{folder.name} ended with {done.returncode}: {output}")
    rows = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    return [row for row in rows if "step" in row]


class TrainerStack(ProcessFleet):
    """Members by name: scheduler, gateway, train-0 (the node). Context manager.

    folder: place of all its files. model: checkpoint that replicas start with, version 0. gateway,
    scheduler, replica: further options of each.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        replicas: int = 1,
        job: str = JOB,
        max_model_len: int = 512,
        gateway: Sequence[str] = (),
        scheduler: Sequence[str] = (),
        replica: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(folder.absolute())
        self.model, self.job = model.absolute(), job
        # Folder from which its node reads versions that a trainer writes there.
        self.buckets = f"file://{self.folder}/buckets"
        self.folder.mkdir(parents=True, exist_ok=True)
        scheduler_port, gateway_port, *self.engine_ports = free_ports(2 + replicas)
        self.scheduler = f"127.0.0.1:{scheduler_port}"
        self.gateway = f"http://127.0.0.1:{gateway_port}"
        self.key = self.folder / "trainer.key"
        key = SigningKey.generate()
        key.save(self.key)
        each = {"max_model_len": max_model_len, **(replica or {})}
        config = self._node(key.verify_key.hex, each)
        (self.folder / "node.json").write_text(json.dumps(config, indent=1))
        self._add(
            "scheduler",
            f"--port={scheduler_port}",
            f"--store={self.folder / 'store.sqlite'}",
            "--harvest=HOLD",
            # Trainers wait for replicas before they register anything.
            f"--job={job}",
            *scheduler,
        )
        self._gateway_options = (
            f"--scheduler={self.scheduler}",
            f"--tokenizer={self.model}",
            # Trainers ask for a model by the name that they load it by.
            f"--model-name={self.model}",
            f"--max-model-len={max_model_len}",
            *gateway,
        )
        self._add("gateway", f"--port={gateway_port}", *self._gateway_options)
        node = ("node", "--config", str(self.folder / "node.json"))
        self.add(rose_process(NODE, node, self.folder / f"{NODE}.log"))

    def __enter__(self) -> Self:
        try:
            for member in self.members.values():
                member.start()
        except BaseException:
            self.close()
            raise
        return self

    def add_gateway(self, name: str, port: int, *options: str) -> None:
        """Add one more gateway of the same replicas, before anything is started."""
        self._add(name, f"--port={port}", *self._gateway_options, *options, command="gateway")

    def said(self, python: Path, example: str, *argv: str) -> str:
        """Return what an example of this repository prints, run by this interpreter with the
        stack's settings. Raises ConfigError if it fails.
        """
        done = subprocess.run(  # noqa: S603 - an example of this repository
            [str(python), str(ROOT / "examples" / example), *argv],
            env={**self.environ(), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        if done.returncode:
            raise ConfigError(f"{example} ended with {done.returncode}: {done.stderr[-3_000:]}")
        return done.stdout

    def settings(self, **given: object) -> TrainerSettings:
        """Return the settings of a trainer of its job."""
        own: dict[str, Any] = {
            "job": self.job,
            "scheduler": self.scheduler,
            "gateway": self.gateway,
            "checkpoint": self.model,
            "root": self.folder / "published" / self.job,
            "key": self.key,
        }
        return TrainerSettings(**(own | given))

    def environ(self, **given: object) -> dict[str, str]:
        """Return the settings as the environment of a process: this one's, and `ROSE_*`."""
        settings = self.settings(**given)
        values = {
            PREFIX + each.name.upper(): str(int(value) if isinstance(value, bool) else value)
            for each in fields(settings)
            if (value := getattr(settings, each.name)) is not None
        }
        return {**os.environ, **QUIET, **values}

    def wait_ready(self, timeout_s: float = START_S, gateway: str = "") -> None:
        """Return once all its replicas get turns of the job. EngineStartError where that fails.

        gateway: address of another gateway, asked instead.
        """
        url, ports = gateway or self.gateway, len(self.engine_ports)
        self.until(lambda: self._serving(url) >= ports, timeout_s, f"{ports} replicas that serve")

    def kill_engine(self, number: int = 0) -> None:
        """Kill one replica's engine core (`kill -9`); its server and the node live on."""
        port = f"--port={self.engine_ports[number]}"
        node = psutil.Process(self.members[NODE].pid)
        for process in node.children(recursive=True):
            if port in process.cmdline():
                for child in process.children(recursive=True):
                    if child.name().startswith(CORE_NAME[:15]):
                        child.kill()
                        return
        raise EngineStartError(f"replica {number} has no engine that runs")

    def _serving(self, gateway: str) -> int:
        """Return the number of replicas that the gateway gives turns of the job."""
        connection = HTTPConnection(gateway.removeprefix("http://"), timeout=STOP_S)
        try:
            connection.request("GET", VERSIONS)
            answer = connection.getresponse()
            if answer.status != 200:
                return 0
            found = msgspec.json.decode(answer.read(), type=Versions)
        except (OSError, HTTPException):
            return 0  # it does not listen yet, or was killed
        finally:
            connection.close()
        return found.serving(0, self.job)

    def _add(self, name: str, *options: str, command: str = "") -> None:
        argv = (command or name, *options, f"--log-dir={self.folder / name}")
        self.add(rose_process(name, argv, self.folder / f"{name}.log"))

    def _node(self, verify_key: str, replica: Mapping[str, object]) -> dict[str, object]:
        return {
            "node": NODE,
            "scheduler": self.scheduler,
            "run_dir": str(self.folder / f"{NODE}-run"),
            "log_dir": str(self.folder / NODE),
            "verify_key": verify_key,
            "transport": {"buckets": [self.buckets]},
            "replicas": [
                {
                    "id": f"dedicated-{number}",
                    "kind": "dedicated",
                    "model_dir": str(self.model),
                    "port": port,
                    "max_sequences": 48,
                    "stream_interval": 4,
                    "decode_tok_s": 2_500.0,
                    "start_timeout_s": START_S,
                    **replica,
                }
                for number, port in enumerate(self.engine_ports)
            ],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run a fleet until it is interrupted."""
    parser = argparse.ArgumentParser(prog="bench.trainers.stack")
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=512)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder = args.folder or Path(tempfile.mkdtemp(prefix="rose-trainers-"))
    length = args.max_model_len
    with TrainerStack(folder, args.model, replicas=args.replicas, max_model_len=length) as stack:
        stack.wait_ready()
        for name, value in stack.environ().items():
            if name.startswith(PREFIX):
                sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
        sys.stdout.flush()
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
