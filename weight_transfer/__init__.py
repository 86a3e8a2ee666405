"""Sparse, bit-exact weight transfer: codec, chunks, manifests, receiver; vLLM in `.vllm`."""

from weight_transfer.checkpoint import read_model_dir, read_safetensors
from weight_transfer.chunk import Change, ChunkHeader, chunk_id, decode_chunk, encode_chunk
from weight_transfer.codec import Encoding
from weight_transfer.digest import digest_of, updated
from weight_transfer.errors import (
    CatalogError,
    ChunkDigestError,
    ChunkError,
    ChunkFormatError,
    ChunkMissingError,
    DigestMismatchError,
    LoaderMapError,
    ManifestError,
    ManifestExpired,
    ProbeError,
    SignatureError,
    StoreError,
    TensorFormatError,
    WeightError,
    WrongBaseError,
)
from weight_transfer.manifest import ChunkRef, Manifest, TensorUpdate
from weight_transfer.publisher import Publisher
from weight_transfer.receiver import Receiver, StagedTensor, StagedUpdate
from weight_transfer.signing import SigningKey, VerifyKey
from weight_transfer.store import ChunkStore, StoredFile, read_chunk
from weight_transfer.tensors import TensorBits, bits_of, tensor_bits, tensor_of

__all__ = [
    "CatalogError",
    "Change",
    "ChunkDigestError",
    "ChunkError",
    "ChunkFormatError",
    "ChunkHeader",
    "ChunkMissingError",
    "ChunkRef",
    "ChunkStore",
    "DigestMismatchError",
    "Encoding",
    "LoaderMapError",
    "Manifest",
    "ManifestError",
    "ManifestExpired",
    "ProbeError",
    "Publisher",
    "Receiver",
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
    "decode_chunk",
    "digest_of",
    "encode_chunk",
    "read_chunk",
    "read_model_dir",
    "read_safetensors",
    "tensor_bits",
    "tensor_of",
    "updated",
]
