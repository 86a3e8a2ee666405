import pytest

from weight_transfer.apply.worker import names_errors, typed
from weight_transfer.errors import ChunkDigestError, WeightError, WrongBaseError


@pytest.mark.parametrize("kind", [WrongBaseError, ChunkDigestError, WeightError])
def test_an_error_keeps_its_type_though_only_its_text_crosses(kind: type[WeightError]) -> None:
    @names_errors
    def method() -> None:
        raise kind("say: what\nto do")

    with pytest.raises(kind) as caught:
        method()
    across = typed(Exception(f"Call to collective_rpc method failed: {caught.value}"))
    assert type(across) is kind
    assert str(across) == "say: what\nto do"


@pytest.mark.parametrize("text", ["plain", "[rose:OSError] x", "[rose:annotations] x"])
def test_other_failures_stay_what_they_are(text: str) -> None:
    failure = RuntimeError(text)
    assert typed(failure) is failure
