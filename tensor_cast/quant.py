"""Quantisation schemes: which bytes a weight takes, in what dtype a product runs, and which parameters are meant.

A scheme knows the exact bytes of a weight with its scales; a :class:`QuantConfig` applies schemes by the role of a
parameter. Linears and experts are quantised; embeddings, lm_head, router, norms and biases keep their dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensor_cast.dtypes import bits_of
from tensor_cast.engine.expert_kernels import ExpertKernel
from tensor_cast.errors import ConfigError
from tensor_cast.ir.record import ParamSpec, Role
from tensor_cast.model_config import ModelConfig
from tensor_cast.registry import Registry
from tensor_cast.units import ceil_div, round_up

__all__ = ["KV_SCHEMES", "SCHEMES", "QuantConfig", "QuantScheme", "ScaleTensor", "padded_vocab"]

FP8 = "float8_e4m3fn"
FP4 = "float4_e2m1fn"


#: Engines pad the vocabulary to a multiple of this before they divide it (vLLM, vllm-ascend).
VOCAB_MULTIPLE = 64


def padded_vocab(size: int) -> int:
    """Rows of the embedding table before it is divided by tp."""
    return round_up(size, VOCAB_MULTIPLE)


@dataclass(frozen=True, slots=True)
class ScaleTensor:
    """A tensor that goes with a quantised weight, named ``<weight>_<suffix>``."""

    suffix: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Exact bytes."""
        total = 1
        for dim in self.shape:
            total *= dim
        return ceil_div(total * bits_of(self.dtype), 8)


#: Shape of a weight (.., out, in) and whether it belongs to experts -> tensors that go with it.
ScaleRule = Callable[[tuple[int, ...], bool], tuple[ScaleTensor, ...]]


@dataclass(frozen=True)
class QuantScheme:
    """How a weight matrix is stored and multiplied.

    Args:
        name: canonical name, as ``--quantize-linear-action`` takes it.
        weight_dtype: dtype of the stored elements; None keeps the model's.
        activation_dtype: dtype activations are quantised to at run time and products run in; None is weight-only:
            the weight is expanded in the kernel and the product runs in the model's dtype.
        scales: the tensors stored beside a weight.
        kernel: key of a kernel family with a fit of its own (``fp8_block``), else empty.
        group: activation elements of a row that share a scale; 0 for one scale per token.
        block: rows and columns of a weight that share a scale, for the legality of sharding; 0 if it does not matter.
    """

    name: str
    weight_dtype: str | None = None
    activation_dtype: str | None = None
    scales: ScaleRule | None = None
    kernel: str = ""
    group: int = 0
    block: int = 0

    @property
    def quantises(self) -> bool:
        """Whether weights change at all."""
        return self.weight_dtype is not None

    def scale_tensors(self, shape: tuple[int, ...], *, experts: bool = False) -> tuple[ScaleTensor, ...]:
        """What is stored beside a weight of local ``shape`` (.., out, in)."""
        return self.scales(shape, experts) if self.scales else ()

    def weight_bytes(self, shape: tuple[int, ...], dtype: str, *, experts: bool = False) -> int:
        """Exact bytes of a weight of ``shape`` whose unquantised dtype is ``dtype``, scales included."""
        elements = 1
        for dim in shape:
            elements *= dim
        own = ceil_div(elements * bits_of(self.weight_dtype or dtype), 8)
        return own + sum(scale.nbytes for scale in self.scale_tensors(shape, experts=experts))


def _blocks(rows: int, columns: int) -> ScaleRule:
    def rule(shape: tuple[int, ...], experts: bool) -> tuple[ScaleTensor, ...]:
        grid = (*shape[:-2], ceil_div(shape[-2], rows), ceil_div(shape[-1], columns))
        return (ScaleTensor("scale_inv", grid, "float32"),)

    return rule


def _per_channel(*, offset: bool) -> ScaleRule:
    # vllm-ascend keeps scale and offset in the model's dtype, those of experts in fp32.
    def rule(shape: tuple[int, ...], experts: bool) -> tuple[ScaleTensor, ...]:
        dtype = "float32" if experts else "bfloat16"
        names = ("scale", "offset") if offset else ("scale",)
        return tuple(ScaleTensor(name, shape[:-1], dtype) for name in names)

    return rule


