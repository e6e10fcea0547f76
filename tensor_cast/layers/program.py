"""One rank's program: the whole model with its regions cut for the rank, fed with a step, giving sampled tokens.

The same object runs on fake tensors (to be recorded) and on real ones (to be executed over process groups that are
registered under the axis names).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tensor_cast import ops
from tensor_cast.errors import UnsupportedModelError
from tensor_cast.ir.record import Scope
from tensor_cast.layers import indexer
from tensor_cast.layers.context import CacheKey, ParallelContext, Step, enter_scope, running
from tensor_cast.layers.modules import clone_tree, wrap_forward
from tensor_cast.layers.mtp import DraftModules, feed_hidden, final_norm
from tensor_cast.layers.plan import ShardPlan
from tensor_cast.layers.sharding import Sharder
from tensor_cast.layers.structure import LayerRegions, find_layers, find_regions, is_experts, is_sparse

#: Argument through which layers of sparse attention hand on what the last indexer chose.
SHARED_CHOICE = "prev_topk_indices"


@dataclass
class Region:
    """A piece of the model that is cut and traced on its own: ``role`` is embed, attention, ffn, moe or head."""

    role: str
    path: str
    module: nn.Module = field(repr=False)
    layer: int | None = None


class Anatomy:
    """Where the regions of a model are, and how they are cut; the same for every layout.

    Raises:
        UnsupportedModelError: the model is not built of an embedding, decoder layers with softmax attention and a head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers_path, self.layers = find_layers(model, model.config.num_hidden_layers)
        self.regions = tuple(self._regions())
        embedding, head = self._named(model.get_input_embeddings()), self._named(model.get_output_embeddings())
        self.embedding = Region("embed", embedding, model.get_submodule(embedding))
        self.head = Region("head", head, model.get_submodule(head))
        self.plan = ShardPlan(model.tp_plan or {}, model.ep_plan or {}, embedding=embedding, head=head)

    @cached_property
    def names(self) -> dict[int, str]:
        """First name of each parameter and buffer, by identity."""
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        return {id(tensor): name for name, tensor in reversed(named)}

    @cached_property
    def chooses(self) -> tuple[bool, ...]:
        """For each layer of sparse attention, whether it chooses tokens itself; empty where no layer is sparse."""
        attention = [layer.get_submodule(r.attention) for layer, r in zip(self.layers, self.regions, strict=True)]
        sparse = any(is_sparse(module) for module in attention)
        return tuple(getattr(module, "indexer", None) is not None for module in attention) if sparse else ()

    @property
    def draft_source(self) -> int:
        """The layer that a draft module's layer is built like: the last one, with an indexer where there are any.

        A draft module of sparse attention chooses its tokens itself, also where the last layer does not.
        """
        choosing = [index for index, chooses in enumerate(self.chooses) if chooses]
        return choosing[-1] if choosing else len(self.layers) - 1

    def _named(self, module: nn.Module | None) -> str:
        for path, candidate in self.model.named_modules():
            if candidate is module:
                return path
        raise UnsupportedModelError(f"{type(self.model).__name__} has no input embedding or no output projection.")

    def _regions(self) -> Iterator[LayerRegions]:
        for index, layer in enumerate(self.layers):
            yield find_regions(self.layer_path(index), layer)

    def layer_path(self, index: int) -> str:
        """Path of a decoder layer."""
        return f"{self.layers_path}.{index}"

    def layer_regions(self, index: int) -> Iterator[Region]:
        """Regions of a decoder layer in the order of its children, attention first."""
        layer, names = self.layers[index], self.regions[index]
        for name in (names.attention, *names.ffn):
            module = layer.get_submodule(name)
            role = "attention" if name == names.attention else "ffn"
            if role == "ffn" and any(is_experts(m) for m in module.modules()):
                role = "moe"
            yield Region(role, f"{self.layer_path(index)}.{name}", module, index)

    def cut(
        self, ctx: ParallelContext, replacements: Mapping[str, nn.Module] | None = None
    ) -> tuple[nn.Module, Sharder]:
        """A copy of the whole model, cut for one rank.

        Args:
            ctx: the rank.
            replacements: stand-ins by path; a layer, embedding or head that is replaced is not cut.
        """
        replacements = replacements or {}
        clone = clone_tree(self.model, "", replacements)
        sharder = Sharder(self.plan, ctx, self.names)
        regions = [region for region in (self.embedding, self.head) if region.path not in replacements]
        for index in range(len(self.layers)):
            if self.layer_path(index) not in replacements:
                regions += self.layer_regions(index)
        for region in regions:
            sharder.cut_in_place(clone.get_submodule(region.path), region.path)
        return clone, sharder


