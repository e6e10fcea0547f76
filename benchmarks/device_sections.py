"""Puts fitted coefficients into device files: the ``kernels:`` and ``collectives:`` sections, nothing else.

A device that was measured gets its own fits. One that was not takes them over from the nearest measured sibling: then
``error`` is null and the source says whose they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from tensor_cast.device.profile import CollectiveFit, KernelFit, OpClass

Fits = Mapping[str, KernelFit] | Mapping[str, CollectiveFit]

#: Device without measurements -> the measured one whose kernels it runs (same or nearest generation).
KERNEL_SIBLINGS = {
    "A100_80G_PCIE": "A100_80G_SXM",
    "A800_80G_SXM": "A100_80G_SXM",
    "A800_80G_PCIE": "A100_80G_SXM",
    "A10": "A100_80G_SXM",
    "H100_PCIE": "H100_SXM",
    "H100_NVL": "H100_SXM",
    "H800_SXM": "H100_SXM",
    "H20": "H100_SXM",
    "H20_3E": "H200_SXM",
    "B300_SXM": "B200_SXM",
    "GB200": "B200_SXM",
    "GB300": "B200_SXM",
    "L40S": "H100_SXM",
    "L4": "H100_SXM",
    "RTX_4090": "H100_SXM",
    "RTX_5090": "B200_SXM",
    "RTX_PRO_6000": "B200_SXM",
    "MI300X": "H200_SXM",
    "MI325X": "H200_SXM",
    "MI355X": "B200_SXM",
    "ATLAS_800_A3_560T_128G_DIE": "ATLAS_800_A3_752T_128G_DIE",
    "ATLAS_800_A3_560T_128G_DIE_ROCE": "ATLAS_800_A3_752T_128G_DIE",
    "ATLAS_800_A2_376T_64G": "ATLAS_800_A3_752T_128G_DIE",
    "ATLAS_800_A2_313T_64G": "ATLAS_800_A3_752T_128G_DIE",
    "ATLAS_800_A2_280T_64G": "ATLAS_800_A3_752T_128G_DIE",
    "ATLAS_800_A2_280T_64G_PCIE": "ATLAS_800_A3_752T_128G_DIE",
    "ATLAS_800_A2_280T_32G_PCIE": "ATLAS_800_A3_752T_128G_DIE",
    "ATLAS_350_425T_112G": "ATLAS_800_A3_752T_128G_DIE",
    "ATLAS_350_425T_84G": "ATLAS_800_A3_752T_128G_DIE",
}
#: The same for collectives: only where links and switches are of one kind.
COLLECTIVE_SIBLINGS = {
    "A800_80G_SXM": "A100_80G_SXM",
    "H800_SXM": "H100_SXM",
    "H20": "H100_SXM",
    "H20_3E": "H200_SXM",
    "B300_SXM": "B200_SXM",
    "GB200": "B200_SXM",
    "GB300": "B200_SXM",
    "ATLAS_800_A3_560T_128G_DIE": "ATLAS_800_A3_752T_128G_DIE",
    "ATLAS_800_A3_560T_128G_DIE_ROCE": "ATLAS_800_A3_752T_128G_DIE",
    "ATLAS_800_A2_376T_64G": "ATLAS_800_A3_752T_128G_DIE",
    "ATLAS_800_A2_313T_64G": "ATLAS_800_A3_752T_128G_DIE",
    "ATLAS_800_A2_280T_64G": "ATLAS_800_A3_752T_128G_DIE",
}


def general_keys(fits: Mapping[str, KernelFit]) -> dict[str, KernelFit]:
    """``fits`` with the bf16 fit of a class as its general one, which other dtypes fall back to."""
    out = dict(fits)
    for op_class in OpClass:
        if str(op_class) not in out and f"{op_class}:bfloat16" in out:
            out[str(op_class)] = out.pop(f"{op_class}:bfloat16")
    return out


def inherited(fits: Fits, owner: str) -> dict[str, KernelFit | CollectiveFit]:
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


def write_sections(folder: Path, kernels: Mapping[str, Fits], collectives: Mapping[str, Fits]) -> Iterable[Path]:
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
            if owner not in measured:
                continue
            fits = dict(measured[owner]) if owner == name else inherited(measured[owner], owner)
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
