"""Reads tables of measured kernels and collectives and says what each row costs by our own cost functions.

Each row becomes the op it measured, with its own sizes, and goes through the function that prices this op in a trace,
so that fitting and pricing cannot disagree about FLOPs or bytes.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.expert_load import expert_load
from tensor_cast.ir.record import Kind, OpRecord, TensorSpec
from tensor_cast.performance_model.base import COSTS, OpCost
from tensor_cast.quant import SCHEMES, QuantScheme
from tensor_cast.units import ceil_div

BF16, FP8, FP4 = "bfloat16", "float8_e4m3fn", "float4_e2m1fn"
DTYPES = {"bfloat16": BF16, "half": "float16", "fp8": FP8, "fp8_block": FP8, "nvfp4": FP4, "int8": "int8"}
_SCHEMES = {"fp8": "FP8_CHANNEL", "fp8_block": "FP8_BLOCK", "nvfp4": "NVFP4"}
Row = dict[str, str]


@dataclass(frozen=True)
class Sample:
    """One measured point.

    ``key`` is the key of the fit it belongs to (``gemm:bfloat16``), ``case`` what it measured, ``software`` what ran
    it, ``along`` another op that was measured with it.
    """

    key: str
    case: tuple[str, ...]
    cost: OpCost
    seconds: float
    software: str = ""
    along: OpCost | None = None


@dataclass(frozen=True)
class ModuleSample:
    """One measured block of several kernels: what products and attention cost, and how many small kernels it has."""

    costs: tuple[OpCost, ...]
    pointwise: int
    seconds: float


@dataclass(frozen=True)
class WireSample:
    """One measured collective inside a node; ``nbytes`` is the local input buffer."""

    kind: str
    ranks: int
    nbytes: float
    seconds: float


def read_rows(folder: Path, op: str, system: str) -> list[Row]:
    """Rows of one table, none when the system was not measured."""
    path = folder / f"{op}__{system}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _weight(shape: tuple[int, ...], scheme: QuantScheme | None, *, experts: bool = False) -> list[TensorSpec]:
    if scheme is None:
        return [TensorSpec(shape, BF16, Kind.WEIGHT, "w")]
    scales = scheme.scale_tensors(shape, experts=experts)
    assert scheme.weight_dtype is not None
    return [
        TensorSpec(shape, scheme.weight_dtype, Kind.WEIGHT, "w"),
        *(TensorSpec(s.shape, s.dtype, Kind.WEIGHT, f"w_{s.suffix}") for s in scales),
    ]


def _cost(name: str, inputs: list[TensorSpec], outputs: list[TensorSpec], **attrs: object) -> OpCost:
    function = COSTS.get(name)
    return function(OpRecord(name, "", tuple(inputs), tuple(outputs), attrs=tuple(sorted(attrs.items()))))


def _gemm(row: Row) -> tuple[str, OpCost]:
    m, n, k = (int(row[key]) for key in "mnk")
    dtype = row["gemm_dtype"]
    scheme = SCHEMES.get(_SCHEMES[dtype]) if dtype in _SCHEMES else None
    x = TensorSpec((m, k), scheme.activation_dtype or BF16 if scheme else BF16)
    cost = _cost("aten.linear", [x, *_weight((n, k), scheme)], [TensorSpec((m, n), BF16)], compute_dtype=DTYPES[dtype])
    return f"gemm:{'fp8_block' if dtype == 'fp8_block' else DTYPES[dtype]}", cost


def _quantisation(table: str, row: Row) -> OpCost | None:
    """The quantisation of the input that a product of few bits was measured with.

    Engines' linear layers quantise what they are given: the shortest of these products take the time of a short bf16
    one and of one more kernel.
    """
    name = _SCHEMES.get(row["gemm_dtype"]) if table.startswith("gemm_") else None
    if name is None:
        return None
    scheme, (m, k) = SCHEMES.get(name), (int(row["m"]), int(row["k"]))
    assert scheme.activation_dtype is not None
    scales = TensorSpec((m, ceil_div(k, scheme.group) if scheme.group else 1), "float32")
    return _cost(
        "tensor_cast.dynamic_quant", [TensorSpec((m, k), BF16)], [TensorSpec((m, k), scheme.activation_dtype), scales]
    )


def _attention(row: Row, queries: int, keys: int, phase: str) -> OpCost:
    b, h, hkv, d = (int(row[k]) for k in ("batch_size", "num_heads", "num_key_value_heads", "head_dim"))
    window = int(row["window_size"]) or None
    kv = TensorSpec((b, keys, hkv, d), DTYPES[row["kv_cache_dtype"]], Kind.KV)
    q = TensorSpec((b, queries, h, d), DTYPES[row["attn_dtype"]])
    return _cost(
        "tensor_cast.attention", [q, kv, kv], [TensorSpec((b, queries, h, d), BF16)], phase=phase, window=window
    )


def _context(row: Row) -> tuple[str, OpCost]:
    isl = int(row["isl"])
    return f"attention_prefill:{DTYPES[row['attn_dtype']]}", _attention(row, isl, isl, "prefill")


def _generation(row: Row) -> tuple[str, OpCost]:
    return "attention_decode", _attention(row, 1, int(row["kv_len"]), "decode")


def _generation_mla(row: Row) -> tuple[str, OpCost]:
    b, h, s = (int(row[k]) for k in ("batch_size", "num_heads", "kv_len"))
    q, out = TensorSpec((b, 1, h, 576), BF16), TensorSpec((b, 1, h, 512), BF16)
    kv = TensorSpec((b, s, 576), DTYPES[row["kv_cache_dtype"]], Kind.KV)
    return "mla_decode", _cost("tensor_cast.mla_attention", [q, kv], [out], phase="decode")


def _context_mla(row: Row) -> tuple[str, OpCost]:
    b, h, isl, past = (int(row[k]) for k in ("batch_size", "num_heads", "isl", "step"))
    q, out = TensorSpec((b, isl, h, 192), BF16), TensorSpec((b, isl, h, 128), BF16)
    k, v = (TensorSpec((b, isl + past, h, d), BF16, Kind.KV) for d in (192, 128))
    return "mla_prefill", _cost("tensor_cast.attention", [q, k, v], [out], phase="prefill")


def _mla_bmm(row: Row) -> tuple[str, OpCost]:
    t, h = int(row["num_tokens"]), int(row["num_heads"])
    dtype = DTYPES[row["bmm_dtype"]]
    k, n = (128, 512) if row["op"] == "mla_gen_pre" else (512, 128)
    inputs = [TensorSpec((h, t, k), dtype), TensorSpec((h, k, n), dtype, Kind.WEIGHT, "w")]
    return f"batched_gemm:{dtype}", _cost("aten.bmm", inputs, [TensorSpec((h, t, n), BF16)])


def _moe(row: Row) -> tuple[str, OpCost]:
    t, width, inter, k, experts, tp, ep, gemms = (
        int(row[key])
        for key in (
            "num_tokens",
            "hidden_size",
            "inter_size",
            "topk",
            "num_experts",
            "moe_tp_size",
            "moe_ep_size",
            "num_gemms",
        )
    )
    dtype, local, inter = row["moe_dtype"], experts // ep, inter // tp
    gated = gemms == 3 and "nongated" not in row["kernel_source"]
    scheme = SCHEMES.get(_SCHEMES[dtype]) if dtype in _SCHEMES else None
    ids = [TensorSpec((t, k), "int32", Kind.INDEX), TensorSpec((t, k), "float32")]
    up = _weight((local, 2 * inter if gated else inter, width), scheme, experts=True)
    down = _weight((local, width, inter), scheme, experts=True)
    hidden = TensorSpec((t, width), BF16)
    load = expert_load(t, experts, k, ep, row["distribution"])
    cost = _cost(
        "tensor_cast.grouped_experts",
        [hidden, *ids, up[0], down[0], *up[1:], *down[1:]],
        [hidden],
        num_experts=experts,
        top_k=k,
        gated=gated,
        rows=load.rows,
        touched=load.touched,
        compute_dtype=DTYPES[dtype],
    )
    return f"moe:{'fp8_block' if dtype == 'fp8_block' else DTYPES[dtype]}", cost


TABLES: dict[str, Callable[[Row], tuple[str, OpCost]]] = {
    "gemm_bf16": _gemm,
    "gemm_fp8": _gemm,
    "gemm_fp8_block": _gemm,
    "gemm_nvfp4": _gemm,
    "context_attention": _context,
    "generation_attention": _generation,
    "context_mla": _context_mla,
    "generation_mla": _generation_mla,
    "raw_mla_bmm": _mla_bmm,
    "moe": _moe,
}
#: Columns that say which software ran a row or repeat what it cost, not what it measured.
_NOT_CASE = {
    "backend",
    "version",
    "kernel_source",
    "latency_ms",
    "flops",
    "bytes_min",
    "sol_compute_ms",
    "sol_mem_ms",
    "sol_ms",
    "measured_over_sol",
}


def _measures_more(table: str, row: Row) -> bool:
    """Whether the row is no measure of the op alone.

    TensorRT-LLM's fp8 product quantises its input too, which is an op of its own in a trace. The fp8 products of
    absorbed MLA are left out as well: engines run them in bf16. Tables of balanced experts do not tell whether the
    tokens of one rank or of all are counted.
    """
    several = table == "moe" and row["distribution"] == "balanced" and row["moe_ep_size"] != "1"
    return several or (table == "gemm_fp8" and row["backend"] == "trtllm") or row.get("bmm_dtype") == "fp8"


def kernel_samples(folder: Path, system: str) -> dict[str, list[Sample]]:
    """Samples by fit key; of rows that measured the same case with different software, the fastest."""
    best: dict[tuple[str, ...], Sample] = {}
    for table, make in TABLES.items():
        for row in read_rows(folder, table, system):
            if _measures_more(table, row):
                continue
            key, cost = make(row)
            case = (table, *(value for column, value in row.items() if column not in _NOT_CASE))
            sample = Sample(key, case, cost, float(row["latency_ms"]) * 1e-3, row["backend"], _quantisation(table, row))
            if case not in best or sample.seconds < best[case].seconds:
                best[case] = sample
    out: dict[str, list[Sample]] = defaultdict(list)
    for sample in best.values():
        out[sample.key].append(sample)
    return dict(out)


#: Norms, rotation, copies and the cache write around the products of an absorbed MLA block in bf16.
_MLA_POINTWISE = 7


def module_samples(folder: Path, system: str) -> list[ModuleSample]:
    """Decode blocks of DeepSeek-V3's MLA in bf16: down-projections, q_b, W_UK, attention, W_UV, output projection."""
    out: list[ModuleSample] = []
    for row in read_rows(folder, "raw_mla_generation_module", system):
        if row["gemm_type"] != "bfloat16" or not row["model"].endswith("DeepSeek-V3"):
            continue
        b, h = int(row["batch_size"]), int(row["num_heads"])
        keys = int(row["isl"]) + int(row["step"])
        products = [
            _gemm({"m": str(b), "n": str(n), "k": str(k), "gemm_dtype": "bfloat16"})[1]
            for n, k in ((1536 + 576, 7168), (h * 192, 1536), (7168, h * 128))
        ]
        absorbed = [
            _mla_bmm({"num_tokens": str(b), "num_heads": str(h), "bmm_dtype": "bfloat16", "op": op})[1]
            for op in ("mla_gen_pre", "mla_gen_post")
        ]
        attention = _generation_mla(
            {"batch_size": str(b), "num_heads": str(h), "kv_len": str(keys), "kv_cache_dtype": row["kv_cache_dtype"]}
        )[1]
        costs = (*products, *absorbed, attention)
        out.append(ModuleSample(costs, _MLA_POINTWISE, float(row["latency_ms"]) * 1e-3))
    return out


