"""Who may start a turn on this replica: decided by the newest lease epoch."""


class StaleEpochError(Exception):
    """A command of an older lease."""


class Admission:
    """Open or closed. Epochs only grow: what an old lease says is history."""

    def __init__(self) -> None:
        self.open = False
        self.epoch = 0
        self.reason = "no lease yet"
        self.quarantined = False

    def admit(self, epoch: int) -> None:
        """Open for the lease `epoch`."""
        self._take(epoch)
        self.open = not self.quarantined
        self.reason = "" if self.open else "quarantined"

    def close(self, epoch: int, reason: str) -> None:
        """Close at the end of the lease `epoch`."""
        self._take(epoch)
        self.open = False
        self.reason = reason or "drained"

    def quarantine(self, why: str) -> None:
        """Close for good: this process could not prove which weights it runs."""
        self.quarantined = True
        self.open = False
        self.reason = why

    def _take(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise StaleEpochError(f"epoch {epoch} is older than {self.epoch}; attach again")
        self.epoch = epoch
