"""StandInEngine: answers a replica's calls, writes each down. argv: port, journal, model."""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

PORT, JOURNAL, MODEL = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
# While UNPROVEN exists the engine cannot prove any version, with CLOSED it refuses admission.
# While COLD exists it has not warmed up, with TOO_COLD it never will.
SAID: dict[str, Any] = {
    "policy_version": 0,
    "epoch": 0,
    "admitting": False,
    "proven": True,
    "job": "",
}
COLD, TOO_COLD = JOURNAL.with_name("cold"), JOURNAL.with_name("too_cold")
# While MUTE exists at its start it does not answer at all.
MUTE = JOURNAL.with_name("mute")
# While OTHER exists it holds other weights than its version says: only a base helps.
OTHER = JOURNAL.with_name("other")
# With this file at its start it has a process with the name of vLLM's engine cores.
CORE = JOURNAL.with_name("core")
# With this file at its start other machines reach it.
OPEN = JOURNAL.with_name("open")
# While DEAF exists a drain is not answered.
DEAF = JOURNAL.with_name("deaf")
UNPROVEN, CLOSED = JOURNAL.with_name("unproven"), JOURNAL.with_name("closed")


def _first_line(manifest: Path) -> dict[str, Any]:
    """Return the version, behind the envelope's 72 bytes; a stand-in checks no signature."""
    head: dict[str, Any] = json.loads(manifest.read_bytes()[72:].split(b"\n", 1)[0])
    return head


def note(call: str, **fields: object) -> None:
    with JOURNAL.open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "call": call, **fields}) + "\n")


def apply(body: dict[str, Any]) -> tuple[int, dict[str, object]]:
    manifests = [_first_line(Path(path)) for path in body["manifests"]]
    version, based = manifests[-1]["version"], manifests[0]["parent"] == manifests[0]["version"]
    job = manifests[-1]["job"]
    foreign = SAID["job"] not in ("", job)
    wrong = OTHER.exists() or foreign or manifests[0]["parent"] != SAID["policy_version"]
    if wrong and not based:
        note("wrong_base", version=version)
        return 409, {"error": {"type": "wrong_base", "message": "other weights are active"}}
    if UNPROVEN.exists() or not SAID["proven"]:
        SAID["proven"] = False
        note("apply", version=version)
        SAID["admitting"] = False
        error = {"type": "unproven", "message": f"version {version} broke off"}
        return 422, {"error": error, "version": None, "digest_ok": False, "probe_ok": False}
    report = {"version": version, "digest_ok": True, "probe_ok": True, "wire_bytes": 1}
    zeros = dict.fromkeys(("probe_max_abs_diff", "pause_s", "apply_s", "changed_elements"), 0)
    steps, on_update = [each["version"] for each in manifests], body.get("on_update", "recompute")
    note("apply", version=version, steps=steps, based=based, on_update=on_update, job=job)
    SAID.update(policy_version=version, job=job)
    return 200, {**report, **zeros}


class EngineHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        warm_up = {"failed": TOO_COLD.exists(), "said": "3 of 9 sizes"}
        warmth = {"warm": not COLD.exists(), "warm_up": warm_up}
        self.answer(200, SAID | warmth | {"running": 2, "waiting": 0, "tokens_total": 7})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {os.environ['ROSE_REPLICA_SECRET']}":
            note("stranger", path=self.path)
            self.answer(401, {"error": {"type": "no_secret", "message": "who are you"}})
            return
        call = self.path.rsplit("/", 1)[1]
        if call == "apply":
            self.answer(*apply(body))
            return
        if call == "admit" and CLOSED.exists():
            self.answer(409, {"error": {"type": "stale_epoch", "message": "closed"}})
            return
        while call == "drain" and DEAF.exists():
            time.sleep(0.02)
        lease = {"job": body.get("job", ""), "latest": body.get("latest")}
        note(call, epoch=body["epoch"], offer=body.get("offer", 0), **lease)
        SAID.update(epoch=body["epoch"], admitting=call == "admit")
        self.answer(200, {"aborted": 3})

    def answer(self, status: int, body: dict[str, object]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


def core() -> None:
    if pid := os.fork():
        note("core", core=pid)
        return
    Path("/proc/self/comm").write_text("VLLM::EngineCore")
    time.sleep(600)


def main(
    server: type[HTTPServer] = HTTPServer, handler: type[EngineHandler] = EngineHandler
) -> None:
    note("start", model=MODEL)
    if CORE.exists():
        core()
    while MUTE.exists():
        time.sleep(0.02)
    server(("0.0.0.0" if OPEN.exists() else "127.0.0.1", PORT), handler).serve_forever()


if __name__ == "__main__":
    main()
