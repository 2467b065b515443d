"""The model card of a checkpoint: README.md with its numbers and how to load it, layers.png with what each layer kept.

Everything is taken from the manifest (and from config.json, whether it needs classes of its own). What was not measured is
stated as such. Paths on the machine that made the checkpoint stay out: the card is for publishing.
"""

from __future__ import annotations

import io
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import jinja2
import matplotlib.style
import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tune_prune.checkpoint.card.card_numbers import (
    UNKNOWN,
    accuracy,
    dequantised,
    format_perplexity,
    kept,
    measured_on,
    metric,
    short_bytes,
    short_count,
)
from tune_prune.checkpoint.card.commands import saved_config, uses
from tune_prune.checkpoint.generation_speed import conditions, rate
from tune_prune.checkpoint.manifest import Manifest
from tune_prune.core.config import ZERO_SHOT_METRIC
from tune_prune.core.files import atomic_write_bytes, atomic_write_text
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.kinds import texts_of
from tune_prune.core.terminal import markdown, markdown_code, printable
from tune_prune.models.geometry import Geometry
from tune_prune.pruning.methods import load_method

CARD, PICTURE = "README.md", "layers.png"
TEMPLATES = Path(__file__).parent / "templates"
_DPI = 160
# Okabe and Ito's colours, which people with any common colour blindness can tell apart (Color Universal Design, 2008).
_ORANGE, _BLUE, _GONE, _GREY = "#e69f00", "#0072b2", "#e4e4e4", "#666666"


def write_card(folder: Path, manifest: Manifest, geometry: Geometry) -> None:
    """Write README.md and layers.png into the checkpoint `folder`, each atomically; older ones are replaced. `geometry` is the
    dense model's: the manifest says what was kept, not of how much."""
    atomic_write_bytes(folder / PICTURE, picture(manifest, geometry))
    atomic_write_text(folder / CARD, render(folder, manifest, geometry))


def render(folder: Path, manifest: Manifest, geometry: Geometry) -> str:
    """The text of README.md."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Markdown
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "int": "{:,}".format,
        "percent": "{:.1%}".format,
        "quoted": shlex.quote,
        "short": short_count,
        "bytes": short_bytes,
        "share": kept,
    }
    hub_id = base_hub_id(manifest)
    license_entries = {key: " ".join(text.split()) for key, text in manifest.base.license.items()}  # a line each
    name = hub_id or manifest.base.label
    text = environment.get_template("model_card.md.jinja").render(
        base=manifest.base,
        base_link=f"[{name}](https://huggingface.co/{name})" if hub_id else markdown(name),
        command=command_line(folder, manifest),
        created=manifest.created[:10],
        dense=manifest.sizes["dense"],
        disk_bytes=sum(file.bytes for file in manifest.files.values()),
        files=manifest.files,
        format=manifest.format,
        manifest=manifest,
        hub_id=hub_id,
        license_entries=yaml.safe_dump(license_entries, sort_keys=False, width=10**6).strip(),
        measured_on=measured_on(manifest),
        own_classes="auto_map" in saved_config(folder),  # names classes that lie beside it
        padded="padded" in manifest.sizes,
        saved=manifest.saved_sizes,
        picture_text=picture_text(manifest, geometry),
        plan=manifest.plan,
        pruned=manifest.sizes["pruned"],
        quality=_quality(manifest),
        settings=_settings(manifest),
        speed=_speed(manifest),
        uses=uses(folder, manifest, "."),
        title=markdown(name.rpartition("/")[2]),
        versions=", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())),
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def base_hub_id(manifest: Manifest) -> str | None:
    """The dense model's id on the Hugging Face hub; None for a folder or an embedded model, which the manifest has by label."""
    model = manifest.base.model
    return model if re.fullmatch(r"\w[\w.-]*/[\w.-]+", model) else None


def command_line(folder: Path, manifest: Manifest) -> str:
    """The command that makes this checkpoint again, in lines. A local folder is named without its place."""
    base, config, source = manifest.base, manifest.config, manifest.source
    revision = base.revision if base_hub_id(manifest) else None
    flags: dict[str, Any] = {"--model": _public(base.model), "--revision": revision}
    values = {HYPERPARAMETERS[n]: getattr(config, n) for n in load_method(config.method).hyperparameters}
    flags |= {r.flag: value for r, value in values.items() if value != r.default or not (r.switch or r.later)}
    flags |= {
        "--calibration": "+".join(map(_public, texts_of(source.of(config).calibration))) if source else None,
        "--seed": source.of(config).seed if source else None,
        "--dtype": saved_config(folder).get("dtype"),
        "--format": manifest.format if manifest.format != "hf" else None,
        "--output": "DIR",
    }
    # On one line each: a folder's name may hold whatever ends a block of code.
    texts = {flag: printable(" ".join(str(value).split())) for flag, value in flags.items() if value is not None}
    words = [f"{flag} {shlex.quote(text)}" for flag, text in texts.items()]
    lines = [" ".join(words[start : start + 4]) for start in range(0, len(words), 4)]
    return " \\\n    ".join(["tune-prune prune", *lines])


