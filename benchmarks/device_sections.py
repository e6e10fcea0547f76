"""Puts fitted coefficients into device files: the ``kernels:`` and ``collectives:`` sections, nothing else.

A device that was measured gets its own fits. One that was not takes them over from the nearest measured sibling: then
``error`` is null and the source says whose they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from tensor_cast.device.catalog import load_device
from tensor_cast.device.profile import COLLECTIVES, CollectiveFit, KernelFit, OpClass

Fits = Mapping[str, KernelFit] | Mapping[str, CollectiveFit] | Mapping[str, KernelFit | CollectiveFit]

_ASCEND = "ATLAS_800_A3_752T_128G_DIE"
#: Device without measurements -> the measured one whose kernels it runs (same or nearest generation). Devices of one
#: architecture have one set of coefficients, so that it does not matter which of them stands here.
KERNEL_SIBLINGS = {
    **dict.fromkeys(("A100_80G_PCIE", "A800_80G_SXM", "A800_80G_PCIE", "A10"), "A100_80G_SXM"),
    **dict.fromkeys(("H100_PCIE", "H100_NVL", "H800_SXM", "H20", "H20_3E", "L40S", "L4", "RTX_4090"), "H100_SXM"),
    # Desktop Blackwell has the matrix units of the generation before; what AMD's reach nobody measured.
    **dict.fromkeys(("RTX_5090", "RTX_PRO_6000", "MI300X", "MI325X", "MI355X"), "H100_SXM"),
    **dict.fromkeys(("B300_SXM", "GB200", "GB300"), "B200_SXM"),
    **dict.fromkeys(
        (
            "ATLAS_800_A3_560T_128G_DIE",
            "ATLAS_800_A3_560T_128G_DIE_ROCE",
            "ATLAS_800_A2_376T_64G",
            "ATLAS_800_A2_313T_64G",
            "ATLAS_800_A2_280T_64G",
            "ATLAS_800_A2_280T_64G_PCIE",
            "ATLAS_800_A2_280T_32G_PCIE",
            "ATLAS_350_425T_112G",
            "ATLAS_350_425T_84G",
        ),
        _ASCEND,
    ),
}
#: The same for collectives: only where links and switches are of one kind.
COLLECTIVE_SIBLINGS = {
    "A800_80G_SXM": "A100_80G_SXM",
    **dict.fromkeys(("H800_SXM", "H20", "H20_3E"), "H100_SXM"),
    **dict.fromkeys(("B300_SXM", "GB200", "GB300"), "B200_SXM"),
    **dict.fromkeys(
        (
            "ATLAS_800_A3_560T_128G_DIE",
            "ATLAS_800_A3_560T_128G_DIE_ROCE",
            "ATLAS_800_A2_376T_64G",
            "ATLAS_800_A2_313T_64G",
            "ATLAS_800_A2_280T_64G",
        ),
        _ASCEND,
    ),
}
#: Devices behind PCIe -> one with better links. Nobody measured their collectives: they start as assumed in
#: :data:`PCIE`, and no sooner than over the better links.
PCIE_SIBLINGS = {
    **dict.fromkeys(("A100_80G_PCIE", "A800_80G_PCIE", "A10"), "A100_80G_SXM"),
    **dict.fromkeys(("H100_PCIE", "H100_NVL", "L40S", "L4", "RTX_4090"), "H100_SXM"),
    **dict.fromkeys(("RTX_5090", "RTX_PRO_6000"), "B200_SXM"),
    **dict.fromkeys(("ATLAS_800_A2_280T_64G_PCIE", "ATLAS_800_A2_280T_32G_PCIE"), "ATLAS_800_A2_280T_64G"),
}
_RING = "NCCL's ring as on A100 SXM (all-reduce: 10 us for two ranks, 1.7 us more a rank), bandwidth share 0.7"
#: Vendor -> kind -> (start, start per rank, share of the link, what is assumed).
PCIE: dict[str, dict[str, tuple[float, float, float, str]]] = {
    "NVIDIA": {
        "all_reduce": (8.5e-6, 1.7e-6, 0.7, _RING),
        "all_gather": (8.0e-6, 0.9e-6, 0.7, _RING),
        "reduce_scatter": (8.0e-6, 0.9e-6, 0.7, _RING),
        "all_to_all": (10.0e-6, 0.4e-6, 0.7, _RING),
    },
    "Huawei": dict.fromkeys(COLLECTIVES, (10.0e-6, 0.0, 0.7, "msmodeling: 10 us a collective, bandwidth share 0.7")),
}


def general_keys(fits: Mapping[str, KernelFit]) -> dict[str, KernelFit]:
    """``fits`` with the bf16 fit of a class as its general one, which other dtypes fall back to."""
    out = dict(fits)
    for op_class in OpClass:
        if str(op_class) not in out and f"{op_class}:bfloat16" in out:
            out[str(op_class)] = out.pop(f"{op_class}:bfloat16")
    return out


def inherited(fits: Fits, owner: str) -> Fits:
    """The fits of ``owner`` for a sibling of it."""
    return {
        key: fit.model_copy(
            update={
                "error": None,
                "source": f"not measured; taken from {owner}: {fit.source}",
            }
        )
        for key, fit in fits.items()
    }


def behind_pcie(name: str, twin: str, fits: Mapping[str, CollectiveFit]) -> dict[str, CollectiveFit]:
    """Collectives of ``name``: the assumed start, or that of ``twin``'s better links (``fits``) where it is the larger.

    What a hop of the twin's links takes longer counts as start here.
    """
    device, better = load_device(name), load_device(twin)
    hop = max(better.tiers[0].latency_s - device.tiers[0].latency_s, 0.0)
    out: dict[str, CollectiveFit] = {}
    for kind, (alpha, rank, share, source) in PCIE[device.vendor].items():
        over = fits.get(kind)
        if over is None:
            continue
        later = over.alpha_s + hop
        out[kind] = CollectiveFit(
            alpha_s=float(f"{max(alpha, later):.4g}"),
            alpha_rank_s=max(rank, over.alpha_rank_s),
            efficiency=share,
            source=f"not measured: {source}" + (f"; start no sooner than {twin}'s" if later > alpha else ""),
        )
    return out


def _number(value: float) -> str:
    text = f"{value:.6g}"
    # YAML 1.1 reads an exponent as a float only with a dot in the mantissa.
    return re.sub(r"^(-?\d+)e", r"\1.0e", text)


def render(section: str, fits: Fits) -> list[str]:
    """Lines of one section, general keys before those of a dtype."""
    order = [str(c) for c in OpClass]
    keys = sorted(fits, key=lambda k: (order.index(k.split(":")[0]) if k.split(":")[0] in order else 0, k))
    lines = [f"{section}:"]
    for key in keys:
        fields = fits[key].model_dump(exclude_defaults=True)
        words = []
        for name, value in fields.items():
            if isinstance(value, str):
                words.append(f'{name}: "{value}"')
            elif value is not None:
                words.append(f"{name}: {_number(value)}")
        name = f'"{key}"' if ":" in key else key
        lines.append(f"  {name}: {{{', '.join(words)}}}")
    return lines


def replace_section(text: str, section: str, lines: Sequence[str]) -> str:
    """``text`` with the top-level block ``section`` replaced by ``lines``; appended where there is none."""
    block = re.compile(rf"^{section}:.*\n(?:(?:[ \t#].*)?\n)*", re.MULTILINE)
    new = "\n".join(lines) + "\n"
    if block.search(text):
        return block.sub(lambda _: new, text, count=1)
    return text.rstrip("\n") + "\n" + new


def write_sections(
    folder: Path, kernels: Mapping[str, Mapping[str, KernelFit]], collectives: Mapping[str, Mapping[str, CollectiveFit]]
) -> Iterable[Path]:
    """Writes the fits of measured devices and of their siblings; yields the files that changed.

    A key that the fits lack keeps what the file has (as does a collective nobody measured).
    """
    for section, measured, siblings in (
        ("kernels", kernels, KERNEL_SIBLINGS),
        ("collectives", collectives, COLLECTIVE_SIBLINGS),
    ):
        for path in sorted(folder.glob("*.yaml")):
            name = path.stem.upper()
            owner = siblings.get(name, name)
            twin = PCIE_SIBLINGS.get(name, "") if section == "collectives" else ""
            if (linked := COLLECTIVE_SIBLINGS.get(twin, twin)) in collectives:
                fits: Fits = behind_pcie(name, twin, collectives[linked])
            elif owner in measured:
                fits = measured[owner] if owner == name else inherited(measured[owner], owner)
            else:
                continue
            text = path.read_text()
            kind = KernelFit if section == "kernels" else CollectiveFit
            old = {
                key: kind.model_validate(value)
                for key, value in yaml.safe_load(text)[section].items()
                if section == "collectives" or ":" not in key
            }
            changed = replace_section(text, section, render(section, {**old, **fits}))
            if changed != text:
                path.write_text(changed)
                yield path
