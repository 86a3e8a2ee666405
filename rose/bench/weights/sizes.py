"""Bytes for each changed weight, by scheme."""

import zlib
from collections.abc import Sequence

import msgspec

from rose.bench.weights.peers import SCHEMES, size_of
from rose.bench.weights.synthetic import Step
from weight_transfer.format.chunk import EncodedChunk, chunk_id, encode_chunk, row_ranges
from weight_transfer.format.codec import Level
from weight_transfer.format.manifest import ChunkRef, TensorUpdate, hex_digest

CHUNK_BYTES = 64 << 20


def sizes(steps: Sequence[Step]) -> dict[str, object]:
    """Of one update of these tensors; ours with containers and the manifest's part."""
    changed = sum(step.changed for step in steps)
    weights = sum(step.old.bits.size for step in steps)
    raw = sum(step.old.bits.nbytes for step in steps)
    found: dict[str, object] = {"density": changed / weights, "changed": changed, "raw_bytes": raw}
    totals = {level.value: _all_of_ours(steps, level) for level in Level}
    for name in SCHEMES:
        totals[name] = sum(_theirs(name, step) for step in steps)
    found["bytes"] = totals
    found["bytes_per_change"] = {name: size / max(1, changed) for name, size in totals.items()}
    return found


def _all_of_ours(steps: Sequence[Step], level: Level) -> int:
    """With the manifest as it crosses a link: compressed."""
    made = [_ours(step, level) for step in steps]
    listed = b"\n".join(line for _, line in made)
    return sum(size for size, _ in made) + len(zlib.compress(listed))


def _theirs(name: str, step: Step) -> int:
    # Parts of a stacked tensor are sent row by row; a vector is one row.
    columns = step.old.row_elements if len(step.old.shape) > 1 else step.old.bits.size
    return size_of(name, step.old.bits, step.new.bits, columns) if step.changed else 0


def _ours(step: Step, level: Level) -> tuple[int, bytes]:
    """Bytes of the chunks of a tensor, and its part of the manifest."""
    chunks = [
        encode_chunk(step.old, step.new, r, 0, level) for r in row_ranges(step.old, CHUNK_BYTES)
    ]
    if not step.changed:
        chunks = []
    update = TensorUpdate(
        step.old.name,
        step.old.dtype,
        step.old.shape,
        hex_digest(0),
        hex_digest(1),
        tuple(_reference(chunk) for chunk in chunks),
    )
    listed = msgspec.json.encode(update)
    return sum(len(chunk.encoded) for chunk in chunks), listed


def _reference(chunk: EncodedChunk) -> ChunkRef:
    header = chunk.header
    rows = (header.first_row, header.end_row)
    codec = header.encoding.name.lower()
    return ChunkRef(chunk_id(chunk.encoded), rows, codec, len(chunk.encoded), header.changed)