class SkippedLayer(nn.Module):
    """Takes the place of a decoder layer and hands its input on.

    Args:
        like: the layer; plain attributes that the model's loop may look at are kept.
        output_is_tuple: one flag, whether layers of this model return tuples; may be set after the first layer ran.
    """

    def __init__(self, like: nn.Module, output_is_tuple: list[bool]) -> None:
        super().__init__()
        for key, value in like.__dict__.items():
            if not key.startswith("_") and isinstance(value, bool | int | float | str):
                self.__dict__[key] = value
        self._output_is_tuple = output_is_tuple

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The input, in the form in which a layer returns its output."""
        if SHARED_CHOICE in kwargs:  # sparse attention hands the chosen tokens from layer to layer
            return hidden_states, kwargs[SHARED_CHOICE]
        return (hidden_states,) if self._output_is_tuple[0] else hidden_states


class RankProgram:
    """The model of one rank, ready to run steps.

    Args:
        anatomy: of the whole model.
        ctx: the rank.
        replacements: see :meth:`Anatomy.cut`.
    """

    def __init__(
        self, anatomy: Anatomy, ctx: ParallelContext, replacements: Mapping[str, nn.Module] | None = None
    ) -> None:
        self.ctx = ctx
        self.model, self.sharder = anatomy.cut(ctx, replacements)
        self._can_keep_last = "logits_to_keep" in inspect.signature(type(anatomy.model).forward).parameters
        wrap_forward(self.model.get_submodule(anatomy.head.path), _sampling)

    def caches(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> dict[CacheKey, torch.Tensor]:
        """Paged caches by key (:class:`Step`), zeroed."""
        return {c.cache_key: torch.zeros(c.cache_shape(num_blocks, block_size), dtype=dtype) for c in cores(self.model)}

    def __call__(self, ids: torch.Tensor, step: Step, *, last_only: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step.

        Args:
            ids: [B, Q] tokens.
            step: positions, caches and tables.
            last_only: compute logits of the last token of each request only.

        Returns:
            sampled ids [B, Q or 1] and logits [B, Q or 1, V].
        """
        with running(step):
            logits = self._logits(ids, step, last_only)
            return ops.sample(logits), logits

    def _logits(self, ids: torch.Tensor, step: Step, last_only: bool) -> torch.Tensor:
        keep = {"logits_to_keep": int(last_only)} if self._can_keep_last else {}
        return self.model(input_ids=ids, position_ids=step.positions, use_cache=False, **keep).logits


class DraftProgram(RankProgram):
    """One pass of the draft module on one rank: the model with only its draft layer, fed with hidden states too.

    Args:
        anatomy: of the whole model.
        ctx: the rank.
        modules: the draft module's own weights, whole.
    """

    def __init__(self, anatomy: Anatomy, ctx: ParallelContext, modules: DraftModules) -> None:
        own = modules.named(anatomy)
        place, tuples = anatomy.draft_source, [False]
        stand_ins: dict[str, nn.Module] = {
            anatomy.layer_path(i): SkippedLayer(layer, tuples) for i, layer in enumerate(anatomy.layers) if i != place
        }
        stand_ins[anatomy.layer_path(place)] = own.layer
        stand_ins[final_norm(anatomy)[0]] = own.norm
        super().__init__(anatomy, ctx, stand_ins)
        names, path = anatomy.regions[place], anatomy.layer_path(len(anatomy.layers))
        for name in (names.attention, *names.ffn):
            self.sharder.cut_in_place(own.layer.get_submodule(name), f"{path}.{name}")
        attention = own.layer.get_submodule(names.attention)
        if is_sparse(attention):
            indexer.reuse(attention.indexer, lambda: self._choice)
        self._hidden: torch.Tensor | None = None
        self._choice: torch.Tensor | None = None
        feed_hidden(self.model.get_submodule(anatomy.embedding.path), own.projection, lambda: self._hidden)

    def draft(
        self, ids: torch.Tensor, hidden: torch.Tensor, step: Step, choice: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft one token per request.

        Args:
            ids: [B, Q] tokens.
            hidden: [B, Q, H] last hidden states.
            step: positions, tables and the draft layer's caches.
            choice: [B, Q, K'] tokens that an earlier pass chose, for sparse attention to reuse; None to choose anew.

        Returns:
            ids [B, 1] and logits [B, 1, V].
        """
        self._hidden, self._choice = hidden, choice
        try:
            return self(ids, step, last_only=True)
        finally:
            self._hidden = self._choice = None


def cores(root: nn.Module) -> list[Any]:
    """What the attention modules and indexers under ``root`` know of their rank, in order."""
    return [m.__dict__["attention_core"] for m in root.modules() if "attention_core" in m.__dict__]


def _sampling(inner: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """From the head on, only tokens whose logits are wanted count."""
    enter_scope(Scope.SAMPLE)
    return inner(*args, **kwargs)
