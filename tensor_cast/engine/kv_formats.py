"""How a KV cache stores a token: bytes by format, for heads of K and V, for a latent, and for an indexer's key.

Sources: vLLM 0.30 ``v1/kv_cache_interface.py``; vllm-ascend of August 2026 ``attention/utils.py`` and
``core/kv_cache_interface.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensor_cast.dtypes import bits_of
from tensor_cast.errors import ConfigError
from tensor_cast.model_config import AttentionKind, ModelConfig
from tensor_cast.registry import Registry
from tensor_cast.units import ceil_div

__all__ = ["KV_DTYPES", "KV_FORMATS", "KVFormat", "indexer_token_bytes", "resolve_kv_format"]


@dataclass(frozen=True)
class KVFormat:
    """One way to store a token.

    Args:
        name: canonical name.
        bits: of one stored element.
        heads: ``(head_dim, v_head_dim)`` -> bytes of K and V of one head; None where the format is for latents alone.
        latent: ``(kv_lora_rank, rope_dim)`` -> bytes of a latent with its rope key; None where it is for heads alone.
    """

    name: str
    bits: int
    heads: Callable[[int, int], int] | None
    latent: Callable[[int, int], int] | None

    def __reduce__(self) -> tuple[Callable[[str], KVFormat], tuple[str]]:
        """By name: functions do not travel between processes."""
        return _of_name, (self.name,)


def _of_name(name: str) -> KVFormat:
    return KV_FORMATS.get(name)


KV_FORMATS: Registry[KVFormat] = Registry("KV cache dtype")


def _plain(name: str, *aliases: str) -> None:
    # Scales of the 8-bit types are static, per tensor or channel, and take no room in the cache.
    bits = bits_of(name)
    form = KVFormat(name, bits, lambda k, v: (k + v) * bits // 8, lambda c, r: (c + r) * bits // 8)
    KV_FORMATS.register(name, *aliases)(form)


def _scaled_heads(name: str, bits: int) -> None:
    # A float32 scale for K and one for V, of each token and head.
    KV_FORMATS.register(name)(KVFormat(name, bits, lambda k, v: (k + v) * bits // 8 + 8, None))


_plain("bfloat16", "bf16")
_plain("float16", "fp16", "half")
_plain("float32", "fp32")
_plain("float8_e4m3fn", "fp8", "fp8_e4m3")
_plain("float8_e5m2", "fp8_e5m2")
_plain("int8")
_scaled_heads("int8_per_token_head", 8)
_scaled_heads("fp8_per_token_head", 8)
_scaled_heads("int4_per_token_head", 4)
# Four bits an element, an fp8 scale for each 16.
KV_FORMATS.register("nvfp4")(KVFormat("nvfp4", 4, lambda k, v: k // 2 + k // 16 + v // 2 + v // 16, None))
# An fp8 latent with a float32 scale for each 128 elements, and a bf16 rope key: 512 + 16 + 128 = 656.
KV_FORMATS.register("fp8_ds_mla")(KVFormat("fp8_ds_mla", 8, None, lambda c, r: c + 4 * ceil_div(c, 128) + 2 * r))
# A 4-bit latent with an fp8 scale for each 16 elements, and an fp8 rope key: 256 + 32 + 64 = 352.
KV_FORMATS.register("nvfp4_ds_mla")(KVFormat("nvfp4_ds_mla", 4, None, lambda c, r: c // 2 + c // 16 + r))

#: Canonical names of the formats.
KV_DTYPES = tuple(dict.fromkeys(KV_FORMATS.get(name).name for name in KV_FORMATS))


def resolve_kv_format(model: ModelConfig, kv_dtype: str) -> KVFormat:
    """The format that ``model``'s cache has when ``kv_dtype`` is asked for.

    Sparse attention stores 8-bit latents as ``fp8_ds_mla``, whatever the 8-bit type is called (vLLM's sparse backends;
    the sparse C8 of vllm-ascend has the same 656 bytes). ``nvfp4`` of a latent is ``nvfp4_ds_mla``.

    Raises:
        ConfigError: no such format, or one that does not go with the model's attention.
    """
    form = KV_FORMATS.find(kv_dtype)
    if form is None:
        raise ConfigError(f"unknown KV cache dtype {kv_dtype!r}; allowed are {', '.join(KV_DTYPES)}")
    if model.attention is AttentionKind.DSA and form.bits == 8 and form.latent is not None:
        return KV_FORMATS.get("fp8_ds_mla")
    if model.attention is not AttentionKind.GQA and form.name == "nvfp4":
        return KV_FORMATS.get("nvfp4_ds_mla")
    stores = form.heads if model.attention is AttentionKind.GQA else form.latent
    if stores is None:
        what = "latents" if form.heads is None else "heads of K and V"
        raise ConfigError(
            f"KV cache dtype {form.name} stores {what}; {model.model_id} uses {model.attention} attention; allowed are "
            + ", ".join(name for name in KV_DTYPES if _fits(KV_FORMATS.get(name), model.attention))
        )
    return form


def _fits(form: KVFormat, attention: AttentionKind) -> bool:
    return (form.heads if attention is AttentionKind.GQA else form.latent) is not None


def indexer_token_bytes(head_dim: int, form: KVFormat, *, ascend: bool) -> int:
    """Bytes of one token in the cache of an indexer, whose keys have ``head_dim`` elements.

    vLLM keeps fp8 keys with a float32 scale for each 128 elements, whatever the main cache has; vllm-ascend keys in
    the 16 bits of the main cache, or with an 8-bit one int8 keys and a float16 scale (float32 on the A5 generation).
    """
    if not ascend:
        return head_dim + 4 * ceil_div(head_dim, 128)
    return 2 * head_dim if form.bits >= 16 else head_dim + 2
