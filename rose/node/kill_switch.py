"""The node's own kill switch: a file, so that it holds across restarts and with all else dead."""

from pathlib import Path

KILLED = "kill switch"


class KillSwitch:
    """Set while the file exists. Keepers of guests look for it too, with or without a daemon."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._latched = False

    @property
    def engaged(self) -> bool:
        """Whether no guest may exist."""
        return self._latched or self.file.exists()

    def engage(self) -> None:
        """Set it. A disk that takes no file delays nothing: then it holds until the next start."""
        try:
            self.file.touch()
        except OSError:
            self._latched = True
