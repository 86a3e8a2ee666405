"""`scripts/api-server`: what `stop` ends, and which builds count."""

import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

ROOT = Path(__file__).parents[3]
SERVERS = {
    "etcd, started again by a test": ["--data-dir", "etcd-data"],
    "a server that no file names": ["--etcd-servers=http://127.0.0.1:1"],
}
SLEEPS = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]


@pytest.mark.timeout(30)
def test_servers_are_ended_whatever_their_pid_files_say(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    started = [(run, words) for words in SERVERS.values()]
    started += [(run, ["an operator's shell"]), (other, SERVERS["a server that no file names"])]
    processes = []
    for folder, words in started:
        folder.mkdir(exist_ok=True)
        process = subprocess.Popen([*SLEEPS, *words], cwd=folder, stdin=PIPE, stdout=PIPE)
        processes.append(process)
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    (run / "etcd.pid").write_text(str(processes[-1].pid))
    subprocess.run([ROOT / "scripts/api-server", "stop", "run"], cwd=tmp_path, check=True)
    *ended, shell, stranger = processes
    assert [process.wait(5) for process in ended] == [-15, -15]
    assert (shell.poll(), stranger.poll()) == (None, None), "they are no servers of this folder"
    for process in (shell, stranger):
        process.communicate(b"")


def test_what_was_built_by_other_steps_is_built_again(tmp_path: Path) -> None:
    complete = tmp_path / "bin/.complete"
    complete.parent.mkdir()
    complete.touch()
    kept = {**os.environ, "ROSE_KUBE_DIR": str(tmp_path)}
    kept.pop("KUBEBUILDER_ASSETS", None)
    api_server = ROOT / "scripts/api-server"
    assert subprocess.run([api_server, "built"], env=kept, check=False).returncode == 1
    start = [api_server, "start", tmp_path / "run"]
    refused = subprocess.run(start, env=kept, check=False, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "api-server: it is not built; scripts/api-server build\n"
