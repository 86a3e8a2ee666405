"""Sparse, bit-exact weight transfer: codec, chunks, manifests, receiver.

Engines: `.vllm`. Trainers whose ranks hold shards: `.torch`, or pieces of one's own.
"""

from weight_transfer.blocks import Block
from weight_transfer.checkpoint import read_model_dir, read_safetensors
from weight_transfer.chunk import Change, ChunkHeader, chunk_id, decode_chunk, encode_chunk
from weight_transfer.codec import Encoding
from weight_transfer.coordinator import ShardCoordinator
from weight_transfer.digest import digest_of, updated
from weight_transfer.errors import (
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
from weight_transfer.local import LocalBits, LocalTensor
from weight_transfer.manifest import ChunkRef, Manifest, OnUpdate, TensorUpdate
from weight_transfer.megatron import Heads, gate_up, grouped_qkv, vocabulary
from weight_transfer.publisher import Publisher
from weight_transfer.receiver import Receiver, StagedTensor, StagedUpdate
from weight_transfer.shard_encoder import ShardEncoder, ShardSettings
from weight_transfer.shard_report import ShardReport
from weight_transfer.shards import Piece, column_shard, piece, row_shard, stacked, whole
from weight_transfer.signing import SigningKey, VerifyKey
from weight_transfer.store import ChunkStore, StoredFile, read_chunk
from weight_transfer.tensors import TensorBits, bits_of, tensor_bits, tensor_of

__all__ = [
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
    "LoaderMapError",
    "LocalBits",
    "LocalTensor",
    "Manifest",
    "ManifestError",
    "ManifestExpired",
    "OnUpdate",
    "Piece",
    "ProbeError",
    "Publisher",
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
    "VerifyKey",
    "WeightError",
    "WrongBaseError",
    "bits_of",
    "chunk_id",
    "column_shard",
    "decode_chunk",
    "digest_of",
    "encode_chunk",
    "gate_up",
    "grouped_qkv",
    "piece",
    "read_chunk",
    "read_model_dir",
    "read_safetensors",
    "row_shard",
    "stacked",
    "tensor_bits",
    "tensor_of",
    "updated",
    "vocabulary",
    "whole",
]
