"""A locked file lies in folders of this user alone."""

from pathlib import Path

from rose.process.filelock import HeldFile


def test_folders_of_a_held_file_are_for_this_user_alone(tmp_path: Path) -> None:
    HeldFile.take(tmp_path / "run" / "guests" / "g0.json").close()
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "run", tmp_path / "run/guests")]
    assert modes == [0o700, 0o700]
