"""Nothing that asks nobody who he is listens on the network unless the operator has said so."""

from pathlib import Path

import pytest

from rose.addresses import is_loopback
from rose.errors import ConfigError
from rose.gateway.settings import parse_settings
from rose.main.scheduler import main, settings_of

HERE = ["127.0.0.1", "127.8.9.1", "::1", "localhost"]
OPEN = ["0.0.0.0", "::", "10.0.0.1", "", "scheduler", "localhost.example", "127.0.0.1.example"]


@pytest.mark.parametrize("host", HERE + OPEN)
def test_only_loopback_is_reached_from_this_machine_alone(host: str) -> None:
    assert is_loopback(host) is (host in HERE)


@pytest.mark.parametrize("host", OPEN)
def test_an_address_of_the_network_is_refused_in_a_line(host: str) -> None:
    scheduler = ["--host", host, "--store", "s", "--log-dir", "l"]
    gateway = ["--host", host, "--port", "0", "--scheduler", "127.0.0.1:1"]
    with pytest.raises(ConfigError, match="--insecure") as caught:
        settings_of(scheduler)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="--insecure"):
        parse_settings(gateway)
    assert settings_of([*scheduler, "--insecure"]).host == host
    assert parse_settings([*gateway, "--insecure"]).host == host


def test_a_scheduler_that_would_be_open_does_not_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--store", f"{tmp_path}/s", "--log-dir", f"{tmp_path}/l", "--port", "0"]
    assert main(["--host", "0.0.0.0", *options]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "--insecure" in said
    assert not (tmp_path / "s").exists()
