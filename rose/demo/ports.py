"""The loopback ports of one run, counted from a base."""

from dataclasses import dataclass

from rose.engines.preflight import check_port


@dataclass(frozen=True, slots=True)
class Ports:
    """Who listens where."""

    scheduler: int
    gateway: int
    host: int
    guest: int
    dedicated: int
    publisher: int

    @classmethod
    def from_base(cls, base: int) -> "Ports":
        """Consecutive ports."""
        return cls(*range(base, base + 6))

    def check(self) -> None:
        """Raise ConfigError when one is taken."""
        for name in self.__slots__:
            check_port(getattr(self, name), name)
