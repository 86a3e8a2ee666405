"""The chart's own command lines, run: nobody's user, a read-only root, and the probes answer.

Only paths, names and addresses are put elsewhere; what the pods are told is what runs. Advisory
asks for nothing that this machine would have to have. It runs from this folder, and once more from
what the image of the control plane holds: its Containerfile's wheel, extras, variables and user.
"""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from executor import ControlPage
from executor.control_page.host_description import HostDescription
from executor.control_page.page import PAGE_FOLDER
from rose.addresses import free_port
from tests.harness.seated_host import SeatedHost
from tests.harness.waiting import until
from tests.unit.helm.rendering import TRIAL, Object, containers, joined, objects, pods

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
UNSHARE, SETPRIV = shutil.which("unshare"), shutil.which("setpriv")
# Binds the interpreter where nobody's user reaches it, makes all but one folder read only, gives up
# everything that root may.
CONFINED = r"""
mount --make-rprivate /
home=$1; python=$2; user=$3; shift 3
case $python in /root/*)
  mount --bind "$python" /mnt
  mount -t tmpfs -o mode=755 tmpfs /root
  mkdir -p "$python"
  mount --bind /mnt "$python"
esac
mount --bind "$home" "$home"
mount -o remount,bind,ro /
cd "$home"
user="--reuid $user --regid $user --clear-groups"
exec setpriv $user --no-new-privs --bounding-set -all -- "$@"
"""


@dataclass(frozen=True)
class Image:
    """Start of pods: the words of `rose`, and the variables of its image."""

    rose: tuple[str, ...]
    env: Mapping[str, str]


def of_sources() -> Image:
    return Image((sys.executable, "-m", "rose.cli"), {"PYTHONPATH": str(ROOT)})


def of_containerfile(folder: Path) -> Image:
    """Unpack the files that `make images` puts into the control plane's image."""
    said = (ROOT / "helm" / "images" / "rose.Containerfile").read_text()
    (run,) = re.findall(r"^RUN ((?:.*\\\n)*.*)$", said, re.M)
    # The line of the last stage.
    *_, variables = re.findall(r"^ENV (.+)$", said, re.M)
    assert '\nENTRYPOINT ["rose"]\n' in said
    env = dict(each.split("=", 1) for each in variables.split())
    source, venv = folder / "source", folder / "venv"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().split("\0"):
        if name.endswith((".py", ".toml", ".md")) or name.startswith("rose/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run([*pip, *wheel], check=True, capture_output=True)
    run = run.replace("/venv", str(venv)).replace("/wheels", str(folder))
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["/bin/sh", "-ec", run], env={**os.environ, "PATH": tools}, check=True, capture_output=True
    )
    env["PATH"] = env["PATH"].replace("/venv", str(venv)).replace("$PATH", os.environ["PATH"])
    return Image((str(venv / "bin" / "rose"),), env)


