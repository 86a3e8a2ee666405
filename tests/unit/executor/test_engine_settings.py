"""Environment of an engine process."""

import pytest

from executor import ExecutorError
from executor.engine_settings import EngineSettings


def test_without_a_role_nothing_is_asked_for() -> None:
    assert EngineSettings.from_environ({}) == EngineSettings("", "", 0.0, 0.0, 1.5)


def test_a_host_reads_its_page_and_targets() -> None:
    settings = EngineSettings.from_environ(
        {
            "ROSE_ROLE": "host",
            "ROSE_CONTROL_PAGE": "page",
            "ROSE_SLO_TTFT_S": "0.5",
            "ROSE_SLO_TPOT_S": "0.15",
            "ROSE_ORPHAN_S": "1",
        }
    )
    assert settings == EngineSettings("host", "page", 0.5, 0.15, 1.0)


def test_a_host_lends_only_when_told_to() -> None:
    assert EngineSettings.from_environ({}).level == "observe"
    told = {"ROSE_HOST_LEVEL": "lend", "ROSE_HOST_RESERVE": "0.5"}
    settings = EngineSettings.from_environ(told)
    assert (settings.level, settings.reserve) == ("lend", 0.5)


def test_kv_pages_go_by_where_they_are_unless_told_otherwise() -> None:
    assert EngineSettings.from_environ({}).kv_backend == "auto"
    assert EngineSettings.from_environ({"ROSE_KV_BACKEND": "cuda"}).kv_backend == "cuda"
    assert (
        EngineSettings.from_environ({"ROSE_PAGE_SOCKET": "/run/pages"}).page_socket == "/run/pages"
    )


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ROSE_HOST_LEVEL": "give"}, "give observe or lend"),
        ({"ROSE_KV_BACKEND": "gpu"}, "ROSE_KV_BACKEND is 'gpu'; give auto or madvise or cuda"),
        (
            {"ROSE_KV_BACKEND": "kvcached"},
            "kvcached: 0.1.6 is tested by its authors up to vLLM 0.24",
        ),
        ({"ROSE_HOST_RESERVE": "0"}, "ROSE_HOST_RESERVE is 0; give a share"),
        ({"ROSE_HOST_RESERVE": "nan"}, "ROSE_HOST_RESERVE is nan; give a share"),
        ({"ROSE_HOST_RESERVE": "half"}, "ROSE_HOST_RESERVE is half; give a share"),
        ({"ROSE_ROLE": "guest"}, "set ROSE_CONTROL_PAGE"),
        ({"ROSE_SLO_TTFT_S": "fast"}, "ROSE_SLO_TTFT_S is 'fast'; give seconds"),
        ({"ROSE_SLO_TPOT_S": "-1"}, "not negative"),
        ({"ROSE_ORPHAN_S": "0"}, "ROSE_ORPHAN_S is 0"),
    ],
)
def test_senseless_settings_say_what_to_do(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ExecutorError, match=message):
        EngineSettings.from_environ(environ)
