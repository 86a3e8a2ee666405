"""Versions of vLLM that nobody tried are refused; where the known ones differ is asked of them."""

from types import SimpleNamespace

import pytest

from executor.errors import ExecutorError
from executor.vllm.compat import (
    TESTED,
    capped,
    check_version,
    client_request_id,
    ended_requests,
    waiting_requests,
)


@pytest.mark.parametrize("version", ["0.26.0", "0.25.1", "0.33.0", "0.32.0rc1", "1.0"])
def test_a_version_that_nobody_tried_is_one_clear_line(version: str) -> None:
    with pytest.raises(ExecutorError, match=rf"not tested with vLLM {version}; install one of 0"):
        check_version(version)


def test_the_device_that_a_version_was_built_for_does_not_matter() -> None:
    for version in TESTED:
        check_version(version)
        check_version(f"{version}+cu130")


def test_the_one_installed_here_is_tested() -> None:
    pytest.importorskip("vllm")
    check_version()


def test_a_cap_is_lifted_again_whatever_happens() -> None:
    scheduler = SimpleNamespace(
        max_num_scheduled_tokens=512, max_num_running_reqs=16, running=["a", "b", "c"]
    )
    seen: list[tuple[int, int]] = []

    def fail() -> None:
        with capped(scheduler, tokens=64, sequences=2):
            seen.append((scheduler.max_num_scheduled_tokens, scheduler.max_num_running_reqs))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [(64, 3)], "0.25 asserts that no more run than its number of slots"
    assert (scheduler.max_num_scheduled_tokens, scheduler.max_num_running_reqs) == (512, 16)
    newer = SimpleNamespace(
        max_num_scheduled_tokens=512,
        max_num_running_reqs=16,
        max_num_active_reqs=12,
        running=["a", "b", "c"],
    )
    with capped(newer, tokens=1024, sequences=2):
        assert (newer.max_num_scheduled_tokens, newer.max_num_active_reqs) == (512, 2)
        assert newer.max_num_running_reqs == 16
    assert newer.max_num_active_reqs == 12


def test_nobody_who_waits_or_was_ended_is_overlooked() -> None:
    older = SimpleNamespace(waiting=["a"], skipped_waiting=["b"])
    newer = SimpleNamespace(waiting=["a"], kv_holding_waiting=["b"])
    assert waiting_requests(older) == waiting_requests(newer) == ["b", "a"]
    request = SimpleNamespace(client_index=3, request_id="r")
    assert ended_requests([request]) == ended_requests([("r", 3)]) == [(3, "r")]


@pytest.mark.parametrize(
    ("engine_id", "client_id"),
    [
        ("cmpl-load-17-0", "load-17"),
        ("cmpl-load-17-0-1a2b3c4d", "load-17"),
        ("cmpl-load-17-0-12345678", "load-17"),
        ("cmpl-load-12345678-0", "load-12345678"),
        ("cmpl-a-0-0", "a-0"),
        ("cmpl-a-2", "a-2"),
        ("chatcmpl-5d0f1c9e-0a52-4f6e-9d6a-0123456789ab", "5d0f1c9e-0a52-4f6e-9d6a-0123456789ab"),
        ("something-else", "something-else"),
        ("", ""),
    ],
)
def test_the_engines_wrapping_is_taken_off(engine_id: str, client_id: str) -> None:
    assert client_request_id(engine_id) == client_id