def _grouped(group: int, dtype: str, *, zero_points: bool = False, tensor_scale: bool = False) -> ScaleRule:
    def rule(shape: tuple[int, ...], experts: bool) -> tuple[ScaleTensor, ...]:
        grid = (*shape[:-1], ceil_div(shape[-1], group))
        out = [ScaleTensor("scale", grid, dtype)]
        if zero_points:
            out.append(ScaleTensor("zero_point", grid, "int4"))
        if tensor_scale:
            out.append(ScaleTensor("scale_2", shape[:-2], "float32"))
        return tuple(out)

    return rule


def w4a16(group: int = 128, *, zero_points: bool = False) -> QuantScheme:
    """4-bit integers with a bf16 scale (and, asymmetric, a packed 4-bit zero point) per group."""
    return QuantScheme("W4A16", "int4", None, _grouped(group, "bfloat16", zero_points=zero_points))


def w8a16(group: int = 0) -> QuantScheme:
    """8-bit integers, weight-only, with a bf16 scale per group or per output channel."""
    rule = _grouped(group, "bfloat16") if group else _per_channel(offset=False)
    return QuantScheme("W8A16", "int8", None, rule)


def fp8_block(rows: int = 128, columns: int = 128) -> QuantScheme:
    """fp8 weights with an fp32 scale per block, activations quantised per token and group of ``columns``."""
    return QuantScheme(
        "FP8_BLOCK", FP8, FP8, _blocks(rows, columns), kernel="fp8_block", group=columns, block=max(rows, columns)
    )


SCHEMES: Registry[QuantScheme] = Registry("linear quantisation")
SCHEMES.register("DISABLED")(QuantScheme("DISABLED"))
SCHEMES.register("W8A8_DYNAMIC", "W8A8")(QuantScheme("W8A8_DYNAMIC", "int8", "int8", _per_channel(offset=True)))
SCHEMES.register("W8A16")(w8a16())
SCHEMES.register("W4A8")(QuantScheme("W4A8", "int4", "int8", _grouped(128, "bfloat16")))
SCHEMES.register("W4A16")(w4a16())
SCHEMES.register("FP8_BLOCK", "FP8")(fp8_block())
SCHEMES.register("FP8_CHANNEL")(QuantScheme("FP8_CHANNEL", FP8, FP8, _per_channel(offset=False)))
# No rule on shards: every MXFP4 kernel pads the dimensions of a rank (vLLM: fused_moe/oracle/mxfp4.py).
SCHEMES.register("MXFP4")(QuantScheme("MXFP4", FP4, None, _grouped(32, "uint8")))
SCHEMES.register("NVFP4")(QuantScheme("NVFP4", FP4, FP4, _grouped(16, FP8, tensor_scale=True), group=16, block=16))

#: ``--quantize-attention-action``: dtype of the KV cache; None keeps the model's.
KV_SCHEMES: dict[str, str | None] = {"DISABLED": None, "INT8": "int8", "FP8": FP8}

_DISABLED = SCHEMES.get("DISABLED")
#: Dimensions of a weight matrix by role; what has fewer is a bias or a scale.
_MATRIX_DIMS = {Role.LINEAR: 2, Role.EXPERTS: 3}
_FP8_PER_TENSOR = QuantScheme(
    "FP8_TENSOR", FP8, FP8, lambda shape, experts: (ScaleTensor("scale", shape[:-2], "float32"),)
)


