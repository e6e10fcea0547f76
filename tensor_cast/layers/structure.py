"""Recognising the parts of a decoder layer by their structure, whatever the architecture calls its classes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tensor_cast.errors import UnsupportedModelError

_QKV = ("q_proj", "k_proj", "v_proj")
_OUT = ("o_proj", "out_proj", "dense")
_HEAD_WIDTH = ("head_dim", "head_size", "attention_head_size")
_PACKED_QKV = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "att_proj")


@dataclass(frozen=True)
class LayerRegions:
    """Names of a decoder layer's children that are traced on their own; the rest of the layer is glue."""

    attention: str
    ffn: tuple[str, ...]


def attention_output(module: nn.Module) -> str | None:
    """Name of the output projection of an attention module."""
    return next((name for name in _OUT if isinstance(getattr(module, name, None), nn.Linear)), None)


def head_width(module: nn.Module) -> int:
    """Width of one head's query and key, under whatever name the module keeps it.

    Raises:
        UnsupportedModelError: under none that is known here.
    """
    found = next((getattr(module, n) for n in _HEAD_WIDTH if isinstance(getattr(module, n, None), int)), 0)
    if not found:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not say how wide a head is ({', '.join(_HEAD_WIDTH)})."
        )
    return found


def is_mla(module: nn.Module) -> bool:
    """Whether the module attends over a compressed latent (multi-head latent attention)."""
    return isinstance(getattr(module, "kv_b_proj", None), nn.Linear) and hasattr(module, "expand_kv")


def is_sparse(module: nn.Module) -> bool:
    """Whether the module attends to tokens that an indexer chose (DSA), its own or that of an earlier layer."""
    return is_mla(module) and hasattr(module, "indexer")


def is_gqa(module: nn.Module) -> bool:
    """Whether the module has separate query, key and value projections."""
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in _QKV) and bool(attention_output(module))


def is_attention(module: nn.Module) -> bool:
    """Whether the module is attention of a kind we know."""
    packed = packed_projection(module) is not None and "attention" in type(module).__name__.lower()
    return is_mla(module) or is_gqa(module) or packed


def packed_projection(module: nn.Module) -> str | None:
    """Name of the projection of an attention module that yields query, key and value in one."""
    return next((name for name in _PACKED_QKV if isinstance(getattr(module, name, None), nn.Module)), None)


def is_experts(module: nn.Module) -> bool:
    """Whether the module holds stacked expert weights: three-dimensional up and down projections."""
    down = module._parameters.get("down_proj")
    up = module._parameters.get("gate_up_proj", module._parameters.get("up_proj"))
    return down is not None and up is not None and down.dim() == 3 and up.dim() == 3


def has_weights(module: nn.Module) -> bool:
    """Whether the tree holds linear layers or experts."""
    return any(isinstance(child, nn.Linear) or is_experts(child) for child in module.modules())


def find_layers(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """Path and list of the decoder layers.

    Raises:
        UnsupportedModelError: there is no list of ``count`` layers.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and has_weights(module[0]):
            return path, module
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {count} decoder layers; it cannot be traced.")


def find_regions(path: str, layer: nn.Module) -> LayerRegions:
    """The attention and feed-forward children of a decoder layer.

    Raises:
        UnsupportedModelError: no child is attention (linear attention, state-space layers), or more than one is.
    """
    attention = [name for name, child in layer.named_children() if is_attention(child)]
    others = [n for n, c in layer.named_children() if n not in attention and not is_attention(c) and has_weights(c)]
    if len(attention) != 1:
        kinds = ", ".join(f"{n} ({type(c).__name__})" for n, c in layer.named_children() if has_weights(c))
        raise UnsupportedModelError(
            f"layer {path} has {len(attention) or 'no'} softmax attention of a known form among its parts [{kinds}]; "
            "need one with q_proj, k_proj, v_proj (or one packed projection) and an output projection, or latent "
            "attention; linear attention, state-space and encoder layers come in a later version."
        )
    return LayerRegions(attention[0], tuple(others))