def _quality(manifest: Manifest) -> list[dict[str, str]]:
    """The rows of what was measured, this model's and the dense one's; none where nothing was."""
    if manifest.metrics is None:
        return []
    dense, pruned = manifest.baseline or {}, manifest.metrics
    tasks = [name for name in pruned if name.startswith("acc_") and not name.endswith("_stderr") and name != "acc_mean"]
    order = [f"acc_{task}" for task in ZERO_SHOT_METRIC]  # the paper's, others behind them
    tasks.sort(key=lambda name: (order.index(name) if name in order else len(order), name))
    rows = []
    if "ppl" in pruned:
        before, after = metric(dense, "ppl"), metric(pruned, "ppl")
        ratio = UNKNOWN if before is None or after is None or not math.isfinite(after / before) else after / before
        rows.append(_row("Perplexity (lower is better)", format_perplexity(before), format_perplexity(after), ratio))
    for name in [*(["acc_mean"] if "acc_mean" in pruned else []), *tasks]:
        task = name.removeprefix("acc_")
        title = "**Mean accuracy**" if name == "acc_mean" else f"{markdown(task)} ({ZERO_SHOT_METRIC.get(task, 'acc')})"
        share = kept(metric(pruned, name), metric(dense, name))
        rows.append(_row(title, accuracy(dense, name), accuracy(pruned, name), share))
    return rows


def _row(name: str, dense: str, pruned: str, kept: str | float) -> dict[str, str]:
    share = kept if isinstance(kept, str) else f"× {kept:.2f}"
    return {"name": name, "dense": dense, "pruned": pruned, "kept": share}


def _speed(manifest: Manifest) -> dict[str, Any] | None:
    if manifest.speed is None:
        return None
    this = "padded" if "padded" in manifest.speed else "pruned"
    dense, pruned = manifest.speed["dense"], manifest.speed[this]
    values = (
        ("Prefill, tokens/s", dense.prefill_tokens_per_s, pruned.prefill_tokens_per_s, rate),
        ("Decode, tokens/s", dense.decode_tokens_per_s, pruned.decode_tokens_per_s, rate),
        ("Peak memory", dense.peak_memory_bytes, pruned.peak_memory_bytes, short_bytes),
    )
    rows = [
        {"name": name, "dense": form(before), "pruned": form(after), "ratio": f"× {after / before:.2f}"}
        for name, before, after, form in values
    ]
    text = f"Both measured by PyTorch in one run, taking turns: {conditions(pruned)}."
    if "padded" in manifest.sizes and this == "pruned":
        text += " The zeros were left out for this measurement."
    elif manifest.format == "gguf":
        text += " The pruned model was measured before it was written as GGUF, not by llama.cpp."
    return {"rows": rows, "text": text}


def _settings(manifest: Manifest) -> list[tuple[str, str]]:
    """What made the checkpoint, as rows of name and value."""
    base, config, plan = manifest.base, manifest.config, manifest.plan
    name = base_hub_id(manifest) or _public(base.model)
    revision = f", revision {markdown_code(base.revision)}" if base.revision else ""
    dropped = manifest.dropped_layers
    layers = f"{base.layers - len(dropped)} of {base.layers}"
    layers += f"; dropped: {', '.join(map(str, dropped))}" if dropped else ""
    for block, left in (("attention", plan.kept_groups), ("MLP", plan.kept_channels)):
        gone = [str(layer) for layer, part in enumerate(left) if not part and layer not in dropped]
        layers += f"; without {block}: {', '.join(gone)}" if gone else ""
    training = f"`{config.recovery}`, {config.recovery_steps:,} steps, learning rate {config.recovery_rate:g}, "
    training += f"rank {config.recovery_rank}"
    steps = f" in {config.steps} steps" if config.steps > 1 else ""
    training += "" if manifest.trained else "; not used (Limitations)"
    refit = f"`{config.compensation}`, damping {config.damping:g}, {config.refit_tokens:,} tokens"
    refit += "" if manifest.refitted else "; not used (Limitations)"
    return [
        ("Base model", f"{markdown_code(name)}{revision}, fingerprint {markdown_code(base.fingerprint)}"),
        *([] if base.gguf is None else [("Base weights", dequantised(base.gguf))]),
        ("Licence", _license(manifest)),
        ("Method", f"`{config.method}`"),
        ("Sample text", _calibration(manifest)),
        ("Shape", f"`{config.shape}`"),
        (
            "Parameters removed",
            f"{config.pruning_ratio:.1%} asked, {plan.removed_fraction:.2%} reached{steps} "
            f"({plan.removed_params:,} of {plan.total_params:,})",
        ),
        *([] if config.compensation == "none" else [("Repair", refit)]),
        *([] if config.recovery == "none" else [("Training", training)]),
        ("Layers", layers),
    ]