#: Table -> (kind, share of ``message_bytes`` that is the local input buffer, as a function of the ranks).
_WIRE: dict[str, tuple[str, Callable[[int], float]]] = {
    "allreduce_custom": ("all_reduce", lambda n: 1.0),
    "allreduce_nccl": ("all_reduce", lambda n: 1.0),
    "all_gather_nccl": ("all_gather", lambda n: 1 / n),
    "reduce_scatter_nccl": ("reduce_scatter", lambda n: 1.0),
    "alltoall_nccl": ("all_to_all", lambda n: 1.0),
}


def wire_samples(folder: Path, system: str) -> dict[str, list[WireSample]]:
    """Samples by kind of collective; of several measurements of one size, the fastest library."""
    best: dict[tuple[str, int, float], WireSample] = {}
    for table, (kind, share) in _WIRE.items():
        for row in read_rows(folder, table, system):
            ranks = int(row["num_gpus"])
            nbytes = float(row["message_bytes"]) * share(ranks)
            seconds = float(row["latency_ms"]) * 1e-3
            old = best.get((kind, ranks, nbytes))
            if old is None or seconds < old.seconds:
                best[kind, ranks, nbytes] = WireSample(kind, ranks, nbytes, seconds)
    out: dict[str, list[WireSample]] = defaultdict(list)
    for sample in best.values():
        out[sample.kind].append(sample)
    return dict(out)


def systems(folder: Path) -> Iterator[str]:
    """Systems that have a GEMM table."""
    for path in sorted(folder.glob("gemm_bf16__*.csv")):
        yield path.stem.partition("__")[2]
