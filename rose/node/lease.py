"""What a node believes about the lease of one replica."""

from dataclasses import dataclass


@dataclass(slots=True)
class HeldLease:
    """The newest lease seen; epochs only grow, and silence ends it."""

    epoch: int = 0
    until_s: float = 0.0

    @property
    def open(self) -> bool:
        """Whether it was not ended, though its time may be over."""
        return self.until_s > 0.0

    def grant(self, epoch: int, ttl_s: float, now_s: float) -> bool:
        """Take a grant or a renewal; False when it is of the past."""
        if epoch < self.epoch or (epoch == self.epoch and not self.active(now_s)):
            return False
        self.epoch = epoch
        self.until_s = now_s + ttl_s
        return True

    def end(self, epoch: int) -> bool:
        """Take a release; False when a newer lease holds."""
        if epoch < self.epoch:
            return False
        self.epoch = epoch
        self.until_s = 0.0
        return True

    def active(self, now_s: float) -> bool:
        """Whether turns may run now."""
        return now_s < self.until_s