def _license(manifest: Manifest) -> str:
    stated = manifest.base.license
    if "license" not in stated:
        unknown = "unknown: none was found in the base model's card, or that could not be read"
        return f"{unknown}; look it up before you publish this model"
    name = stated.get("license_name", stated["license"])
    link = stated.get("license_link")
    linked = link is not None and re.fullmatch(r"https?://[\w.~:/?#@!$&*+,;=%-]+", link)  # no javascript:
    return f"{f'[{markdown(name)}]({link})' if linked else markdown_code(name)}, that of the base model"


def _calibration(manifest: Manifest) -> str:
    config, source = manifest.config, manifest.source
    if not load_method(config.method).statistics:
        return "none: the method reads no text"
    samples = f"{config.num_samples:,} samples of {config.seq_len:,} tokens"
    if "removal_divisor" in load_method(config.method).reads:
        samples += f" (removal losses: the first {config.num_removal_samples:,}, divisor {config.removal_divisor:,})"
    return samples + (
        f" of {_calibration_text(source.of(config).calibration)}, seed {source.of(config).seed}" if source else ""
    )


def _calibration_text(calibration: str) -> str:
    sources = {
        "embedded": "the text embedded in tune_prune",
        "wikitext2": "WikiText-2 train",
        "c4": "C4 train",
    }
    texts = [sources.get(text) or markdown_code(_public(text)) for text in texts_of(calibration)]
    return texts[0] if len(texts) == 1 else f"{' and '.join(texts)} in equal parts, in turn"


def _public(name: str) -> str:
    """A name without the place of a file or folder on the machine that was used."""
    return PurePath(name).name if PurePath(name).is_absolute() else name


# The picture.

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "text.parse_math": False,
}

_DROPPED: dict[str, Any] = {"facecolor": "white", "edgecolor": _GREY, "hatch": "////", "linewidth": 0.6}


def layer_counts(manifest: Manifest, geometry: Geometry) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Kept and dense counts [layers of the dense model] of KV groups and of MLP channels."""
    plan = manifest.plan
    return {
        "KV groups": (np.array([*map(len, plan.kept_groups)]), np.array(geometry.kv_heads)),
        "MLP channels": (np.array([*map(len, plan.kept_channels)]), np.array(geometry.mlp_width)),
    }


def picture_text(manifest: Manifest, geometry: Geometry) -> str:
    """What layers.png shows, in words: for those who cannot see it."""
    parts = []
    for name, (left, dense) in layer_counts(manifest, geometry).items():
        shares = left / dense
        parts.append(
            f"{name} kept: {left.sum() / dense.sum():.1%} in all, from {shares.min():.1%} (layer {shares.argmin()}) to "
            f"{shares.max():.1%} (layer {shares.argmax()})"
        )
    return "; ".join(parts) + "."


def picture(manifest: Manifest, geometry: Geometry) -> bytes:
    """The content of layers.png."""
    content = io.BytesIO()
    with matplotlib.style.context(_STYLE, after_reset=True):
        layers_figure(manifest, geometry).savefig(content, format="png", dpi=_DPI, metadata={"Software": None})
    return content.getvalue()


def layers_figure(manifest: Manifest, geometry: Geometry) -> Figure:
    """A bar per layer of the dense model: the share of its KV groups (above) and MLP channels (below) that was kept."""
    counts = layer_counts(manifest, geometry)
    figure = Figure(figsize=(min(10.0, 5.0 + 0.07 * geometry.num_layers), 3.2), layout="constrained")
    panels = figure.subplots(2, sharex=True)
    for axes, (name, (left, dense)), colour in zip(panels, counts.items(), (_ORANGE, _BLUE), strict=True):
        _draw(axes, left / dense, colour, manifest.dropped_layers)
        axes.set_title(f"{name}: {left.sum() / dense.sum():.1%} kept")
    panels[1].set_xlabel("Layer of the original model")
    handles = [Patch(facecolor=_GONE, label="removed")]
    if manifest.dropped_layers:
        handles.append(Patch(**_DROPPED, label="whole layer dropped"))
    panels[0].legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2, borderpad=0)
    return figure


def _draw(axes: Axes, shares: np.ndarray, colour: str, dropped: Sequence[int]) -> None:
    layers = np.arange(len(shares))
    axes.bar(layers, 1.0, 0.8, color=_GONE, label="removed")
    axes.bar(layers, shares, 0.8, color=colour, label="kept")
    if dropped:
        axes.bar(list(dropped), 1.0, 0.8, **_DROPPED, label="whole layer dropped")
    axes.set_ylim(0, 1)
    axes.set_xlim(-0.6, len(shares) - 0.4)
    axes.set_yticks([0, 0.5, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(16, integer=True, steps=[1, 2, 4, 5, 8, 10]))
