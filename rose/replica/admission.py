"""Who may start a turn on this replica: decided by the newest lease epoch."""


class AdmissionError(Exception):
    """A command that changes nothing."""


class StaleEpochError(AdmissionError):
    """A command of an older lease."""


class QuarantinedError(AdmissionError):
    """This process cannot prove which weights it runs."""


class Admission:
    """Open or closed. Epochs only grow: what an old lease says is history."""

    def __init__(self) -> None:
        self.open = False
        self.epoch = 0
        self.reason = "no lease yet"
        self._quarantined = False

    def admit(self, epoch: int) -> None:
        """Open for the lease `epoch`. Raises StaleEpochError or QuarantinedError."""
        self._take(epoch)
        if self._quarantined:
            raise QuarantinedError(f"{self.reason}; restart this replica")
        self.open = True
        self.reason = ""

    def close(self, epoch: int, reason: str) -> None:
        """Close at the end of the lease `epoch`. Raises StaleEpochError."""
        self._take(epoch)
        self.open = False
        if not self._quarantined:
            self.reason = reason or "drained"

    def quarantine(self, why: str) -> None:
        """Close for as long as this process lives."""
        self._quarantined = True
        self.open = False
        self.reason = why

    def _take(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise StaleEpochError(f"epoch {epoch} is older than {self.epoch}; attach again")
        self.epoch = epoch
