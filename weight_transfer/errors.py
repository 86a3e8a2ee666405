"""Errors of weight transfer.

WeightError
├── TensorFormatError   a tensor or a safetensors file cannot be read as bits
├── DeltaFormatError    a delta file does not follow its format
├── ChunkError          a chunk cannot be used
│   ├── ChunkFormatError    its bytes do not follow the wire format
│   ├── ChunkDigestError    its bytes do not have the digest that is its name
│   └── ChunkMissingError   a manifest names it, and the store or caller does not have it
├── ManifestError       a manifest is malformed or does not fit the model
│   ├── SignatureError      it was not signed by the expected key
│   ├── ManifestExpired     its expiry time is over
│   └── AdapterError        its adapter does not fit, or adapters are not taken here
├── ShardError          shards or reports of a trainer's ranks do not make a version
├── WrongBaseError      an update was made for other weights than the active ones
├── DigestMismatchError the weights after an update are not those the publisher computed
├── CatalogError        no published bases and deltas lead to the wanted version
├── LoaderMapError      a checkpoint tensor cannot be found, byte for byte, in the engine
├── ProbeError          the probe cannot run in this engine
├── DeviceMemoryError   a GPU has no memory for an update
├── StoreError          the store refuses: a chunk is not durable or a version exists already
├── BucketError         an object store cannot be opened, or refuses a call
└── TransferError       weights cannot be fetched or served
    ├── FetchError          a version could not be fetched whole
    ├── IndexFormatError    a reply is not a catalog of the job
    ├── StorageError        the disk refuses received chunks
    ├── CacheFullError      a version does not fit into the cache
    ├── ReadLeaseError      a lease request lacks a reader, a version or a lifetime
    └── FanoutError         a group of GPUs cannot pass chunks to each other
        └── GroupBrokenError    its members do not make the same calls
"""


class WeightError(Exception):
    """Base class of all errors that weight_transfer raises on purpose."""


class TensorFormatError(WeightError):
    """Error for a tensor, safetensors file or checkpoint that cannot be read as bits."""


class DeltaFormatError(WeightError):
    """Error for a delta file between two checkpoints that does not follow its format."""


class ChunkError(WeightError):
    """Base class of errors for a chunk that cannot be used; the active version stays as it is."""


class ChunkFormatError(ChunkError):
    """Error for a chunk whose bytes do not follow the wire format, or contradict its manifest."""


class ChunkDigestError(ChunkError):
    """Error for a chunk whose bytes do not have the BLAKE3 digest that is the chunk's name."""


class ChunkMissingError(ChunkError):
    """Error for a chunk that a manifest names and that the store or the caller does not have."""


class ManifestError(WeightError):
    """Error for a manifest that is malformed, or does not fit the model or the version."""


class SignatureError(ManifestError):
    """Error for a manifest or catalog without a valid signature of the expected key."""


class ManifestExpired(ManifestError):  # noqa: N818 -- reads as the state of the manifest
    """Error for a manifest whose expiry time is over."""


class AdapterError(ManifestError):
    """Error for a LoRA adapter that does not fit its base or a replica, and will not fit later."""


class ShardError(WeightError):
    """Error for shards, or reports of a trainer's ranks, that do not make up a whole version."""


class WrongBaseError(WeightError):
    """Error for an update that builds on other weights or another version than the active one."""


class DigestMismatchError(WeightError):
    """Error for weights whose digest after an update is not the one that the publisher signed."""


class CatalogError(WeightError):
    """Error for a catalog that is inconsistent or in which no base and deltas lead to a version."""


class LoaderMapError(WeightError):
    """Error for an engine whose parameters are not what its loader makes of the base checkpoint."""


class ProbeError(WeightError):
    """Error for an engine in which the probe prompt cannot run or would miss changed weights."""


class DeviceMemoryError(WeightError):
    """Error for an update that a GPU has no memory for; no weight was written."""


class StoreError(WeightError):
    """Error for a store or file that refuses: unreadable, full, or a version that exists."""


class BucketError(WeightError):
    """Error for an object store that cannot be opened, or refuses a call."""


class TransferError(WeightError):
    """Base class of errors for weights that cannot be fetched or served."""


class FetchError(TransferError):
    """Error for a version or chunk that no source gave whole.

    Received parts stay on disk for the next try.
    """


class IndexFormatError(TransferError):
    """Error for a reply that is not a valid catalog of the requested job."""


class StorageError(TransferError):
    """Error for a disk that refuses received chunks: full, read-only or failing."""


class CacheFullError(TransferError):
    """Error for a version that does not fit the disk cap, with all unneeded files evicted."""


class ReadLeaseError(TransferError):
    """Error for a lease request that lacks a reader name, a version or a lifetime above 0."""


class FanoutError(TransferError):
    """Error for a group of GPUs in which members cannot pass chunks to each other over NCCL."""


class GroupBrokenError(FanoutError):
    """Error for a GPU group whose members are out of step: it can pass on no more chunks."""
