"""Device files: complete, sourced, with the corrections that public tables need; loading by name and by path."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tensor_cast.config_files import config_root
from tensor_cast.device.catalog import device_names, load_device
from tensor_cast.device.profile import DeviceProfile, OpClass, Tier
from tensor_cast.errors import ConfigError, UnknownNameError
from tensor_cast.units import GIB, MIB, TIB

ASCEND = [
    "ATLAS_800_A2_376T_64G",
    "ATLAS_800_A2_313T_64G",
    "ATLAS_800_A2_280T_64G",
    "ATLAS_800_A2_280T_64G_PCIE",
    "ATLAS_800_A2_280T_32G_PCIE",
    "ATLAS_800_A3_752T_128G_DIE",
    "ATLAS_800_A3_560T_128G_DIE",
    "ATLAS_800_A3_560T_128G_DIE_ROCE",
    "ATLAS_350_425T_112G",
    "ATLAS_350_425T_84G",
]
OTHERS = [
    "A100_80G_SXM",
    "A100_80G_PCIE",
    "A800_80G_SXM",
    "A800_80G_PCIE",
    "H100_SXM",
    "H100_PCIE",
    "H100_NVL",
    "H800_SXM",
    "H20",
    "H20_3E",
    "H200_SXM",
    "B200_SXM",
    "B300_SXM",
    "GB200",
    "GB300",
    "L40S",
    "L4",
    "A10",
    "RTX_4090",
    "RTX_5090",
    "RTX_PRO_6000",
    "MI300X",
    "MI325X",
    "MI355X",
]
ALL = [load_device(name) for name in device_names()]


def test_every_promised_device_is_there() -> None:
    assert device_names() == sorted(ASCEND + OTHERS)


@pytest.mark.parametrize("device", ALL, ids=lambda d: d.name)
def test_files_are_complete(device: DeviceProfile) -> None:
    assert all(tier.source for tier in device.tiers), "each tier says where size and latency come from"
    assert all(fit.source for fit in [*device.kernels.values(), *device.collectives.values()])
    assert set(OpClass) <= set(device.kernels)
    # Never more memory than the label, never less than 90 % of it.
    assert 0.9 < device.usable_memory_bytes.value / device.memory_bytes.value <= 1
    # Faster inside than outside: a NIC cannot outrun the slot it sits in.
    rates = [tier.bandwidth.value for tier in device.tiers]
    assert rates == sorted(rates, reverse=True)
    # A rate per type; nothing dense is more than eight times bfloat16, so no sparse number slipped in.
    assert max(rate.value for rate in device.peak_flops.values()) < 9 * device.flops("bfloat16")
    assert device.flops("float32") < device.flops("bfloat16")


@pytest.mark.parametrize("device", ALL, ids=lambda d: d.name)
def test_general_knowledge_is_marked(device: DeviceProfile) -> None:
    raw = yaml.safe_load((config_root() / "devices" / f"{device.name.lower()}.yaml").read_text())
    numbers = [raw["memory_bytes"], raw["usable_memory_bytes"], raw["memory_bandwidth"], *raw["peak_flops"].values()]
    numbers += [tier["bandwidth"] for tier in raw["tiers"]]
    for number in numbers:
        if "general knowledge" in number["source"] or "assumed" in number["source"]:
            assert number["verified"] is False, number


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        # Dense rates; the sparse ones that leaflets print are twice as high.
        ("A100_80G_SXM", "bfloat16", 312),
        ("H100_SXM", "bfloat16", 989),
        ("H100_NVL", "float8_e4m3fn", 1671),
        ("L40S", "bfloat16", 362.05),
        ("RTX_4090", "bfloat16", 165.15),
        ("RTX_5090", "float4_e2m1fn", 1676),
        ("B200_SXM", "float4_e2m1fn", 9000),
        # Blackwell Ultra gave up int8.
        ("B200_SXM", "int8", 4500),
        ("B300_SXM", "int8", 153.5),
        ("GB300", "int8", 165),
        ("ATLAS_800_A2_376T_64G", "bfloat16", 353.9),
        ("ATLAS_800_A3_752T_128G_DIE", "float16", 376),
        ("ATLAS_350_425T_84G", "float8_e4m3fn", 756),
        ("MI355X", "float4_e2m1fn", 10066),
    ],
)
def test_rates(name: str, dtype: str, tera: float) -> None:
    assert load_device(name).flops(dtype) == pytest.approx(tera * 1e12)


def test_ascend_bandwidth_is_converted_from_binary_units() -> None:
    # 1.6 TiB/s is 1.759 TB/s: taking one for the other is 10 % off.
    assert load_device("ATLAS_800_A2_376T_64G").memory_bandwidth.value == pytest.approx(1.6 * TIB)
    assert load_device("ATLAS_800_A2_280T_32G_PCIE").memory_bandwidth.value == pytest.approx(0.8 * TIB)
    assert load_device("H100_SXM").memory_bandwidth.value == pytest.approx(3.35e12)


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("A100_80G_SXM", 79.25),
        ("A800_80G_PCIE", 79.25),
        ("H100_SXM", 79.19),
        ("ATLAS_800_A2_313T_64G", 60.97),
        ("ATLAS_800_A3_752T_128G_DIE", 61.27),
    ],
)
def test_usable_memory_is_what_an_engine_sees(name: str, gib: float) -> None:
    assert load_device(name).usable_memory_bytes.value == pytest.approx(gib * GIB)


def test_memory_labels() -> None:
    assert load_device("GB300").memory_bytes.value == 284208 * MIB
    assert load_device("GB300").memory_bytes.value > 298e9
    assert load_device("ATLAS_350_425T_84G").memory_bytes.value == 84 * GIB


def test_export_models_have_slower_links() -> None:
    def nvlink(name: str) -> float:
        return load_device(name).tiers[0].bandwidth.value

    assert [nvlink(n) for n in ("A800_80G_SXM", "H800_SXM")] == [200e9, 200e9]
    assert [nvlink(n) for n in ("A100_80G_SXM", "H100_SXM", "H20", "GB200")] == [300e9, 450e9, 450e9, 900e9]


@pytest.mark.parametrize("device", ALL, ids=lambda d: d.name)
def test_each_type_has_a_rate_or_a_stand_in_or_is_refused(device: DeviceProfile) -> None:
    for dtype in ("float8_e4m3fn", "int8", "float4_e2m1fn", "int4"):
        if dtype in device.peak_flops:
            assert device.compute_dtype(dtype) == dtype
        elif dtype in device.emulates:
            # Unpacked in the kernel: never faster than the type it computes in.
            assert device.compute_dtype(dtype) == "bfloat16"
            assert device.flops(dtype) == device.flops("bfloat16")
        else:
            with pytest.raises(ConfigError, match=f"{device.name} cannot compute in {dtype}.*bfloat16.*choose another"):
                device.flops(dtype)


def test_families_of_emulation() -> None:
    assert load_device("A100_80G_SXM").compute_dtype("float8_e4m3fn") == "bfloat16"  # Marlin, weight-only
    assert load_device("H100_SXM").compute_dtype("float8_e4m3fn") == "float8_e4m3fn"
    assert load_device("H100_SXM").compute_dtype("float4_e2m1fn") == "bfloat16"
    assert load_device("B200_SXM").compute_dtype("float4_e2m1fn") == "float4_e2m1fn"
    with pytest.raises(ConfigError, match="ATLAS_800_A3_752T_128G_DIE cannot compute in float8_e4m3fn"):
        load_device("ATLAS_800_A3_752T_128G_DIE").flops("float8_e4m3fn")


def test_names_do_not_care_about_case() -> None:
    assert load_device("h200_sxm") is load_device("H200_SXM")


def test_a_near_miss_gets_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown device 'H200'; did you mean .*H20"):
        load_device("H200")


def _own_file(folder: Path, **changes: object) -> Path:
    raw = yaml.safe_load((config_root() / "devices" / "h100_sxm.yaml").read_text())
    raw.update(changes)
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in raw.items() if v is not None}))
    return path


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = _own_file(tmp_path, name="MINE", memory_bandwidth={"value": "4 TB/s", "source": "me"})
    device = load_device(str(path))
    assert (device.name, device.memory_bandwidth.value) == ("MINE", 4e12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bandwidth": None}, "field memory_bandwidth is missing"),
        ({"memory_bandwith": 3}, "field memory_bandwith is unknown"),
        (
            {"memory_bandwidth": {"value": "3.35 TB", "source": "x"}},
            "field memory_bandwidth: found .*'3.35 TB'.*a bandwidth is a number above 0 with one of the units .*TiB/s",
        ),
        ({"memory_bandwidth": {"value": "-1 TB/s", "source": "x"}}, "memory_bandwidth: found .*number above 0"),
        (
            {"memory_bandwidth": {"value": "0 TB/s", "source": "x"}},
            "memory_bandwidth.value: found 0.0; .*greater than 0",
        ),
        # 4 B/s would be taken for a device on which a step takes ages.
        (
            {"memory_bandwidth": {"value": 4, "source": "x"}},
            "memory_bandwidth: found .*one of the units .*as 3.35 TB/s",
        ),
        ({"memory_bandwidth": {"value": 1e12, "source": "x"}}, "memory_bandwidth: found .*one of the units B/s"),
        ({"memory_bytes": {"value": 80, "source": "x"}}, "memory_bytes: found .*units B, .*such as 80 GiB"),
        ({"vector_flops": {"value": 67, "source": "x"}}, "vector_flops: found .*units KFLOP/s"),
        ({"memory_bandwidth": {"value": "1 TB/s", "source": ""}}, "memory_bandwidth.source: found ''"),
        (
            {"vendor": None, "memory_bytes": None, "collectives": None, "emulates": {"int8": 3}, "x": 1},
            r"fields vendor, memory_bytes, collectives are missing; .*emulates.int8: .*.and 1 more.; .fits_like",
        ),
        (
            {"usable_memory_bytes": {"value": "81 GiB", "source": "x"}},
            r"yaml: usable_memory_bytes \(86,973,087,744\) must not exceed memory_bytes \(85,899,345,920\)$",
        ),
        ({"peak_flops": {"float16": {"value": "1 TFLOP/s", "source": "x"}}}, "rate for bfloat16; found float16$"),
        ({"emulates": {"int4": "float64"}}, "emulates.int4: 'float64' has no rate in peak_flops"),
        ({"emulates": {"int8": "bfloat16"}}, "emulates.int8: the device has a rate of its own"),
        ({"tiers": []}, "field tiers"),
        ({"kernels": {}}, "kernels: no fit for gemm"),
        ({"collectives": {}}, "collectives must be exactly all_reduce"),
    ],
)
def test_a_broken_file_gives_one_line(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = _own_file(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load_device(str(path))
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text


def test_fits_of_a_similar_device_are_taken_over_and_marked(tmp_path: Path) -> None:
    own = {"gemm": {"floor_s": 1e-6, "compute": 0.5, "memory": 0.5, "source": "mine", "error": 0.1}}
    device = load_device(str(_own_file(tmp_path, fits_like="h200_sxm", kernels=own, collectives=None)))
    like = load_device("H200_SXM")
    assert (device.kernels["gemm"].compute, device.kernels["gemm"].error) == (0.5, 0.1)
    taken = device.kernels["mla_decode"]
    assert taken.source == f"taken over from H200_SXM: {like.kernels['mla_decode'].source}"
    assert taken.error is None
    assert like.kernels["mla_decode"].error is not None
    for kind, fit in device.collectives.items():
        assert fit.alpha_s == like.collectives[kind].alpha_s
        assert fit.source.startswith("taken over from H200_SXM: ")
    assert set(device.kernels) == set(like.kernels)


@pytest.mark.parametrize("like", ["H900", 3, "other.yaml"])
def test_fits_are_taken_over_from_an_embedded_device(tmp_path: Path, like: object) -> None:
    with pytest.raises(
        ConfigError, match=r"field fits_like: found .*; allowed is a device with its own fits: A10, A100_80G"
    ):
        load_device(str(_own_file(tmp_path, fits_like=like)))


def test_fits_that_are_no_mapping_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"field kernels: found \[1\]"):
        load_device(str(_own_file(tmp_path, fits_like="H200_SXM", kernels=[1])))


def test_tiers_must_nest(tmp_path: Path) -> None:
    bandwidth = {"value": "1 GB/s", "source": "x"}
    sizes: tuple[int | None, ...]
    for sizes, message in (((8, 12, None), "larger multiple of 8"), ((8,), "size: null"), ((None, None), "unbounded")):
        tiers = [{"name": "t", "size": s, "bandwidth": bandwidth, "latency_s": 0} for s in sizes]
        with pytest.raises(ConfigError, match=message):
            load_device(str(_own_file(tmp_path, tiers=tiers)))


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1,\nb: }", "not valid YAML at line 2, column"), ("- 1", "must hold a mapping"), ("", "must hold a mapping")],
)
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_device(str(path))
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.yaml"):
        load_device(str(tmp_path / "missing.yaml"))


def test_full_mesh_uses_only_the_links_to_members() -> None:
    node = load_device("MI300X").tiers[0]
    assert node.full_mesh_links == 7
    # A pair has one link of 64 GB/s, eight devices use all seven.
    assert [node.bandwidth_among(n) / 1e9 for n in (2, 4, 8)] == pytest.approx([64, 192, 448])
    assert load_device("H100_SXM").tiers[0].bandwidth_among(2) == 450e9


def test_the_specific_fit_wins() -> None:
    device = load_device("H100_SXM")
    special = device.kernels["gemm"].model_copy(update={"compute": 0.123})
    device = device.model_copy(update={"kernels": {**device.kernels, "gemm:int8": special}})
    assert device.kernel(OpClass.GEMM, "int8").compute == 0.123
    assert device.kernel(OpClass.SAMPLING, "bfloat16") is device.kernels["sampling"]


def test_tiers_of_ascend() -> None:
    def shape(name: str) -> list[tuple[str, int | None]]:
        tiers: tuple[Tier, ...] = load_device(name).tiers
        return [(tier.name, tier.size) for tier in tiers]

    assert shape("ATLAS_800_A3_752T_128G_DIE") == [("die", 2), ("node", 16), ("superpod", 768), ("roce", None)]
    assert shape("ATLAS_800_A3_560T_128G_DIE_ROCE") == [("die", 2), ("node", 16), ("roce", None)]
    assert shape("ATLAS_800_A2_376T_64G") == [("node", 8), ("roce", None)]
    assert shape("GB200") == [("rack", 72), ("network", None)]


def test_the_example_for_newcomers_is_a_device(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    example = text.split("## Add a device")[1].split("```yaml\n")[1].split("```")[0]
    path = tmp_path / "zeus_x1.yaml"
    path.write_text(example)
    device = load_device(str(path))
    assert (device.name, device.memory_bandwidth.value, device.flops("float8_e4m3fn")) == ("ZEUS_X1", 4e12, 1.6e15)
    assert device.kernels["gemm"].source.startswith("taken over from H100_SXM: ")
    # The table names every key that there is.
    table = text.split("| key | |")[1].split("\n\n")[0]
    for name, field in DeviceProfile.model_fields.items():
        row = next(row for row in table.splitlines() if f"`{name}`" in row)
        assert field.is_required() == ("required" in row), name
    # Each required key but the fits is in the example, and is missed when it is not.
    for name in ("name", "vendor", "description", "memory_bytes", "usable_memory_bytes", "tiers"):
        path.write_text(yaml.safe_dump({k: v for k, v in yaml.safe_load(example).items() if k != name}))
        with pytest.raises(ConfigError, match=f"field {name} is missing$"):
            load_device(str(path))
