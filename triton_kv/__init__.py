"""triton_kv: a KV cache that is reserved as address space, captured into CUDA graphs, and only then sized and extended.

    cache = triton_kv.KVCache.reserve(spec, num_layers=32, block_size=16)
    cache.extend(1)                                # what warm-up and capture touch
    ...                                            # capture CUDA graphs
    cache.extend(triton_kv.plan_blocks(cache))     # measured, not guessed; the graphs stay valid

Importing it initialises no GPU. docs/design.md has the words, the layouts and the promises.
"""

from triton_kv.attention import paged_attention, paged_attention_reference
from triton_kv.backends import BackendStatement, groups_from_backends
from triton_kv.cache import CheckReport, CommittedViews, KVCache
from triton_kv.compaction import CompactionPlan
from triton_kv.compilation import compile_kernels
from triton_kv.configs import specs_from_config
from triton_kv.errors import (
    AddressSpaceExhausted,
    Asleep,
    BadAccess,
    Broken,
    CaptureError,
    Closed,
    DriverError,
    Forked,
    InconsistentRanks,
    NothingCommitted,
    OutOfMemory,
    RankError,
    RankLost,
    TritonKVError,
    Unavailable,
)
from triton_kv.extensible import ExtensibleTensor, Freed
from triton_kv.geometry import BufferGeometry, CacheGeometry, PlacedLayer, arrange
from triton_kv.groups import LayerGroup, equal_groups
from triton_kv.layer import LayerCache, StateCache
from triton_kv.layout import CacheLayout
from triton_kv.ledger import MemoryLedger, MemoryReader, MemoryReading, StageRecord
from triton_kv.memory import (
    AllocatedMemory,
    FakeMemory,
    FaultyMemory,
    HandlePolicy,
    HostMemory,
    PoisonedMemory,
    VirtualMemory,
    open_memory,
    probe,
)
from triton_kv.merging import merge_attention, merge_attention_reference
from triton_kv.metadata import AttentionBuffers, AttentionMetadata
from triton_kv.plan import AttentionPlan
from triton_kv.ranks import agree
from triton_kv.rope import rope_and_write_kv, rope_and_write_kv_reference
from triton_kv.sizing import CacheCost, CacheShare, Plan, fit_blocks, fit_caches, plan_blocks
from triton_kv.spec import AttentionSpec, BlockTensor, MambaSpec, MLASpec, StateSpec, StateTensor
from triton_kv.stats import CacheStats
from triton_kv.store import CoalesceReport, MemoryChange, SleepReport, WakeReport
from triton_kv.version import __version__
from triton_kv.writing import write_kv, write_kv_reference

__all__ = [
    "AddressSpaceExhausted",
    "AllocatedMemory",
    "Asleep",
    "AttentionBuffers",
    "AttentionMetadata",
    "AttentionPlan",
    "AttentionSpec",
    "BackendStatement",
    "BadAccess",
    "BlockTensor",
    "Broken",
    "BufferGeometry",
    "CacheCost",
    "CacheGeometry",
    "CacheLayout",
    "CacheShare",
    "CacheStats",
    "CaptureError",
    "CheckReport",
    "Closed",
    "CoalesceReport",
    "CommittedViews",
    "CompactionPlan",
    "DriverError",
    "ExtensibleTensor",
    "FakeMemory",
    "FaultyMemory",
    "Forked",
    "Freed",
    "HandlePolicy",
    "HostMemory",
    "InconsistentRanks",
    "KVCache",
    "LayerCache",
    "LayerGroup",
    "MLASpec",
    "MambaSpec",
    "MemoryChange",
    "MemoryLedger",
    "MemoryReader",
    "MemoryReading",
    "NothingCommitted",
    "OutOfMemory",
    "PlacedLayer",
    "Plan",
    "PoisonedMemory",
    "RankError",
    "RankLost",
    "SleepReport",
    "StageRecord",
    "StateCache",
    "StateSpec",
    "StateTensor",
    "TritonKVError",
    "Unavailable",
    "VirtualMemory",
    "WakeReport",
    "__version__",
    "agree",
    "arrange",
    "compile_kernels",
    "equal_groups",
    "fit_blocks",
    "fit_caches",
    "groups_from_backends",
    "merge_attention",
    "merge_attention_reference",
    "open_memory",
    "paged_attention",
    "paged_attention_reference",
    "plan_blocks",
    "probe",
    "rope_and_write_kv",
    "rope_and_write_kv_reference",
    "specs_from_config",
    "write_kv",
    "write_kv_reference",
]
