"""In place of `bench.gpu.measure`: behaves as its pieces' names say, one after another."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ORDER = json.loads(sys.argv[1])
FOLDER = Path(ORDER["out"])


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def answer(name: str, content: dict[str, Any]) -> None:
    (FOLDER / "answer.tmp").write_text(json.dumps(content))
    (FOLDER / "answer.tmp").replace(FOLDER / f"{name}.json")


def behave(name: str) -> None:
    say(f"{name} on {os.environ['CUDA_VISIBLE_DEVICES']}")
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif name == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        say(f"child {child.pid}")
        time.sleep(60)
    elif name == "fails":
        answer(name, {"failed": "one line"})
        sys.exit(1)
    elif name == "says nothing":
        sys.exit(3)
    elif name == "no time left":
        sys.exit(0)
    else:
        answer(name, {"measured": {"sizes": ORDER["sizes"]}})


for piece in ORDER["pieces"]:
    behave(piece)
