"""The name of a store: each spelling is the cluster or file that it means, or is refused."""

import pytest

from rose.errors import ConfigError
from rose.store.opening import StoreName

ETCD = "etcd://h:2379"
SPELLINGS = {
    ETCD: ETCD,
    "ETCD://h:2379": ETCD,
    " etcd://h:2379\n": ETCD,
    "Etcd://h:2379/P": f"{ETCD}/P",
    "etcd://[::1]:2379": "etcd://[::1]:2379",
    "run/s.sqlite": "run/s.sqlite",
    "./a:b": "./a:b",
    "a:b.sqlite": "a:b.sqlite",
}


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_a_store_is_the_same_in_every_spelling(spelled: str) -> None:
    assert StoreName(spelled).name == SPELLINGS[spelled]


OTHERS = [
    "etcds://h:2379",
    "https://h:2379",
    "postgres://u:pw@h/d",
    "etcd:/h:2379",
    "file:///s",
    "etcd:h:1",
    ":memory:",
    "~/s.sqlite",
]


@pytest.mark.parametrize("spelled", [*OTHERS, " ", ""])
def test_a_store_of_another_kind_is_refused_and_makes_no_file(spelled: str) -> None:
    with pytest.raises(ConfigError, match="etcd://HOST:PORT") as refused:
        StoreName(spelled)
    assert "pw" not in str(refused.value)