class ReleaseMachine:
    """Runs containers of a release as processes, each confined as its pod says."""

    def __init__(self, folder: Path, values: Object, ports: dict[str, int], image: Image) -> None:
        self.folder = folder
        self.values = values
        self._ports = ports
        self._image = image
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("run", "etc/rose/node", "log", "lib", "etcd", "tmp", "ca", "tls", "issuing"):
            (folder / name).mkdir(parents=True)
        for key in pods(values):
            for name in ("tls", "issuing"):
                (folder / name / key.partition("/")[2]).mkdir()
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777)
        found = objects(values)
        (folder / "policy.json").write_text(found["ConfigMap/r-policy"]["data"]["policy.json"])
        if secret := found.get("Secret/r-ca"):
            for name, data in (("ca.pem", "tls.crt"), ("ca.key", "tls.key")):
                (folder / "ca" / name).write_bytes(base64.b64decode(secret["data"][data]))

    def start(self, key: str) -> None:
        """Run the last container of a pod, after those that come before it."""
        container = self._begun(key)
        log = (self.folder / f"{container['name']}.log").open("wb")
        self._running[key] = subprocess.Popen(
            self._words(key, container), stdout=log, stderr=log, env=self._env(container, key)
        )

    def _begun(self, key: str) -> Object:
        """Return the last container of a pod; those before it have ended, or go on beside it."""
        *before, container = containers(pods(self.values)[key])
        for each in before:
            if each["name"] == "shared-folder":
                continue  # of root; the folder is there
            if each.get("restartPolicy") != "Always":
                assert self.done(key, each) == 0, each["name"]
                continue
            name = f"{key}/{each['name']}"
            # A group of its own, so that its pauses end with it.
            self._running[name] = subprocess.Popen(
                self._words(key, each), env=self._env(each, key), start_new_session=True
            )
            probe = [self._here(w, key) for w in each["startupProbe"]["exec"]["command"]]
            until(lambda: not subprocess.run(probe).returncode, 60, name, every_s=0.1)  # noqa: B023
        return container

    def ran(self, key: str, *instead: str) -> tuple[int, str]:
        """Run a pod to its end, or other words in its last container; its exit code and output."""
        container = containers(pods(self.values)[key])[-1] if instead else self._begun(key)
        if instead:
            container = {**container, "command": list(instead), "args": []}
        ended = subprocess.run(
            self._words(key, container),
            env=self._env(container, key),
            timeout=120,
            capture_output=True,
            text=True,
        )
        return ended.returncode, ended.stdout + ended.stderr

    def done(self, key: str, container: Object | None = None) -> int:
        """Run a container to its end; its exit code."""
        container = container or containers(pods(self.values)[key])[-1]
        ended = subprocess.run(
            self._words(key, container),
            env=self._env(container, key),
            timeout=120,
            capture_output=True,
        )
        sys.stdout.write(ended.stdout.decode() + ended.stderr.decode())
        return ended.returncode

    def answers(self, key: str, probe: str = "readinessProbe") -> bool:
        """Return True if a pod's probe succeeds now."""
        assert self._running[key].poll() is None, self.said(key)
        container = containers(pods(self.values)[key])[-1]
        asked = container[probe]
        if "exec" in asked:
            words = [self._here(word, key) for word in asked["exec"]["command"]]
            words[0] = sys.executable
            return subprocess.run(words, capture_output=True).returncode == 0
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        how = asked.get("httpGet") or asked["tcpSocket"]
        address = self._here(f"127.0.0.1:{ports[how['port']]}")
        try:
            if "tcpSocket" in asked:
                socket.create_connection(address.split(":"), timeout=5).close()  # type: ignore[arg-type]
            else:
                # A kubelet checks no certificate either.
                context = ssl._create_unverified_context()
                url = f"{how.get('scheme', 'HTTP').lower()}://{address}{how['path']}"
                urllib.request.urlopen(url, timeout=5, context=context).close()
        except OSError:
            return False
        return True

    def said(self, key: str) -> str:
        """Return the output of a pod's last container."""
        name = containers(pods(self.values)[key])[-1]["name"]
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        for name, process in reversed(self._running.items()):
            if name.count("/") > 1 and process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.terminate()
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()

    def _words(self, key: str, container: Object) -> list[str]:
        said = [*container["command"], *container.get("args", ())]
        words = [self._here(word, key) for word in said]
        programs = {"rose": [*self._image.rose]}
        etcd = Path(sys.executable).with_name("etcd")
        programs["etcd"] = [str(etcd)]
        if self._image.rose[0] == sys.executable:
            programs["python3"] = [sys.executable]
        words[:1] = programs.get(words[0], words[:1])
        if words[0] == "/bin/sh":
            script = r"(?m)(^\s*|\(|')rose (?=certs|policy|stop-all|resume)"
            rose = " ".join(self._image.rose)
            words[2] = re.sub(script, rf"\g<1>{rose} ", words[2])
        user = str(pods(self.values)[key]["securityContext"]["runAsUser"])
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        confined = [str(UNSHARE), "-m", "/bin/sh", "-ec", CONFINED, "confined"]
        return [*confined, str(self.folder), sys.base_prefix, user, *words]

    def _env(self, container: Object, key: str) -> dict[str, str]:
        said = {e["name"]: e.get("value", "") for e in container.get("env", [])}
        here = {
            k: self._here(v.replace("/tmp", f"{self.folder}/tmp"), key) for k, v in said.items()
        }
        here |= {"NODE_NAME": "n0"} if "NODE_NAME" in said else {}
        return {"PATH": os.environ["PATH"], **self._image.env, **here}

    def _here(self, word: str, key: str = "") -> str:
        pod = key.partition("/")[2]
        for said, meant in {
            "/etc/rose/tls": f"{self.folder}/tls/{pod}",
            "/issuing": f"{self.folder}/issuing/{pod}",
            " /ca/": f" {self.folder}/ca/",
            "/etc/rose/policy/policy.json": f"{self.folder}/policy.json",
            "/etc/rose": f"{self.folder}/etc/rose",
            "/var/log/rose": f"{self.folder}/log",
            "/var/lib/rose": f"{self.folder}/lib",
            "/var/lib/etcd": f"{self.folder}/etcd",
            "/run/rose": f"{self.folder}/run",
            "0.0.0.0": "127.0.0.1",
            "r-etcd-0.r-etcd.rose-system.svc": "127.0.0.1",
            "r-scheduler.rose-system.svc": "127.0.0.1",
            "$(POD_NAME).r-etcd.rose-system.svc": "127.0.0.1",
            "=r-scheduler:": "=127.0.0.1:",
            "$(POD_NAME)": "r-etcd-0",
            "$(POD_IP)": "127.0.0.1",
            "$(NODE_NAME)": "n0",
            # Use a group that this machine has; the page is its owner's then.
            '"page_group":"10777"': '"page_group":""',
            **{f":{said}": f":{meant}" for said, meant in self._ports.items()},
        }.items():
            word = word.replace(said, meant)
        return word


