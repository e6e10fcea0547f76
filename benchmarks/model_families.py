"""Every family of causal language models that Transformers knows: traced, or refused in one clear sentence.

    python -m benchmarks.model_families                 # the sweep: one line per family, then the sums
    python -m benchmarks.model_families --prove         # also compare the traced ones with Transformers on two ranks
    python -m benchmarks.model_families llama bloom     # only these
    python -m benchmarks.model_families --prove --write # bring the tables of docs/models.md up to date; without --prove
                                                        # what they say of proofs stays
    python -m benchmarks.model_families --check         # do the tables still name the same families?

A family stands for its class's default configuration, written to a folder as ``config.json``. Of multimodal wrappers,
whose text part is what is traced, those are in it that Transformers maps from image and text to text.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "models.md"
#: Seconds after which a command counts as hung.
LIMIT = 60
#: Families of one process: enough to spare the import of torch, few enough to bound its memory.
_BATCH = 20
_DEVICE = ("--device", "H100_SXM", "--num-queries", "4", "--context-length", "64", "--decode")
#: What is asked of a family; tensor parallelism last, since a default configuration may have an odd number of heads.
COMMANDS: dict[str, tuple[str, ...]] = {
    "trace": ("trace", "{}", "--format", "json"),
    "text_generate": ("text_generate", "{}", *_DEVICE),
    "tp2": ("trace", "{}", "--tp-size", "2", "--format", "json"),
}
_VERIFY = ("verify", "{}", "--format", "json")
#: What published checkpoints say where a class's default is null or cannot be built.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},  # DeepSeek-V2-Lite
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "glm4_moe": {"head_dim": 128},  # GLM-4.5
    "glm4v_moe_text": {"head_dim": 128},
}
#: Classes with towers that do not shrink with the text model: too large for real tensors on a small machine.
_TOO_LARGE = frozenset({"phi4_multimodal"})
#: Verdicts from good to bad; the last two are faults of ours.
TRACED, UNPRICED, REFUSED, CRASHED, HUNG = "traced", "unpriced", "refused", "crashed", "hung"


@dataclass(frozen=True)
class Outcome:
    """What became of one family.

    Args:
        family: its ``model_type``.
        verdict: ``traced`` (every op priced), ``unpriced``, ``refused``, ``crashed`` (a traceback or a message of more
            than one line) or ``hung``.
        reason: the sentence, the unpriced ops, or the end of the traceback; empty when traced.
        command: which of :data:`COMMANDS` it was; empty when traced.
        proof: ``equal``, ``different: ...`` or why there is none; empty if it was not asked for.
    """

    family: str
    verdict: str
    reason: str = ""
    command: str = ""
    proof: str = ""


class _Hung(BaseException):
    """Not an Exception: nobody on the way may catch it."""


def architectures() -> dict[str, str]:
    """``model_type`` -> class of every family, causal language models first, in alphabetical order."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    found = dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))
    return found | {
        name: architecture
        for name, architecture in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items())
        if name in CONFIG_MAPPING and "text_config" in getattr(CONFIG_MAPPING[name], "sub_configs", {})
    }


def default_config(family: str, architecture: str) -> dict[str, Any]:
    """``config.json`` of a class's defaults."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]().to_dict()
    config["architectures"] = [architecture]
    for place in (config, config.get("text_config") or {}):
        place.update(_PUBLISHED.get(place.get("model_type", ""), {}))
    return json.loads(json.dumps(config, default=str))


def examine(family: str, config: dict[str, Any], folder: Path, *, prove: bool) -> Outcome:
    """Run the commands on one family, in this process."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    worst = Outcome(family, TRACED)
    for name, words in COMMANDS.items():
        found = _verdict(family, name, words, str(folder))
        # Two ranks may be refused where one is not: heads that do not divide are a matter of the layout.
        if found.verdict == REFUSED and name != "trace" and "] need " in found.reason:
            continue
        if _ORDER.index(found.verdict) > _ORDER.index(worst.verdict):
            worst = found
    if prove and worst.verdict in (TRACED, UNPRICED):
        if family in _TOO_LARGE:
            return worst
        text = (config.get("text_config") or config).get("model_type", family)
        return replace(worst, proof=f"as {text}" if text != family and text in architectures() else _proof(str(folder)))
    return worst


