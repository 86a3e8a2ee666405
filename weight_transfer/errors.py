"""Errors of weight transfer.

WeightError
├── TensorFormatError   a tensor or a safetensors file cannot be read as bits
├── DeltaFormatError    a delta file does not follow its format
├── ChunkError          a chunk cannot be used
│   ├── ChunkFormatError    its bytes do not follow the wire format
│   ├── ChunkDigestError    its bytes are not those its name promises
│   └── ChunkMissingError   a manifest names it and nobody handed it in
├── ManifestError       a manifest is malformed or does not fit the model
│   ├── SignatureError      it was not signed by the expected key
│   └── ManifestExpired     its time is over
├── ShardError          what ranks hold, or report, does not make a version
├── WrongBaseError      an update was made for other weights than the active ones
├── DigestMismatchError the weights after an update are not those the publisher computed
├── CatalogError        what is published does not lead to the wanted version
├── LoaderMapError      a checkpoint tensor cannot be found, byte for byte, in the engine
├── ProbeError          the probe cannot run in this engine
├── DeviceMemoryError   a device has no room for what an update needs there
├── StoreError          the store refuses: a chunk is not durable or a version exists already
└── TransferError       weights cannot be fetched or served
    ├── FetchError          a version could not be fetched whole
    ├── IndexFormatError    a reply is not a catalog of the job
    ├── StorageError        the disk refuses what is received
    ├── CacheFullError      a version does not fit into the cache
    ├── ReadLeaseError          a lease is asked for without a reader, a version or a time
    └── FanoutError         a group of GPUs cannot hand chunks around
        └── GroupBrokenError    its members do not make the same calls
"""


class WeightError(Exception):
    """Root of everything this package raises on purpose."""


class TensorFormatError(WeightError):
    """A tensor or a safetensors file cannot be read as bits."""


class DeltaFormatError(WeightError):
    """A delta file does not follow its format."""


class ChunkError(WeightError):
    """A chunk cannot be used; the active version stays whole."""


class ChunkFormatError(ChunkError):
    """The bytes of a chunk do not follow the wire format."""


class ChunkDigestError(ChunkError):
    """The bytes of a chunk are not those its name promises."""


class ChunkMissingError(ChunkError):
    """A chunk named by a manifest is absent."""


class ManifestError(WeightError):
    """A manifest is malformed or does not fit the model."""


class SignatureError(ManifestError):
    """A manifest was not signed by the expected key."""


class ManifestExpired(ManifestError):  # noqa: N818 -- reads as the state of the manifest
    """A manifest's time is over."""


class ShardError(WeightError):
    """Shards, or reports, of a trainer's ranks that do not make a version."""


class WrongBaseError(WeightError):
    """An update was made for other weights than the active ones."""


class DigestMismatchError(WeightError):
    """Weights after an update are not those the publisher computed."""


class CatalogError(WeightError):
    """Published versions that do not lead to the wanted one."""


class LoaderMapError(WeightError):
    """A checkpoint tensor cannot be found, byte for byte, in the engine."""


class ProbeError(WeightError):
    """The probe cannot run in this engine."""


class DeviceMemoryError(WeightError):
    """A device has no room for what an update needs there; nothing was written."""


class StoreError(WeightError):
    """The store refuses: a chunk is not durable, or a version exists already."""


class TransferError(WeightError):
    """Weights cannot be fetched or served."""


class FetchError(TransferError):
    """A version could not be fetched whole; received parts stay and are not fetched again."""


class IndexFormatError(TransferError):
    """Reply that is not a catalog of this job."""


class StorageError(TransferError):
    """The disk refuses what is received."""


class CacheFullError(TransferError):
    """A version does not fit, even after everything evictable was evicted."""


class ReadLeaseError(TransferError):
    """A lease needs a reader, a version and a time."""


class FanoutError(TransferError):
    """A group of GPUs cannot hand chunks around."""


class GroupBrokenError(FanoutError):
    """The members do not make the same calls: nothing can be handed around any more."""
