"""Host records carry the client's own request id."""

import pytest

from executor.vllm.compat import client_request_id


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
