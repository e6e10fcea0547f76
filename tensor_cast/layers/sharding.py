"""One rank's module out of the whole model's: parameters cut by the plan, collectives where partial results meet.

The same code cuts real tensors (by slicing) and fake ones (by shape), so that the program that is traced is the program
that can be executed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tensor_cast.engine.dcp import get_semantics
from tensor_cast.errors import LegalityError, UnsupportedModelError
from tensor_cast.ir.record import ParamSpec, Role
from tensor_cast.layers import indexer, mla
from tensor_cast.layers.attention import HeadsCore
from tensor_cast.layers.collectives import all_gather, all_reduce
from tensor_cast.layers.context import ParallelContext
from tensor_cast.layers.embedding import make_vocab_parallel
from tensor_cast.layers.modules import clone_tree, on_first_tensor, path_of, wrap_forward
from tensor_cast.layers.moe import ExpertsCore, split_range
from tensor_cast.layers.plan import ModuleRule, ShardPlan, Split
from tensor_cast.layers.structure import (
    attention_output,
    head_width,
    is_attention,
    is_experts,
    is_gqa,
    is_mla,
    is_sparse,
    packed_projection,
)
from tensor_cast.quant import padded_vocab

#: Names under which attention modules count their heads, of queries and of keys.
_QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def _need(condition: bool, rule: str, need: str, have: str) -> None:
    if not condition:
        raise LegalityError(rule, need, have, "choose a tensor parallel size that fits the model")


class Sharder:
    """Cuts regions of one model for one rank.

    Args:
        plan: rules by path.
        ctx: the rank.
        names: first name of each parameter by identity, from the whole model; tells tied ones.

    ``params`` maps the full name of every parameter met to its :class:`ParamSpec`; ``whole`` lists modules that hold
    weights and were left whole.
    """

    def __init__(self, plan: ShardPlan, ctx: ParallelContext, names: dict[int, str]) -> None:
        self._plan = plan
        self._ctx = ctx
        self._names = names
        self._cut: dict[tuple[int, tuple[Split, ...]], nn.Parameter] = {}
        self.params: dict[str, ParamSpec] = {}
        self.whole: list[str] = []

    # -- regions ------------------------------------------------------------------------------------------------
    def region(self, module: nn.Module, path: str) -> nn.Module:
        """A cut copy of a region: embedding, attention, feed-forward block or head. The original stays whole."""
        clone = clone_tree(module, path)
        self.cut_in_place(clone, path)
        return clone

    def cut_in_place(self, region: nn.Module, path: str) -> None:
        """Cut a region that is already a copy."""
        rules = self._plan.rules(path, region)
        routed = any(is_experts(m) for m in region.modules())
        experts = {m: m.num_experts for m in region.modules() if is_experts(m)}
        for module in region.modules():
            full = path_of(module)
            assert full is not None
            self._cut_module(full, module, rules.get(full), routed)
        for module in region.modules():
            if is_experts(module):
                module.__dict__["experts_core"] = ExpertsCore.of(module, experts[module], self._ctx)
            elif is_attention(module):
                self._install_attention(module, rules)
        self._join(region, rules, routed)

    def _cut_module(self, path: str, module: nn.Module, rule: ModuleRule | None, routed: bool) -> None:
        split_any = False
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is None or name in module._non_persistent_buffers_set:
                    continue
                splits = rule.params.get(name, ()) if rule else ()
                kind[name] = self._cut_tensor(path, name, tensor, splits, self._role(path, module, name, routed))
                split_any |= bool(splits)
        if not split_any and any(t is not None and t.dim() > 1 for t in module._parameters.values()):
            self.whole.append(path)

    def _role(self, path: str, module: nn.Module, name: str, routed: bool) -> Role:
        if path == self._plan.head:
            return Role.LM_HEAD if name == "weight" else Role.OTHER
        if isinstance(module, nn.Embedding):
            return Role.EMBEDDING
        if is_experts(module):
            return Role.EXPERTS if module._parameters[name].dim() == 3 else Role.OTHER
        if "norm" in type(module).__name__.lower():
            return Role.NORM
        if isinstance(module, nn.Linear):
            # Engines multiply by these two of an indexer together and in the model's dtype, whatever the checkpoint.
            if name != "weight" or path.endswith(indexer.UNQUANTISED):
                return Role.OTHER
            return Role.ROUTER if routed and module.weight.shape[0] == 1 else Role.LINEAR
        tensor = module._parameters.get(name)
        return Role.ROUTER if routed and tensor is not None and tensor.dim() == 2 else Role.OTHER

    # -- tensors ------------------------------------------------------------------------------------------------
    def _ways(self, split: Split, length: int, name: str) -> tuple[int, int]:
        """Ways a dimension is cut, and which piece is this rank's."""
        ctx = self._ctx
        semantics = get_semantics(ctx.dcp_semantics)
        match split.axis:
            case "ep":
                return ctx.ep, ctx.ep_rank
            case "moe_tp":
                return ctx.moe_tp, ctx.moe_tp_rank
            case "kv":
                heads, have = split.units, f"tp {ctx.tp}, {split.units} KV heads"
                fits = ctx.tp % heads == 0 or heads % ctx.tp == 0
                _need(fits, "tp.kv_heads", "tp a multiple or a divisor of the KV heads", have)
                local = semantics.local_kv_heads(heads, ctx.tp, ctx.dcp)
                # The heads that the queries of this rank's DCP group attend to; a group starts at its first rank.
                first = (ctx.tp_rank - ctx.dcp_rank) * heads // ctx.tp
                return heads // local, first // local
            case "kv_b" if ctx.dcp > 1 and not semantics.merges_latent:
                return ctx.tp // ctx.dcp, ctx.tp_rank // ctx.dcp
        return ctx.tp, ctx.tp_rank

    def _cut_tensor(self, path: str, name: str, tensor: torch.Tensor, splits: tuple[Split, ...], role: Role) -> Any:
        full_name = f"{path}.{name}"
        shape = list(tensor.shape)
        done: list[tuple[int, str, int]] = []
        pieces: list[tuple[Split, int, int]] = []
        for split in splits:
            ways, index = self._ways(split, shape[split.dim], full_name)
            if ways == 1:
                continue
            length = tensor.shape[split.dim]
            match split.axis:
                case "ep":
                    begin, end = split_range(length, ways, index)
                    shape[split.dim] = end - begin
                case "vocab":
                    padded = padded_vocab(length)
                    have = f"{length} tokens, padded to {padded}, tp {ways}"
                    _need(padded % ways == 0, "tp.vocab", "a padded vocabulary that tp divides", have)
                    shape[split.dim] = padded // ways
                case _:
                    units = split.units or length // split.sections
                    what = f"{units} heads" if split.units and split.axis != "moe_tp" else f"size {units}"
                    have = f"{full_name} with {what}, {ways} ranks"
                    rule = "moe.intermediate" if split.axis == "moe_tp" else "tp.divides"
                    _need(units % ways == 0, rule, "ranks that divide every split dimension", have)
                    shape[split.dim] = length // ways
            pieces.append((split, ways, index))
            done.append((split.dim, "tp" if split.axis in ("kv", "kv_b", "vocab") else split.axis, ways))
        first = self._names.get(id(tensor), full_name)
        self.params[full_name] = ParamSpec(
            name=full_name,
            shape=tuple(shape),
            full_shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            role=role,
            splits=tuple(done),
            tied_to="" if first == full_name else first,
        )
        if not done:
            return tensor
        key = (id(tensor), splits)
        if key not in self._cut:
            self._cut[key] = _piece(tensor, shape, pieces)
        return self._cut[key]

    # -- behaviour ----------------------------------------------------------------------------------------------
    def _install_attention(self, module: nn.Module, rules: dict[str, ModuleRule]) -> None:
        ctx = self._ctx
        if is_mla(module):
            widths = (module.kv_lora_rank, module.qk_rope_head_dim, module.qk_nope_head_dim, module.v_head_dim)
            sparse = is_sparse(module)
            topk = module.config.index_topk if sparse else 0
            mla.install(module, mla.LatentCore(ctx, module.layer_idx, *widths, topk))
            if sparse and module.indexer is not None:
                indexer.install(module.indexer, ctx)
            return
        head_dim = head_width(module)
        kv_heads = self._kv_heads(module, head_dim, rules)
        module.__dict__["attention_core"] = HeadsCore(ctx, module.layer_idx, kv_heads, head_dim)

    def _kv_heads(self, module: nn.Module, head_dim: int, rules: dict[str, ModuleRule]) -> int:
        """KV heads of this rank; the module's own counts of heads are brought in line with what it now holds.

        Raises:
            UnsupportedModelError: values are not as wide as keys.
        """
        path = path_of(module)
        if not is_gqa(module):
            whole = _packed_kv_heads(module)
            rule = rules.get(f"{path}.{packed_projection(module)}")
            if rule is None or not rule.params or rule.gather:
                return whole
            # Cut between heads, each of which keeps its query, key and value side by side.
            have = f"{path} with {whole} heads, {self._ctx.tp} ranks"
            _need(whole % self._ctx.tp == 0, "tp.divides", "ranks that divide the heads", have)
            return whole // self._ctx.tp
        key, value = module.k_proj.weight, module.v_proj.weight
        if key.shape[0] != value.shape[0]:
            raise UnsupportedModelError(
                f"{path}: keys and values of different widths are modelled for latent attention only; "
                f"found {key.shape[0]} and {value.shape[0]} columns."
            )
        out = self.params[f"{path}.{attention_output(module)}.weight"]
        whole_kv = self.params[f"{path}.k_proj.weight"].full_shape[0] // head_dim
        for names, before, after in (
            (_QUERY_HEADS, out.full_shape[1] // head_dim, out.shape[1] // head_dim),
            (_KV_HEADS, whole_kv, key.shape[0] // head_dim),
        ):
            for name in names:
                if module.__dict__.get(name) == before:
                    module.__dict__[name] = after
        return key.shape[0] // head_dim

    def _join(self, region: nn.Module, rules: dict[str, ModuleRule], routed: bool) -> None:
        """Put the collectives in: one all_reduce where partial sums leave the region, gathers where the plan says."""
        ctx = self._ctx
        if ctx.tp == 1:
            return
        partial = []
        for module in region.modules():
            rule = rules.get(path_of(module) or "")
            if rule is None:
                continue
            if isinstance(module, nn.Embedding):
                make_vocab_parallel(module, ctx.tp_rank)
            if rule.gather:
                wrap_forward(module, _gathering(ctx, _full_width(self.params[f"{path_of(module)}.weight"])))
            if rule.over_all:
                (split,) = rules[rule.over_all].params["weight"]
                spec = self.params[f"{rule.over_all}.weight"]
                wrap_forward(module, _over_all(ctx, *self._ways(split, spec.full_shape[0], spec.name)))
            if rule.slice_input:
                wrap_forward(module, _slicing(ctx))
            if rule.partial:
                partial.append(module)
                # A bias belongs to the sum, not to each of its terms: rank 0 adds it.
                if isinstance(module, nn.Linear) and module.bias is not None and ctx.tp_rank:
                    module._parameters["bias"] = None
        if not partial:
            return
        if routed or len(partial) > 1:
            _reduce_together(region, partial)
        else:
            wrap_forward(partial[0], _reducing)


def _full_width(spec: ParamSpec) -> int:
    return spec.full_shape[0]


def _gathering(ctx: ParallelContext, width: int) -> Callable[..., Any]:
    def forward(inner: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        # The cut drops the rows that only padded the vocabulary.
        return all_gather(inner(*args, **kwargs), "tp", ctx.tp, dim=-1)[..., :width]

    return forward


def _over_all(ctx: ParallelContext, ways: int, index: int) -> Callable[..., Any]:
    """Gather what the ranks hold (a piece is on tp / ways neighbours), run, and take piece ``index`` again."""

    def forward(inner: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if ways == 1:
            return inner(x)
        width = x.shape[-1]
        pieces = all_gather(x, "tp", ctx.tp, dim=-1).unflatten(-1, (ctx.tp, width))
        return inner(pieces[..., :: ctx.tp // ways, :].flatten(-2)).narrow(-1, index * width, width)

    return forward


def _slicing(ctx: ParallelContext) -> Callable[..., Any]:
    def forward(inner: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1] // ctx.tp
        return inner(x.narrow(-1, ctx.tp_rank * width, width))

    return forward


def _reducing(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return on_first_tensor(inner(*args, **kwargs), lambda t: all_reduce(t, "tp"))


def _reduce_together(region: nn.Module, partial: list[nn.Module]) -> None:
    """One all_reduce for what several modules of a region add up: at its end, or before a norm of the sum."""
    pending = [False]

    def note(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        pending[0] = True
        return inner(*args, **kwargs)

    def before(inner: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if pending[0]:
            pending[0], x = False, all_reduce(x, "tp")
        return inner(x, *args, **kwargs)

    def at_end(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        pending[0] = False
        output = inner(*args, **kwargs)
        return _reducing(lambda: output) if pending[0] else output

    for module in partial:
        wrap_forward(module, note)
    for module in region.modules():
        if "norm" in type(module).__name__.lower():
            wrap_forward(module, before)
    wrap_forward(region, at_end)


def _packed_kv_heads(module: nn.Module) -> int:
    config = getattr(module, "config", None)
    if config is None:  # that is where the interface looks up its implementation
        raise UnsupportedModelError(
            f"{type(module).__name__} does not attend through Transformers' attention interface."
        )
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _piece(tensor: torch.Tensor, shape: list[int], pieces: list[tuple[Split, int, int]]) -> Any:
    """This rank's piece of a parameter or buffer, in storage of its own."""
    if isinstance(tensor, FakeTensor):
        with tensor.fake_mode:
            local = torch.empty(shape, dtype=tensor.dtype)
    else:
        local = tensor.detach()
        for split, ways, index in pieces:
            local = _slice(local, split, ways, index)
        local = local.clone()
    return nn.Parameter(local, requires_grad=False) if isinstance(tensor, nn.Parameter) else local


def _slice(tensor: torch.Tensor, split: Split, ways: int, index: int) -> torch.Tensor:
    dim, length = split.dim, tensor.shape[split.dim]
    if split.axis == "ep":
        begin, end = split_range(length, ways, index)
        return tensor.narrow(dim, begin, end - begin)
    if split.axis == "vocab" and padded_vocab(length) != length:
        padding = list(tensor.shape)
        padding[dim] = padded_vocab(length) - length
        tensor = torch.cat([tensor, tensor.new_zeros(padding)], dim=dim)
        length = tensor.shape[dim]
    sections = tensor.unflatten(dim, (split.sections, length // split.sections))
    size = length // split.sections // ways
    return sections.narrow(dim + 1, index * size, size).flatten(dim, dim + 1)
