"""Which parameter is split how: the model's own tensor-parallel plan, overlaid with what the structure says.

The plan is the instance's ``tp_plan`` (Transformers). Where engines do it differently or the plan is silent, structure
decides: attention by heads (MLA keeps its down-projections whole), experts over ep and moe_tp, gated MLPs column- then
row-wise, embedding and head by vocabulary. What neither names stays whole on every rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from torch import nn

from tensor_cast.errors import UnsupportedModelError
from tensor_cast.layers.structure import attention_output, head_width, is_experts, is_gqa, is_mla


@dataclass(frozen=True)
class Split:
    """One split dimension of a parameter.

    Args:
        dim: the dimension.
        axis: ``tp | kv | kv_b | vocab | ep | moe_tp``; ``kv`` is tp by whole KV heads (replicated when there are more
            ranks than heads), ``kv_b`` is tp unless the DCP semantics gathers value heads.
        sections: equal parts packed along the dimension, each split on its own (gate and up in one tensor).
        units: whole things (heads) that must not be cut; 0 when every element stands alone.
    """

    dim: int
    axis: str
    sections: int = 1
    units: int = 0


@dataclass
class ModuleRule:
    """What happens to one module under tensor parallelism.

    Args:
        params: splits by parameter name.
        partial: its output is a partial sum over tp (and a bias belongs to one rank only).
        gather: its output is gathered along the last dimension.
        slice_input: its input is whole and this rank's slice is taken first.
        over_all: the projection whose output it must see whole: that is gathered first and sliced again behind.
    """

    params: dict[str, tuple[Split, ...]] = field(default_factory=dict)
    partial: bool = False
    gather: bool = False
    slice_input: bool = False
    over_all: str = ""


def _column(linear: nn.Linear, axis: str = "tp", sections: int = 1, units: int = 0) -> ModuleRule:
    split = (Split(0, axis, sections, units),)
    return ModuleRule({"weight": split, **({} if linear.bias is None else {"bias": split})})


def _row(axis: str = "tp", sections: int = 1, units: int = 0) -> ModuleRule:
    return ModuleRule({"weight": (Split(1, axis, sections, units),)}, partial=True)


def _rule_of_style(style: str, path: str, module: nn.Module) -> ModuleRule | None:
    """The rule that a plan's style means for a module; None when the module stays whole.

    Raises:
        UnsupportedModelError: the style is not one we know.
    """
    if style in _WHOLE:
        return None
    if style == "all_reduce":
        return ModuleRule(partial=True)
    if isinstance(module, nn.Linear):
        match style:
            case "colwise":
                return _column(module)
            case "packed_colwise":
                return _column(module, sections=2)
            case "colwise_gather_output":
                rule = _column(module)
                rule.gather = True
                return rule
            case "rowwise":
                return _row()
            case "packed_rowwise":
                return _row(sections=2)
            case "rowwise_split_input":
                rule = _row()
                rule.slice_input = True
                return rule
    raise UnsupportedModelError(
        f"the model's shard plan gives {path} ({type(module).__name__}) the style {style!r}, which is not known here."
    )


#: Styles that leave a module whole under engines' rules, or that structure handles (experts, embedding).
_WHOLE = frozenset(
    {
        "replicate",
        "replicated",
        "replicated_with_grad_allreduce",
        "mla_kv_a_proj",
        "local",
        "local_params",
        "moe_tp_experts",
        "grouped_gemm",
        "ep_dispatch_experts",
        "moe_identity_expert",
        "embedding_rowwise",
    }
)
_KNOWN = _WHOLE | {
    "colwise",
    "rowwise",
    "packed_colwise",
    "packed_rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "all_reduce",
}


class ShardPlan:
    """Rules by module path; the same for every layout.

    Args:
        tp_plan, ep_plan: the instance's plans, path pattern -> style.
        embedding, head: paths of the input embedding and the output projection.

    Raises:
        UnsupportedModelError: a plan holds a style that is not known.
    """

    def __init__(self, tp_plan: dict[str, str], ep_plan: dict[str, str], *, embedding: str, head: str) -> None:
        for pattern, style in (*tp_plan.items(), *ep_plan.items()):
            if style not in _KNOWN:
                raise UnsupportedModelError(
                    f"the model's shard plan gives {pattern} the style {style!r}, which is not known here."
                )
        self._styles = tp_plan
        self.embedding = embedding
        self.head = head

    def rules(self, path: str, region: nn.Module) -> dict[str, ModuleRule]:
        """Rules of the modules under ``region``, whose own path is ``path``; a module without one stays whole."""
        rules: dict[str, ModuleRule] = {}
        for name, module in region.named_modules():
            full = ".".join(p for p in (path, name) if p)
            if full in rules:
                continue
            if full == self.embedding:
                rules[full] = ModuleRule({"weight": (Split(0, "vocab"),)})
            elif full == self.head:
                rules[full] = _column(module, "vocab")
                rules[full].gather = True
            elif is_mla(module):
                _mla(full, module, rules)
            elif is_gqa(module):
                self._gqa(full, module, rules)
            elif is_experts(module):
                rules[full] = _experts(full, module)
            elif not _gated_mlp(full, module, rules):
                style = self._styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", full))
                rule = _rule_of_style(style, full, module) if style else None
                if rule:
                    rules[full] = rule
        return rules

    def _gqa(self, path: str, module: nn.Module, rules: dict[str, ModuleRule]) -> None:
        norm = getattr(module, "q_norm", None)
        width = norm.weight.numel() if getattr(norm, "weight", None) is not None else 0
        if width == module.q_proj.out_features != head_width(module):
            # A norm over all heads at once: gathered for it, as engines do (vLLM's OLMo-2).
            rules[f"{path}.q_norm"] = ModuleRule(over_all=f"{path}.q_proj")
            rules[f"{path}.k_norm"] = ModuleRule(over_all=f"{path}.k_proj")
        head_dim = head_width(module)
        out = attention_output(module)
        heads = getattr(module, out).in_features // head_dim
        if _normed(module, heads * head_dim, but=("q_norm", "k_norm", "q_layernorm", "k_layernorm")):
            return
        kv_heads = module.k_proj.out_features // head_dim
        rules[f"{path}.q_proj"] = _column(module.q_proj, units=heads)
        rules[f"{path}.k_proj"] = _column(module.k_proj, "kv", units=kv_heads)
        rules[f"{path}.v_proj"] = _column(module.v_proj, "kv", units=kv_heads)
        rules[f"{path}.{out}"] = _row(units=heads)
        self._gates(path, module, heads, heads * head_dim, rules)
        sinks = ("sinks",) if module._parameters.get("sinks") is not None else ()
        vectors = _head_vectors(module, heads, head_dim)
        if sinks or vectors:
            rules[path] = ModuleRule({name: (Split(0, "tp"),) for name in dict.fromkeys((*sinks, *vectors))})

    def _gates(self, path: str, module: nn.Module, heads: int, width: int, rules: dict[str, ModuleRule]) -> None:
        """Further projections of the hidden states: to one number per head, or per element of the heads' outputs."""
        hidden = module.q_proj.in_features
        for name, child in module.named_children():
            known = f"{path}.{name}" in rules or not isinstance(child, nn.Linear)
            if not known and child.in_features == hidden and child.out_features in (heads, width):
                rules[f"{path}.{name}"] = _column(child, units=heads)


