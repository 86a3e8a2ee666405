"""Settings of an engine process, read from its environment."""

import math
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from executor.control_page.host_description import page_of
from executor.control_page.page import PAGE_GROUP
from executor.errors import ExecutorError

HOST = "host"
GUEST = "guest"
OBSERVE = "observe"
LEND = "lend"
AUTO = "auto"
MADVISE = "madvise"
CUDA = "cuda"
WARM_UP = "rose-warm-up-"
"""Prefix of the ids of requests that run before the first lease: their tokens belong to no job."""
POLICY_VERSION = "ROSE_POLICY_VERSION"
"""Environment variable that the code which activates weights sets in the engine's process.

The guest publishes its value on the control page.
"""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine process. With an empty `role`, outside ROSE, every plugin is inert.

    `ttft_s`, `tpot_s`: latency targets in seconds, 0 for unknown. `orphan_s`: time for which a
    guest outlives its node daemon. `step_profile`, `host_step_profile`: files of `rose profile`,
    empty for none. `level`, `reserve`, `prefix_cold_s`: LEND or OBSERVE, the share of KV memory
    that a host never lends, and the time after which an unused prefix may be dropped. `kv_backend`:
    means by which KV pages are released: MADVISE on host memory, CUDA on a GPU, AUTO by where the
    KV is. `page_socket`: socket at which a host on a GPU lends pages by handle and its guest
    borrows them; empty for pages that pass through the driver. `page_group`: the group that shares
    the control page, empty for its owner alone. `found`: True for a host that nodes find in the
    folder of its page, where the host describes itself.
    """

    role: str
    page_path: str
    ttft_s: float
    tpot_s: float
    orphan_s: float
    step_profile: str = ""
    host_step_profile: str = ""
    level: str = OBSERVE
    reserve: float = 0.2
    prefix_cold_s: float = 300.0
    kv_backend: str = AUTO
    page_socket: str = ""
    page_group: str = ""
    found: bool = False

    @property
    def lends(self) -> bool:
        """True for a host that may lend KV memory."""
        return (self.role, self.level) == (HOST, LEND)

    @property
    def moves_pages(self) -> bool:
        """True for an engine whose KV pages come and go: a guest, or a host that may lend."""
        return self.role == GUEST or self.lends

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Return the settings in the environment's ROSE_* variables; a missing one has its default.

        ROSE_ROLE, ROSE_CONTROL_PAGE, ROSE_SLO_TTFT_S, ROSE_SLO_TPOT_S, ROSE_ORPHAN_S,
        ROSE_STEP_PROFILE, ROSE_HOST_STEP_PROFILE, ROSE_HOST_LEVEL, ROSE_HOST_RESERVE,
        ROSE_HOST_PREFIX_COLD_S, ROSE_KV_BACKEND, ROSE_PAGE_SOCKET, ROSE_PAGE_GROUP, and of a host
        ROSE_HOST_DIR and ROSE_HOST_NAME.

        Raises ExecutorError for a host or guest without a page and for values that make no sense.
        """
        role = environ.get("ROSE_ROLE", "")
        page_path = page_path_of(environ)
        if role in (HOST, GUEST) and not page_path:
            instead = ", or ROSE_HOST_DIR to the folder in which nodes find it" * (role == HOST)
            raise ExecutorError(
                f"ROSE_ROLE is {role}: set ROSE_CONTROL_PAGE to the page's path{instead}"
            )
        settings = cls(
            role,
            page_path,
            _seconds(environ, "ROSE_SLO_TTFT_S", 0.0),
            _seconds(environ, "ROSE_SLO_TPOT_S", 0.0),
            _seconds(environ, "ROSE_ORPHAN_S", 1.5),
            environ.get("ROSE_STEP_PROFILE", ""),
            environ.get("ROSE_HOST_STEP_PROFILE", ""),
            _one_of(environ, "ROSE_HOST_LEVEL", (OBSERVE, LEND)),
            _share(environ, "ROSE_HOST_RESERVE", 0.2),
            _seconds(environ, "ROSE_HOST_PREFIX_COLD_S", 300.0),
            _kv_backend(environ),
            environ.get("ROSE_PAGE_SOCKET", ""),
            environ.get(PAGE_GROUP, ""),
            found=role == HOST and bool(page_path) and not environ.get("ROSE_CONTROL_PAGE"),
        )
        if settings.orphan_s == 0:
            raise ExecutorError("ROSE_ORPHAN_S is 0; give the seconds a guest outlives its daemon")
        return settings


def page_path_of(environ: Mapping[str, str]) -> str:
    """Return the control page's path: ROSE_CONTROL_PAGE, or a host's own page in ROSE_HOST_DIR.

    Return "" if the environment names neither. All processes of a host get the same path. Raises
    PageError for an invalid ROSE_HOST_NAME.
    """
    folder = environ.get("ROSE_HOST_DIR", "")
    if environ.get("ROSE_CONTROL_PAGE") or environ.get("ROSE_ROLE") != HOST or not folder:
        return environ.get("ROSE_CONTROL_PAGE", "")
    return str(page_of(folder, environ.get("ROSE_HOST_NAME") or _own_name(environ)))


def _own_name(environ: Mapping[str, str]) -> str:
    """Return a host's default name: the machine's or pod's, with CUDA_VISIBLE_DEVICES if set."""
    parts = socket.gethostname(), environ.get("CUDA_VISIBLE_DEVICES", "")
    name = "-".join(re.sub(r"[^A-Za-z0-9._-]+", "-", part).strip("-._") for part in parts if part)
    return name[:100]


def _kv_backend(environ: Mapping[str, str]) -> str:
    if environ.get("ROSE_KV_BACKEND") == "kvcached":
        raise ExecutorError(
            "ROSE_KV_BACKEND is kvcached: 0.1.6 is tested by its authors up to vLLM 0.24, older"
            f" than any that ROSE runs; give {CUDA}"
        )
    return _one_of(environ, "ROSE_KV_BACKEND", (AUTO, MADVISE, CUDA))


def _one_of(environ: Mapping[str, str], name: str, words: tuple[str, ...]) -> str:
    text = environ.get(name, words[0])
    if text not in words:
        raise ExecutorError(f"{name} is {text!r}; give {' or '.join(words)}")
    return text


def _share(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 1.0:
        raise ExecutorError(f"{name} is {text}; give a share above 0 and up to 1")
    return value


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ExecutorError(f"{name} is {text!r}; give seconds") from None
    if not (math.isfinite(value) and value >= 0):
        raise ExecutorError(f"{name} is {text}; give seconds that are not negative")
    return value
