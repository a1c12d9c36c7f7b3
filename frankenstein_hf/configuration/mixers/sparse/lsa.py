"""Spec of `lsa`: keys found by semantic clusters."""

from dataclasses import dataclass, replace
from typing import Any, Self

from ...component import ATTENTION_PROJECTIONS, MixerSpec, Params, param
from ..dense.standard import kv_floats


@dataclass(frozen=True, kw_only=True)
class LSAParams(Params):
    """Parameters of `lsa`."""

    num_long_range: int = param(2048, "keys a query finds beyond its own block and the sinks", minimum=1)
    num_buckets: int = param(512, "buckets it opens for them at most; raised to num_long_range / pool_size", minimum=1)
    num_sinks: int = param(4, "first tokens of a document that stay visible", minimum=0)
    pool_size: int = param(4, "consecutive keys that clustering starts from", minimum=1)
    cluster_block: int = param(512, "tokens of a block that is clustered; the own one is seen whole", minimum=2)
    keys_per_bucket: int = param(8, "keys of a bucket on average", minimum=1)
    max_keys_per_bucket: int = param(16, "keys of a bucket at most, ≥ 2 · keys_per_bucket", minimum=1)

    @property
    def buckets_per_block(self) -> int:
        """Buckets a whole block is clustered into."""
        return self.cluster_block // self.keys_per_bucket

    def resolve(self, config: Any, explicit: frozenset[str]) -> Self:
        if self.cluster_block % self.keys_per_bucket or self.keys_per_bucket % self.pool_size:
            raise ValueError(
                f"pool_size={self.pool_size} must divide keys_per_bucket={self.keys_per_bucket}, and that "
                f"cluster_block={self.cluster_block}."
            )
        if self.max_keys_per_bucket < 2 * self.keys_per_bucket:
            raise ValueError(
                f"max_keys_per_bucket={self.max_keys_per_bucket} must be at least 2 · keys_per_bucket="
                f"{2 * self.keys_per_bucket}, else clustering may end before keys_per_bucket is reached."
            )
        return replace(self, num_buckets=max(self.num_buckets, -(-self.num_long_range // self.pool_size)))


def _floats(params: LSAParams, config: Any) -> float:
    """Keys and values, a centroid a bucket, and a bucket number and a rank in it for every key."""
    return kv_floats(params, config) + config.num_key_value_heads * config.head_dim / params.keys_per_bucket + 2


SPECS = (
    MixerSpec(
        name="lsa",
        family="sparse",
        summary="Softmax attention to the own block, to sinks, and to keys found through clusters of earlier keys.",
        reference="Latent Sparse Attention (native variant)",
        params=LSAParams,
        implementation="mixers.sparse.lsa:LatentSparseAttention",
        transfer=ATTENTION_PROJECTIONS,
        qk_norm=True,
        cache=frozenset({"kv", "index"}),
        token_size=_floats,
        parameter_free=lambda params: True,
        reach=lambda params: 1,
        small_params={
            "num_long_range": 3, "num_buckets": 2, "num_sinks": 1, "pool_size": 1, "cluster_block": 4,
            "keys_per_bucket": 2, "max_keys_per_bucket": 4,
        },
    ),
)  # fmt: skip