@dataclass(frozen=True)
class QuantConfig:
    """Schemes by role, as one hashable value.

    Args:
        linear, experts: schemes of linears and of routed experts.
        kv_dtype: dtype of the KV cache.
        indexer_dtype: dtype of the cache of an indexer (sparse attention), and of the product with its keys.
        model_dtype: dtype of what is not quantised, routers included.
        skip: patterns of module names that keep their dtype.
        expert_kernel: kernel that keeps MXFP4 experts on the device; None keeps them as the checkpoint does.
        hidden_size: of the model, which tells the two dimensions of an expert's matrix apart.
        source: where the choice comes from (an option, or the config's own method).
    """

    linear: QuantScheme = _DISABLED
    experts: QuantScheme = _DISABLED
    kv_dtype: str = "bfloat16"
    indexer_dtype: str = FP8
    model_dtype: str = "bfloat16"
    skip: tuple[str, ...] = ()
    expert_kernel: ExpertKernel | None = None
    hidden_size: int = 0
    source: str = "unquantised"

    @property
    def block(self) -> int | None:
        """Block that every sharded dimension must be a multiple of, or None."""
        return max(self.linear.block, self.experts.block) or None

    @classmethod
    def resolve(
        cls,
        model: ModelConfig,
        linear_action: str | None = None,
        attention_action: str | None = None,
        *,
        dcp_semantics: str = "vllm",
        expert_kernel: ExpertKernel | None = None,
    ) -> QuantConfig:
        """What runs: the options, and where one is None the model's own ``quantization_config``.

        ``dcp_semantics`` tells whose indexer cache it is: vLLM's is always fp8, vllm-ascend's has 16 bits like its main
        cache, or int8 beside an 8-bit one (:func:`tensor_cast.engine.kv_formats.indexer_token_bytes`).
        ``expert_kernel`` is the engine's for the device (``EngineProfile.expert_kernel``).

        Raises:
            UnknownNameError: an option is not a scheme.
            ConfigError: the config names a method that is not known.
        """
        kv_dtype = model.dtype
        if attention_action is not None:
            names = Registry[tuple[str | None]]("attention quantisation")
            for name, dtype in KV_SCHEMES.items():
                names.register(name)((dtype,))
            kv_dtype = names.get(attention_action)[0] or model.dtype
        own = dcp_semantics == "vllm"
        indexer_dtype = FP8 if own else model.dtype if bits_of(kv_dtype) >= 16 else "int8"
        plain = cls(
            kv_dtype=kv_dtype,
            indexer_dtype=indexer_dtype,
            model_dtype=model.dtype,
            expert_kernel=expert_kernel,
            hidden_size=model.hidden_size,
        )
        if linear_action is not None:
            scheme = SCHEMES.get(linear_action)
            # A checkpoint's exceptions hold for its own method; another one is applied to every linear.
            return replace(plain, linear=scheme, experts=scheme, source=f"option {scheme.name}")
        if model.quantization is None:
            return plain
        linear, experts, skip = _from_config(model.model_id, model.quantization)
        source = f"config {model.quantization.get('quant_method')}"
        return replace(plain, linear=linear, experts=experts, skip=skip, source=source)

    def scheme_of(self, name: str, role: Role, ndim: int = 2) -> QuantScheme:
        """Scheme of the parameter called ``name``; DISABLED for roles and modules that are left alone."""
        if ndim < _MATRIX_DIMS.get(role, 99) or name.endswith("bias"):
            return _DISABLED
        scheme = self.experts if role is Role.EXPERTS else self.linear
        return _DISABLED if scheme.quantises and self._skips(name) else scheme

    def _skips(self, name: str) -> bool:
        module = name.rsplit(".", 1)[0]
        return any(_matches(pattern, module) for pattern in self.skip)

    def param_bytes(self, param: ParamSpec) -> int:
        """Exact bytes of one parameter on its rank as the checkpoint stores it; 0 when it is tied to another."""
        if param.tied_to:
            return 0
        scheme = self.scheme_of(param.name, param.role, len(param.shape))
        # Model code may hold a router in float32; checkpoints and engines keep its matrix in the model's dtype.
        router = param.role is Role.ROUTER and len(param.shape) > 1
        dtype = self.model_dtype if router else param.dtype
        return scheme.weight_bytes(param.shape, dtype, experts=param.role is Role.EXPERTS)

    def resident_bytes(self, param: ParamSpec) -> int:
        """Exact bytes of one parameter on its rank as the engine keeps it: padded where it or its kernel pads."""
        if param.role in (Role.EMBEDDING, Role.LM_HEAD) and not param.splits:
            # A table that is cut is padded in the trace already.
            param = replace(param, shape=(padded_vocab(param.shape[0]), *param.shape[1:]))
        kernel = self._kernel_of(param.name)
        if kernel is None or param.tied_to:
            return self.param_bytes(param)
        if len(param.shape) == _MATRIX_DIMS[Role.EXPERTS]:
            rows, columns = self._padded(param.name, param.shape, kernel)
            return param.shape[0] * kernel.matrix_bytes(rows, columns)
        hidden, width = kernel.padded(self.hidden_size, param.shape[-1] // 2)
        return param.shape[0] * (hidden if "down" in param.name else 2 * width) * kernel.bias_bytes

    def padding(self, name: str, shape: tuple[int, ...]) -> float:
        """Elements that the kernel reads and multiplies for each one of experts' matrices ``[E_local, ., .]``."""
        kernel = self._kernel_of(name)
        if kernel is None:
            return 1.0
        rows, columns = self._padded(name, shape, kernel)
        return rows * columns / (shape[1] * shape[2])

    def _kernel_of(self, name: str) -> ExpertKernel | None:
        """The kernel that keeps the parameter (experts' matrices and biases) in a form of its own."""
        module, _, last = name.rpartition(".")
        if not module.endswith(".experts") or "_proj" not in last or self.experts.name != "MXFP4" or self._skips(name):
            return None
        return self.expert_kernel

    def _padded(self, name: str, shape: tuple[int, ...], kernel: ExpertKernel) -> tuple[int, int]:
        """(outputs, inputs) of one expert's matrix as the kernel has it, whichever way the checkpoint stores it."""
        down = "down" in name.rsplit(".", 1)[-1]
        width = shape[1] * shape[2] // self.hidden_size // (1 if down else 2)
        hidden, width = kernel.padded(self.hidden_size, width)
        return (hidden, width) if down else (2 * width, hidden)


def _matches(pattern: str, module: str) -> bool:
    """Whether ``pattern`` names ``module`` or a module above it.

    ``re:`` starts a regular expression, ``*`` is any text, a plain name (``lm_head``) also the last part of a path.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    parts = re.escape(pattern).replace(r"\*", ".*")
    anchored = "" if "." in pattern else r"(.*\.)?"
    return re.fullmatch(rf"{anchored}{parts}(\..*)?", module) is not None


def _from_config(model_id: str, config: Mapping[str, Any]) -> tuple[QuantScheme, QuantScheme, tuple[str, ...]]:
    """(linear, experts, skipped modules) of a ``quantization_config``."""
    method = str(config.get("quant_method", "")).casefold()
    skip = tuple(config.get("modules_to_not_convert") or config.get("ignore") or config.get("ignored_layers") or ())
    if method == "fp8":
        block: Sequence[int] | None = config.get("weight_block_size")
        scheme = fp8_block(int(block[0]), int(block[1])) if block else _FP8_PER_TENSOR
        return scheme, scheme, skip
    if method == "mxfp4":
        return _DISABLED, SCHEMES.get("MXFP4"), skip  # the published method covers experts only
    if method in ("gptq", "awq"):
        scheme = _gptq_awq(model_id, method, config)
        return scheme, scheme, skip
    if method == "compressed-tensors":
        scheme = _compressed_tensors(model_id, config)
        return scheme, scheme, skip
    if method == "modelopt" and "NVFP4" in str(config.get("quant_algo", "")).upper():
        scheme = SCHEMES.get("NVFP4")
        return scheme, scheme, skip
    raise ConfigError(
        f"{model_id}: quantization_config has quant_method {config.get('quant_method')!r}, which is not known; "
        f"known: awq, compressed-tensors, fp8, gptq, modelopt (NVFP4), mxfp4. "
        f"Choose a scheme with --quantize-linear-action ({', '.join(SCHEMES)})."
    )


def _gptq_awq(model_id: str, method: str, config: Mapping[str, Any]) -> QuantScheme:
    bits, group = int(config.get("bits", config.get("w_bit", 4))), int(config.get("group_size", 128))
    if bits == 8:
        return w8a16(max(group, 0))
    if bits == 4 and group > 0:
        # AWQ stores zero points unless told otherwise; GPTQ only where it is not symmetric.
        asymmetric = bool(config.get("zero_point", True)) if method == "awq" else not config.get("sym", True)
        return w4a16(group, zero_points=asymmetric)
    raise ConfigError(f"{model_id}: {method} with {bits} bits and group size {group} is not known; known: 4 or 8 bits")


def _compressed_tensors(model_id: str, config: Mapping[str, Any]) -> QuantScheme:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise ConfigError(f"{model_id}: compressed-tensors with {len(groups)} config groups; only one is supported")
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations")
    bits, kind, strategy = int(weights.get("num_bits", 0)), str(weights.get("type")), str(weights.get("strategy"))
    asymmetric = not weights.get("symmetric", True)
    match (kind, bits, strategy, inputs is not None):
        case ("int", 4, "group", False):
            return w4a16(int(weights["group_size"]), zero_points=asymmetric)
        case ("int", 8, "group", False):
            return w8a16(int(weights["group_size"]))
        case ("int", 8, "channel", False):
            return w8a16()
        case ("int", 8, "channel", True):
            return SCHEMES.get("W8A8_DYNAMIC")
        case ("float", 8, "channel", True):
            return SCHEMES.get("FP8_CHANNEL")
        case ("float", 8, "tensor", True):
            return _FP8_PER_TENSOR
        case ("float", 8, "block", True):
            rows, columns = weights.get("block_structure") or (128, 128)
            return fp8_block(int(rows), int(columns))
        case ("float", 4, "tensor_group" | "group", _):
            return SCHEMES.get("NVFP4")
    raise ConfigError(
        f"{model_id}: compressed-tensors with {bits}-bit {kind} weights per {strategy} "
        f"{'and' if inputs else 'without'} activation quantisation is not known; choose --quantize-linear-action"
    )