@pytest.fixture(scope="module", params=["sources", "image"])
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    if request.param == "sources":
        yield of_sources()
        return
    folder = Path(tempfile.mkdtemp(prefix="rose-image-"))
    # Nobody's user reads it.
    folder.chmod(0o755)
    try:
        yield of_containerfile(folder)
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def installed(image: Image, *more: Object) -> Iterator[ReleaseMachine]:
    if os.getuid() != 0 or not (UNSHARE and SETPRIV):
        pytest.skip("a read-only root is made by root, with unshare and setpriv")
    if subprocess.run([UNSHARE, "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    ports = {each: str(free_port()) for each in ("2379", "2380", "2381")}
    values = {
        "store": {"own": {"members": 1}},
        # This machine is no pod.
        "controller": {"enabled": False},
        "scheduler": {
            "replicas": 1,
            "port": free_port(),
            "metricsPort": free_port(),
            "dashboardPort": free_port(),
        },
        "gateway": {"port": free_port()},
        "node": {"metricsPort": free_port()},
        "policy": {"maxHarvest": {"compute": 0.5}},
    }
    folder = Path(tempfile.mkdtemp(prefix="rose-chart-", dir=PAGE_FOLDER))
    made = ReleaseMachine(folder, joined(values, *more), ports, image)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder)


@pytest.fixture
def machine(image: Image) -> Iterator[ReleaseMachine]:
    with installed(image) as made:
        yield made


def test_the_release_runs_and_its_test_proves_the_stop(machine: ReleaseMachine) -> None:
    order = (
        "StatefulSet/r-etcd",
        "Deployment/r-scheduler",
        "Deployment/r-gateway",
        "DaemonSet/r-node",
    )
    for key in order:
        machine.start(key)
        for probe in ("readinessProbe", "livenessProbe"):
            until(lambda: machine.answers(key, probe), 60, f"{key}: {probe}", every_s=0.2)  # noqa: B023
    assert machine.done("Job/r-policy") == 0
    assert json.loads((machine.folder / "etc/rose/node/node.json").read_text())["node"] == "n0"
    until(lambda: machine.done("Pod/r-test-hold") == 0, 60, "helm test", every_s=1.0)
    for key in ("CronJob/r-stop-all", "CronJob/r-resume"):
        assert machine.done(key) == 0


@contextlib.contextmanager
def seated(folder: Path, user: int) -> Iterator[None]:
    """A host in the shared folder that is idle for as long as this lasts."""
    path = folder / "chat-0.page"
    page = ControlPage.ensure(path)
    host = SeatedHost(page)
    host.tell()
    HostDescription("chat", 0.5, 0.15, (), host.seat.taken_ns).write(path)
    for each in (path, path.with_suffix(".json")):
        os.chown(each, user, user)
    over = threading.Event()

    def beats() -> None:
        while not over.wait(0.05):
            host.tell()

    thread = threading.Thread(target=beats)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        host.close()
        page.close()


def test_day_one_ends_in_figures_of_a_host_by_certificates_that_pods_made() -> None:
    """The pods of the four commands of the page run, and the last command prints figures."""
    with installed(of_sources(), TRIAL) as machine:
        began_s = time.monotonic()
        user = pods(machine.values)["DaemonSet/r-node"]["securityContext"]["runAsUser"]
        with seated(machine.folder / "run", user):
            for key in ("Deployment/r-scheduler", "DaemonSet/r-node", "Deployment/r-toolbox"):
                machine.start(key)
            until(lambda: machine.ran("Job/r-policy")[0] == 0, 60, "the policy", every_s=0.5)
            said = ["rose", "policy", "explain"]

            def advised() -> bool:
                _, text = machine.ran("Deployment/r-toolbox", *said)
                return "would lend" in text

            until(advised, 60, "figures of what could be lent", every_s=0.5)
            code, text = machine.ran("Deployment/r-toolbox", *said)
            sys.stdout.write(f"{text}after {time.monotonic() - began_s:.1f} s\n")
            assert code == 0
            assert text.startswith("n0: would harvest 50% of compute now")
            assert "mode Advisory (r)" in text
            assert machine.ran("Deployment/r-toolbox", "rose", "status")[0] == 0
            assert machine.ran("Pod/r-test-hold")[0] == 0
