"""A page of another user is refused, unless both share its group."""

import os
from pathlib import Path

import pytest

from executor import ControlPage, PageError


def test_a_page_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ControlPage.create(tmp_path / "page").close()
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(PageError, match=f"belongs to uid {own}"):
        ControlPage.open(tmp_path / "page")
