"""One rank of a node, as a process: reads a checkpoint with the others and follows versions.

node_rank_main.py ROOT PLACE VERSIONS [HOLD_AT]
Says a line of JSON after each step, and waits for SIGUSR1 before the next: an engine has all ranks
decode before any commits. With HOLD_AT it decodes so many tensors and then waits for its end.
"""

import json
import signal
import sys
from pathlib import Path

import blake3

from weight_transfer import ChunkStore, Receiver, StagedTensor, VerifiedManifest, WeightError
from weight_transfer.apply.node_copy import NodeCopy
from weight_transfer.format.checkpoint import Checkpoint


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class NodeRank:
    def __init__(self, root: Path, place: Path, hold_at: int) -> None:
        self._copy = NodeCopy(Checkpoint.open(root / "model"), place)
        self._receiver, self._store = Receiver.over(self._copy), ChunkStore(root / "store")
        self._hold_at = hold_at
        say(leads=self._copy.leads)

    def follow(self, version: int) -> None:
        plan = self._receiver.plan([VerifiedManifest(self._store.get_manifest(version))], 0.0)
        decoded: list[str] = []

        def decode(name: str) -> StagedTensor:
            if len(decoded) == self._hold_at:
                say(decoding=name)
                signal.pause()
            decoded.append(name)
            refs = [ref for update in plan.tensors[name] for ref in update.chunks]
            chunks = {ref.id: self._store.get(ref.id) for ref in refs}
            return self._receiver.decode_tensor(plan, name, chunks)

        try:
            update = self._copy.decode(plan, decode, f"attempt {version}")
        except WeightError as error:
            kind, active = type(error).__name__, self._receiver.version
            say(error=kind, message=str(error), version=active)
            sys.exit(0)
        say(decoded=version)
        signal.sigwait({signal.SIGUSR1})
        self._receiver.commit(update)
        held = blake3.blake3()
        for name in sorted(self._receiver.tensors):
            held.update(self._receiver.tensors[name].bits.tobytes())
        say(version=self._receiver.version, decodes=len(decoded), held=held.hexdigest())


def main(root: str, place: str, versions: str, hold_at: str = "-1") -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    rank = NodeRank(Path(root), Path(place), int(hold_at))
    for version in range(1, int(versions) + 1):
        rank.follow(version)
        signal.sigwait({signal.SIGUSR1})


if __name__ == "__main__":
    main(*sys.argv[1:])
