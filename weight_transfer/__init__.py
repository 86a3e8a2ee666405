"""Weight transfer: sparse, bit-exact versions of weights from a trainer into running engines.

Stages, in the order in which a version passes them:

format    tensors as bits, checkpoints, chunks, signed manifests; `kernels` loop over the bits
publish   a trainer's step becomes chunks and a manifest, durable in a `chunk_store`
serve     versions over HTTP; the `catalog` lists them and finds the cheapest steps to one
fetch     a node gets each object once, from its neighbours or over the slow link
apply     an engine's ranks decode a version, write it into live parameters, and prove the result

`files` has deltas between checkpoints on disk. Engines: `.vllm`, `.sglang`. A trainer whose ranks
hold shards uses `.torch`, or gives pieces of its own (`publish.sharding`).
"""

from weight_transfer.apply.receiver import Receiver, StagedTensor, StagedUpdate
from weight_transfer.chunk_store import ChunkStore, StoredFile, read_chunk
from weight_transfer.errors import (
    AdapterError,
    CatalogError,
    ChunkDigestError,
    ChunkError,
    ChunkFormatError,
    ChunkMissingError,
    DeviceMemoryError,
    DigestMismatchError,
    LoaderMapError,
    ManifestError,
    ManifestExpired,
    ProbeError,
    ShardError,
    SignatureError,
    StoreError,
    TensorFormatError,
    WeightError,
    WrongBaseError,
)
from weight_transfer.format.adapter import base_digest, check_adapter
from weight_transfer.format.checkpoint import read_model_dir, read_safetensors
from weight_transfer.format.chunk import ChunkHeader, chunk_id, decode_chunk, encode_chunk
from weight_transfer.format.delta_codec import Encoding
from weight_transfer.format.digest import Block, digest_of, updated
from weight_transfer.format.manifest import (
    Adapter,
    ChunkRef,
    Manifest,
    OnUpdate,
    TensorUpdate,
    VerifiedManifest,
)
from weight_transfer.format.signing import JobKeys, SigningKey, VerifyKey, key_of
from weight_transfer.format.tensors import TensorBits, bits_of, tensor_bits, tensor_of
from weight_transfer.kernels.processor import Change
from weight_transfer.publish.restore import newest_version, restore
from weight_transfer.publish.sharding import (
    Heads,
    LocalBits,
    LocalTensor,
    Piece,
    column_shard,
    gate_up,
    grouped_qkv,
    piece,
    row_shard,
    stacked,
    vocabulary,
    whole,
)
from weight_transfer.publish.shards import (
    ShardCoordinator,
    ShardEncoder,
    ShardReport,
    ShardSettings,
)
from weight_transfer.publish.version_publisher import VersionPublisher

__all__ = [
    "Adapter",
    "AdapterError",
    "Block",
    "CatalogError",
    "Change",
    "ChunkDigestError",
    "ChunkError",
    "ChunkFormatError",
    "ChunkHeader",
    "ChunkMissingError",
    "ChunkRef",
    "ChunkStore",
    "DeviceMemoryError",
    "DigestMismatchError",
    "Encoding",
    "Heads",
    "JobKeys",
    "LoaderMapError",
    "LocalBits",
    "LocalTensor",
    "Manifest",
    "ManifestError",
    "ManifestExpired",
    "OnUpdate",
    "Piece",
    "ProbeError",
    "Receiver",
    "ShardCoordinator",
    "ShardEncoder",
    "ShardError",
    "ShardReport",
    "ShardSettings",
    "SignatureError",
    "SigningKey",
    "StagedTensor",
    "StagedUpdate",
    "StoreError",
    "StoredFile",
    "TensorBits",
    "TensorFormatError",
    "TensorUpdate",
    "VerifiedManifest",
    "VerifyKey",
    "VersionPublisher",
    "WeightError",
    "WrongBaseError",
    "base_digest",
    "bits_of",
    "check_adapter",
    "chunk_id",
    "column_shard",
    "decode_chunk",
    "digest_of",
    "encode_chunk",
    "gate_up",
    "grouped_qkv",
    "key_of",
    "newest_version",
    "piece",
    "read_chunk",
    "read_model_dir",
    "read_safetensors",
    "restore",
    "row_shard",
    "stacked",
    "tensor_bits",
    "tensor_of",
    "updated",
    "vocabulary",
    "whole",
]