_ORDER = (TRACED, UNPRICED, REFUSED, CRASHED, HUNG)


def _verdict(family: str, name: str, words: tuple[str, ...], folder: str) -> Outcome:
    try:
        code, out, err = run(words, folder)
    except _Hung:
        return Outcome(family, HUNG, f"more than {LIMIT} s", name)
    except (Exception, SystemExit):
        last = traceback.format_exc().strip().splitlines()
        return Outcome(family, CRASHED, last[-1], name)
    sentence = err.strip()
    if code == 0:
        unpriced = json.loads(out)["unpriced"] if name != "text_generate" else {}
        return Outcome(family, UNPRICED, ", ".join(unpriced), name) if unpriced else Outcome(family, TRACED)
    if code == 2 and sentence.startswith("error: ") and "\n" not in sentence:
        return Outcome(family, REFUSED, sentence.removeprefix("error: ").replace(folder, family), name)
    return Outcome(family, CRASHED, sentence or f"exit code {code}, no message", name)


def run(words: Iterable[str], folder: str, *, limit: int = LIMIT) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command."""
    from cli.main import main

    out, err = io.StringIO(), io.StringIO()

    def stop(*_: object) -> None:
        raise _Hung

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([word.replace("{}", folder) for word in words])
    finally:
        signal.alarm(0)
    return code, out.getvalue(), err.getvalue()


def _proof(folder: str) -> str:
    """What ``msmodeling verify`` says on two ranks, or on one where two do not fit.

    Classes that compute in float32 whatever the dtype (rotary tables, scores of positions) are equal in float32 only.
    """
    said = ""
    for ranks, dtype in (("2", "float64"), ("2", "float32"), ("1", "float64"), ("1", "float32")):
        try:
            code, out, err = run((*_VERIFY, "--tp-size", ranks, "--dtype", dtype), folder, limit=5 * LIMIT)
        except _Hung:
            return "hung"
        except (Exception, SystemExit) as error:
            return f"crashed: {' '.join(str(error).split())[:200]}"
        if code == 0:
            return f"equal on {ranks} rank{'s' * (ranks > '1')} in {dtype}"
        if code == 1:
            said = said or f"different: {json.loads(out)['first_mismatch']}"
            if "executed ops" in said:
                return said
        else:
            if "] need " not in err:
                return f"none: {err.strip()}"
            said = said or f"none: {err.strip()}"
    return said


def sweep(families: Sequence[str] = (), *, prove: bool = False) -> Iterator[Outcome]:
    """Outcomes of the ``families`` (all when empty), in processes of :data:`_BATCH` each."""
    names = list(families) or list(architectures())
    for start in range(0, len(names), _BATCH):
        batch = names[start : start + _BATCH]
        words = [sys.executable, "-m", "benchmarks.model_families", "--worker", *(["--prove"] if prove else []), *batch]
        missing = list(batch)
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                outcome = Outcome(**json.loads(line))
                missing.remove(outcome.family)
                yield outcome
        for family in missing:
            yield Outcome(family, CRASHED, f"the process ended with {process.returncode}")


def _work(families: Sequence[str], prove: bool) -> None:
    from tensor_cast.tracer.builder import one_line

    known = architectures()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MSMODELING_CACHE_DIR"] = f"{folder}/cache"
        for family in families:
            try:
                config = default_config(family, known[family])
            except Exception as error:
                outcome = Outcome(family, REFUSED, f"no default configuration: {one_line(error)}")
            else:
                outcome = examine(family, config, Path(folder) / family, prove=prove)
            print(json.dumps(asdict(outcome)), flush=True)


#: Why families are refused, by what the sentence says; the first that fits.
_REASONS = (
    ("encoder-decoder", "encoder-decoder model|not the config of a causal"),
    ("no causal language model class of its own in Transformers", "no causal language model of type"),
    ("a state instead of a KV cache (linear attention, state space, convolution)", "keep a state|without attention"),
    ("no layer with attention of a known form (linear attention, encoders)", "softmax attention of a known form"),
    ("attention past Transformers' attention interface", "attention interface|table of its own"),
    ("several attentions in a layer, or layers in a loop", "attends \\d|loops|layers of type mlp"),
    ("no list of decoder layers built of linear layers", "list of \\d+ decoder"),
    ("attention of a kind not modelled (chunks, compressed, indexed, widths that differ)",
     "sparse attention|in chunks|layers of type|head sizes|different widths|has an indexer|attends with"),
    ("the class's defaults are no complete model",
     "Transformers cannot build|need [a-z]|: field |no default|without head_dim"),
    ("what torch cannot trace or we cannot cut", ""),
)  # fmt: skip


def reason_of(outcome: Outcome) -> str:
    """The group of a refusal."""
    return next(label for label, pattern in _REASONS if re.search(pattern, outcome.reason))


def tables(outcomes: Sequence[Outcome]) -> str:
    """The part of docs/models.md that is made by machine."""
    traced = [o for o in outcomes if o.verdict in (TRACED, UNPRICED)]
    refused = [o for o in outcomes if o.verdict == REFUSED]
    proofs: dict[str, list[str]] = {}
    for outcome in traced:
        proofs.setdefault(_proof_group(outcome), []).append(outcome.family)
    groups: dict[str, list[str]] = {}
    for outcome in refused:
        groups.setdefault(reason_of(outcome), []).append(outcome.family)
    lines = [f"{len(traced)} of {len(outcomes)} families are traced.", "", "| traced | families |", "|---|---|"]
    lines += [f"| {proof} ({len(names)}) | {_listed(names)} |" for proof, names in proofs.items()]
    lines += [
        "",
        f"{len(refused)} are refused, each in one sentence.",
        "",
        "| refused because of | families |",
        "|---|---|",
    ]
    lines += [
        f"| {label} ({len(groups[label])}) | {_listed(groups[label])} |" for label, _ in _REASONS if label in groups
    ]
    return "\n".join(lines)


def _proof_group(outcome: Outcome) -> str:
    if outcome.proof.startswith("as "):
        return "text part of a multimodal model, as that family"
    return outcome.proof.partition(":")[0] or "not compared"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def documented() -> tuple[dict[str, str], dict[str, str]]:
    """Families that docs/models.md says are traced, with their proof, and refused, with the reason."""
    head = r"^\| (?:traced|refused because of) \| families \|$"
    _, traced, refused = re.split(head, DOCUMENT.read_text("utf-8"), flags=re.M)
    return _rows(traced), _rows(refused)


def _rows(table: str) -> dict[str, str]:
    rows = re.findall(r"^\| (.*) \(\d+\) \| (.*) \|$", table, flags=re.M)
    return {name: label for label, names in rows for name in _NAME.findall(names)}


_NAME = re.compile(r"`([^`]+)`")
_MADE = re.compile(r"(?<=<!-- made by benchmarks.model_families -->\n).*?(?=\n<!-- end -->)", re.S)


def main() -> int:
    """Print the sweep; exit code 1 when a family ends in anything but a trace or a sentence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types (default: all)")
    parser.add_argument("--prove", action="store_true", help="compare the traced ones with Transformers over two ranks")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/models.md")
    parser.add_argument("--check", action="store_true", help="compare with the tables of docs/models.md")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _work(args.families, args.prove)
        return 0
    if args.write and args.families:
        parser.error("--write needs all families")
    outcomes = []
    for outcome in sweep(args.families, prove=args.prove):
        outcomes.append(outcome)
        print(outcome.family, outcome.verdict, outcome.command, outcome.reason, outcome.proof, sep=" | ", flush=True)
    for verdict in _ORDER:
        print(f"{verdict:>10} {sum(o.verdict == verdict for o in outcomes)}")
    if args.write:
        text = DOCUMENT.read_text("utf-8")
        if not args.prove and " families |" in text:
            known = documented()[0]
            outcomes = [replace(o, proof=known.get(o.family, "")) for o in outcomes]
        DOCUMENT.write_text(_MADE.sub(lambda _: tables(outcomes), text), "utf-8")
    bad = [o.family for o in outcomes if o.verdict in (CRASHED, HUNG)]
    if args.check:
        bad += differing(outcomes)
    return int(bool(bad))


def differing(outcomes: Sequence[Outcome]) -> list[str]:
    """Families of which docs/models.md says something else; each is printed."""
    traced, refused = documented()
    wrong = [o.family for o in outcomes if o.family not in (refused if o.verdict == REFUSED else traced)]
    for family in wrong:
        print(f"docs/models.md does not have {family} where it belongs")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
