"""LeaderFinder: which of several schedulers to ask next, decided without IO.

Any address of the list leads to the leader: a standby names it, one that does not answer is passed
over. A named leader that does not answer is forgotten, and the list goes on.
"""

from rose.rpc.addresses import checked_addresses, is_address

# Trailing metadata of a standby's refusal: HOST:PORT of the leader, empty while it knows of none.
LEADER_METADATA = "rose-leader"


class LeaderFinder:
    """The address that is believed to lead, of a list `HOST:PORT,HOST:PORT`.

    Raises `ConfigError` for what is no such list; `whose` begins the message.
    """

    def __init__(self, addresses: str, whose: str = "--scheduler") -> None:
        self.addresses = checked_addresses(addresses, whose)
        self._at = 0
        self._named = ""
        self._fails = 0

    @property
    def address(self) -> str:
        """Whom to ask now."""
        return self._named or self.addresses[self._at]

    @property
    def worth_a_pause(self) -> bool:
        """Whether all were asked since one answered: nobody leads for now."""
        return self._fails > len(self.addresses)

    def answered(self) -> None:
        """The one that was asked leads."""
        self._fails = 0

    def missed(self, hint: str | None = None) -> None:
        """The one that was asked does not lead: it named another (`hint`), or did not answer."""
        self._fails += 1
        if hint and is_address(hint) and hint != self.address:
            self._named = hint
            return
        if not self._named:
            self._at = (self._at + 1) % len(self.addresses)
        self._named = ""
