"""Step models that `rose profile` measured."""

from pathlib import Path

from rose.errors import RoseError
from rose.simulation.step_times import ProfiledSteps
from slo import ProfileError, StepProfile


def read_profile(path: Path) -> ProfiledSteps:
    """Step times of a file that `rose profile` saved.

    Raises RoseError, with the file and what is wrong, for any other file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RoseError(f"{path}: cannot be read as a step profile: {error}") from error
    try:
        return ProfiledSteps(StepProfile.from_json(text))
    except ProfileError as error:
        raise RoseError(f"{path}:1: {error}") from error