def _normed(module: nn.Module, width: int, but: tuple[str, ...] = ()) -> bool:
    """Whether a norm runs over ``width`` elements inside the module: each rank needs them all, nothing is split."""
    norms = (c for name, c in module.named_children() if "norm" in type(c).__name__.lower() and name not in but)
    return any(p.dim() == 1 and p.shape[0] == width for norm in norms for p in norm.parameters(recurse=False))


def _head_vectors(module: nn.Module, heads: int, head_dim: int) -> tuple[str, ...]:
    """Vectors with an element per query head that the attention module holds itself (biases of gates, temperatures)."""
    if heads == head_dim:
        return ()  # an element per head, or one per element of a head: the shapes do not tell
    return tuple(n for n, p in module._parameters.items() if p is not None and tuple(p.shape) == (heads,))


def _mla(path: str, module: nn.Module, rules: dict[str, ModuleRule]) -> None:
    heads = module.kv_b_proj.out_features // (module.qk_nope_head_dim + module.v_head_dim)
    query = "q_proj" if getattr(module, "q_proj", None) is not None else "q_b_proj"
    rules[f"{path}.{query}"] = _column(getattr(module, query), units=heads)
    rules[f"{path}.kv_b_proj"] = _column(module.kv_b_proj, "kv_b", units=heads)
    rules[f"{path}.{attention_output(module)}"] = _row(units=heads)


def _gated_mlp(path: str, module: nn.Module, rules: dict[str, ModuleRule]) -> bool:
    children = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    down = children.get("down_proj")
    if down is None or _normed(module, down.in_features):
        return False
    up, gate, packed = children.get("up_proj"), children.get("gate_proj"), children.get("gate_up_proj")
    if up is not None and up.out_features == down.in_features:
        for name, child in (("up_proj", up), ("gate_proj", gate)):
            if child is not None:
                rules[f"{path}.{name}"] = _column(child)
    elif packed is not None and packed.out_features == 2 * down.in_features:
        rules[f"{path}.gate_up_proj"] = _column(packed, sections=2)
    else:
        return False
    rules[f"{path}.down_proj"] = _row()
    return True


def _experts(path: str, module: nn.Module) -> ModuleRule:
    """Experts over ep, and inside each expert the intermediate dimension over moe_tp."""
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedModelError(f"{path} normalises each expert's output, which comes in a later version.")
    transposed = getattr(module, "is_transposed", False)
    gated = getattr(module, "has_gate", True)
    sections = 2 if gated and getattr(module, "is_concatenated", True) else 1
    # Interleaved gate and up stand in pairs, which must stay together.
    up, up_dim = ("gate_up_proj" if gated else "up_proj"), (2 if transposed else 1)
    pairs = module._parameters[up].shape[up_dim] // 2 if gated and sections == 1 else 0
    inner = Split(0, "ep")
    params = {
        up: (inner, Split(up_dim, "moe_tp", sections, pairs)),
        "down_proj": (inner, Split(1 if transposed else 2, "moe_tp")),
    }
    if module._parameters.get(f"{up}_bias") is not None:
        params[f"{up}_bias"] = (inner, Split(1, "moe_tp", sections, pairs))
        params["down_proj_bias"] = (inner,)
    return ModuleRule(params, partial=True)
