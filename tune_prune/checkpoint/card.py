"""The model card of a checkpoint: README.md with its numbers and how to load it, layers.png with what each layer kept.

Everything is taken from the manifest (and from config.json, whether it needs classes of its own); model_card.md.jinja has the
text. What was not measured is stated as such. Paths on the machine that made the checkpoint stay out: the card is for publishing.
"""

from __future__ import annotations

import io
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import yaml

from tune_prune.checkpoint.generation_speed import conditions, rate
from tune_prune.checkpoint.licenses import TERMS
from tune_prune.checkpoint.manifest import Manifest
from tune_prune.core.config import BEGUN, OTHER_TEXT, ZERO_SHOT_METRIC, reads_embedded_data
from tune_prune.core.files import atomic_write_bytes, atomic_write_text, number
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.kinds import Shape, texts_of
from tune_prune.core.measures import fraction, wilson_interval, wilson_items
from tune_prune.core.terminal import markdown, markdown_code, printable
from tune_prune.data.perplexity_text import TEXT_FILE, WIKITEXT2
from tune_prune.models.families import family_of
from tune_prune.models.geometry import Geometry
from tune_prune.pruning.methods import load_method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CARD, PICTURE = "README.md", "layers.png"
TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
UNKNOWN = "–"
QUANTISED = "Q4_K_M"  # llama.cpp's usual choice
AUTO_WRAPPER = (
    "AutoModelForImageTextToText"  # loads a model with a language model inside; AutoModelForCausalLM knows few
)
_VLLM_HEAD = 32  # the smallest head size that vLLM's attention takes


def write_card(folder: Path, manifest: Manifest, geometry: Geometry) -> None:
    """Write README.md and layers.png into the checkpoint `folder`, each atomically; older ones are replaced. `geometry` is the
    dense model's: the manifest says what was kept, not of how much."""
    atomic_write_bytes(folder / PICTURE, picture(manifest, geometry))
    atomic_write_text(folder / CARD, render(folder, manifest, geometry))


def render(folder: Path, manifest: Manifest, geometry: Geometry) -> str:
    """Return the text of README.md."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Markdown
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "bytes": short_bytes,
        "code": markdown_code,
        "int": "{:,}".format,
        "markdown": markdown,
        "percent": "{:.1%}".format,
        "percent_in_full": "{:.2%}".format,
        "public": public,
        "rate": rate,
        "share": share,
        "short": short_count,
        "times": lambda after, before: f"× {after / before:.2f}",
    }
    hub_id = base_hub_id(manifest)
    terms = TERMS.get(manifest.base.license.get("license", ""))
    licence = {key: " ".join(text.split()) for key, text in manifest.base.license.items()}  # a line each
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        about=manifest,
        base=manifest.base,
        built_with=terms.built_with if terms else "",
        calibration=_calibration(manifest),
        command=command_line(folder, manifest),
        conditions=conditions,
        config=manifest.config,
        dense=manifest.sizes["dense"],
        disk_bytes=sum(file.bytes for file in manifest.files.values()),
        hub_id=hub_id,
        gone=" and ".join([*["attention heads"] * any(geometry.kv_heads), f"{geometry.channel_name}s"]),
        layers=_layers(manifest),
        license=_license(manifest),
        license_entries=yaml.safe_dump(licence, sort_keys=False, width=10**6).strip(),
        measured_on=measured_on(manifest),
        mlx="model_file" in saved_config(folder),
        name=hub_id or manifest.base.label,
        auto=AUTO_WRAPPER if "text_config" in saved_config(folder) else "AutoModelForCausalLM",
        own_classes="auto_map" in saved_config(folder),  # names classes that lie beside it
        padded="padded" in manifest.sizes,
        picture_text=picture_text(manifest, geometry),
        plan=manifest.plan,
        pruned=manifest.sizes["pruned"],
        quality=_quality(manifest),
        saved=manifest.saved_sizes,
        uses=uses(folder, manifest, "."),
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def base_hub_id(manifest: Manifest) -> str | None:
    """Return the dense model's id on the Hugging Face hub; None for a folder or an embedded model, which is known by its label."""
    model = manifest.base.model
    return model if re.fullmatch(r"\w[\w.-]*/[\w.-]+", model) else None


def saved_config(folder: Path) -> dict[str, Any]:
    """Return the checkpoint's config.json; a GGUF file has none."""
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


# What it can be used for, and how it is made again.


def uses(folder: Path, about: Manifest, where: str) -> list[tuple[str, str]]:
    """Return names and commands for a shell: to try the checkpoint, to serve it and, of a GGUF file, to quantise it; those that
    hold for its format and its layers, and no others. `where`: how `folder` is named in them."""
    if about.format == "gguf":
        file = next(iter(about.files)) if where == "." else f"{where}/{next(iter(about.files))}"
        of_text = {"chat": ["llama-cli", "-m", file], "serve": ["llama-server", "-m", file]} if about.for_text else {}
        small = ["llama-quantize", file, f"{file.removesuffix('.gguf')}-{QUANTISED}.gguf", QUANTISED]
        further = {} if about.quantization else {"quantise": small}
        return [(name, shlex.join(command)) for name, command in {**of_text, **further}.items()]
    config = saved_config(folder)
    own_classes = "auto_map" in config  # classes that lie beside it
    trust = ", trust_remote_code=True" if own_classes else ""
    write = f'pipeline("text-generation", {json.dumps(where)}{trust})'
    code = f'from transformers import pipeline; print({write}("Once upon a time"))'
    if wrapper := "text_config" in config:  # no pipeline of transformers takes text alone to such a model
        auto, tokenizer = (
            f"{kind}.from_pretrained({json.dumps(where)}{trust})" for kind in (AUTO_WRAPPER, "AutoTokenizer")
        )
        code = (
            f"from transformers import {AUTO_WRAPPER}, AutoTokenizer; model, tokenizer = {auto}, {tokenizer}; "
            'print(tokenizer.decode(model.generate(**tokenizer("Once upon a time", return_tensors="pt"))[0]))'
        )
    commands = [("try", shlex.join(["python", "-c", code]))]
    if (why := _not_in_vllm(about, wrapper, own_classes)) is not None:
        return [*commands, ("serve", why)]
    config = config.get("text_config", config)
    if (
        config.get("head_dim") or config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
    ) >= _VLLM_HEAD:
        options = [*["--trust-remote-code"] * own_classes, *vllm_options(config, about.config.shape)]
        commands.append(("serve", shlex.join(["vllm", "serve", where, *options])))
    return commands


def _not_in_vllm(about: Manifest, wrapper: bool, own_classes: bool) -> str | None:
    """Return in a clause why vLLM does not serve a folder, and what would; None where it may."""
    family = family_of(about.base.model_type)
    bare = [str(place) for place, layer in enumerate(about.saved_layers) if not about.plan.kept_groups[layer]]
    if bare and about.format == "hf" and "attention" in family.prunes:
        layers = f"layer{'s' * (len(bare) > 1)} {', '.join(bare)}"
        return f"not with vLLM, as {layers} lost all attention: save it with --format vllm"
    if not own_classes:
        return None
    if family.experts:
        return "not with vLLM, as its layers have different numbers of experts: search with --shape uniform"
    if family.recurrent:  # vLLM's class for transformers' models keeps keys and values alone
        return "not with vLLM, as its layers differ and carry a state from token to token: search with --shape uniform"
    if wrapper:
        return "not tried with vLLM, as its layers differ beside a vision tower: search with --shape uniform"
    return None


def vllm_options(config: Mapping[str, Any], shape: str) -> list[str]:
    """Return the options with which vLLM runs a model with the values of that config.json as one pruned in that `shape`."""
    heads, hidden, options = config.get("num_attention_heads") or 1, config.get("hidden_size", 0), list[str]()
    as_wide = heads * (config.get("head_dim") or hidden // heads) == hidden
    model_type, qwen2 = config.get("model_type"), not as_wide or config.get("use_sliding_window")
    if (model_type == "qwen2" and qwen2) or model_type in ("cohere", "cohere2", "ernie4_5", "ministral3"):
        # vLLM's own class of Qwen2 ignores head_dim and refuses windows in a part of the layers, those of the others have given
        # other numbers than transformers' (0.32); the class of transformers, which it can run, too, does right.
        options += ["--model-impl", "transformers"]
    gpus = Shape.read(shape).gpus
    return [*options, "--tensor-parallel-size", str(gpus)] if gpus > 1 else options


def command_line(folder: Path, manifest: Manifest) -> str:
    """Return the command that makes this checkpoint again, in lines. A local folder is named without its place."""
    base, config, source = manifest.base, manifest.config, manifest.source
    revision = base.revision if base_hub_id(manifest) else None
    flags: dict[str, Any] = {"--model": public(base.model), "--revision": revision}
    values = {HYPERPARAMETERS[n]: getattr(config, n) for n in load_method(config.method).hyperparameters}
    flags |= {r.flag: value for r, value in values.items() if value != r.default or not (r.switch or r.later)}
    flags |= {
        "--calibration": "+".join(map(public, texts_of(source.of(config).calibration))) if source else None,
        "--seed": source.of(config).seed if source else None,
        "--dtype": saved_config(folder).get("dtype"),
        "--format": manifest.format if manifest.format != "hf" else None,
        "--quantize": manifest.quantization and manifest.quantization.lower(),
        "--output": "DIR",
    }
    # On one line each: a folder's name may hold whatever ends a block of code.
    texts = {flag: printable(" ".join(str(value).split())) for flag, value in flags.items() if value is not None}
    words = [f"{flag} {shlex.quote(text)}" for flag, text in texts.items()]
    lines = [" ".join(words[start : start + 4]) for start in range(0, len(words), 4)]
    return " \\\n    ".join(["tune-prune prune", *lines])


# Parts of sentences and rows of tables.


def _quality(manifest: Manifest) -> list[tuple[str, str, str, str]]:
    """Return rows of what was measured: name, the dense model's, this model's, and the part kept; none where nothing was."""
    if manifest.metrics is None:
        return []
    dense, pruned = manifest.baseline or {}, manifest.metrics
    tasks = [name for name in pruned if name.startswith("acc_") and not name.endswith("_stderr") and name != "acc_mean"]
    order = [f"acc_{task}" for task in ZERO_SHOT_METRIC]  # the paper's, others behind them
    tasks.sort(key=lambda name: (order.index(name) if name in order else len(order), name))
    rows = []
    if "ppl" in pruned:
        before, after = metric(dense, "ppl"), metric(pruned, "ppl")
        ratio = math.inf if before is None or after is None else after / before
        times = f"× {ratio:.2f}" if math.isfinite(ratio) else UNKNOWN
        rows.append(("Perplexity (lower is better)", format_perplexity(before), format_perplexity(after), times))
    for name in [*(["acc_mean"] if "acc_mean" in pruned else []), *tasks]:
        task = name.removeprefix("acc_")
        title = "**Mean accuracy**" if name == "acc_mean" else f"{markdown(task)} ({ZERO_SHOT_METRIC.get(task, 'acc')})"
        kept = share(metric(pruned, name), metric(dense, name))
        rows.append((title, accuracy(dense, name), accuracy(pruned, name), kept))
    return rows


def measured_on(manifest: Manifest) -> str:
    """Return what the recorded numbers were measured on, as far as the manifest knows, in sentences."""
    source = manifest.source
    if source is None:
        return "Measured by tune_prune."
    protocol = source.protocol
    own_data = reads_embedded_data(source.model, source.data_dir)
    if own_data:
        text = "the perplexity text embedded in tune_prune"
    elif source.data_dir is None or (manifest.measured_on and manifest.measured_on.text in WIKITEXT2):
        text = "the raw WikiText-2 test split"
    else:
        text = ("the text in {file}" if manifest.measured_on is None else OTHER_TEXT).format(
            file=markdown_code(str(TEXT_FILE))
        )
    if protocol.perplexity_tokens is not None:
        text = f"the first {protocol.perplexity_tokens:,} tokens of {text}"
    count = "all questions" if protocol.limit is None else f"the first {protocol.limit:,} questions"
    users = [task for task in protocol.tasks if task not in ZERO_SHOT_METRIC and source.data_dir is not None]
    whose = ["lm-eval's zero-shot tasks"] * (len(users) < len(protocol.tasks))
    whose += [f"the user's own {', '.join(map(markdown, users))}"] * bool(users)
    tasks = "the tasks embedded in tune_prune" if own_data else " and of ".join(whose)
    chance = metric(manifest.metrics or {}, "chance_acc_mean")
    sentence = (
        f"Measured by tune_prune in {markdown(source.dtype)}: perplexity on {text}, in windows of at most "
        f"{protocol.perplexity_window:,} tokens; accuracy on {count} of each of {tasks}"
    )
    sentence += "" if chance is None else f" (chance: {fraction(chance)} on average)"
    return f"{sentence}; {BEGUN}." if protocol.bos else f"{sentence}."


def _layers(manifest: Manifest) -> str:
    layers, dropped = manifest.base.layers, manifest.dropped_layers
    text = f"{layers - len(dropped)} of {layers}"
    text += f"; dropped: {', '.join(map(str, dropped))}" if dropped else ""
    blocks = {"attention": ("attention", manifest.plan.kept_groups), "mlp": ("MLP", manifest.plan.kept_channels)}
    for block in family_of(manifest.base.model_type).prunes:
        name, kept = blocks[block]
        gone = [str(layer) for layer, part in enumerate(kept) if not part and layer not in dropped]
        text += f"; without {name}: {', '.join(gone)}" if gone else ""
    return text


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
    method = load_method(config.method)
    if not method.statistics:
        return "none: the method reads no text"
    samples = f"{config.num_samples:,} samples of {config.seq_len:,} tokens"
    if "removal_divisor" in method.reads:
        samples += f" (removal losses: the first {config.num_removal_samples:,}, divisor {config.removal_divisor:,})"
    if source is None:
        return samples
    names = {
        "embedded": "the text embedded in tune_prune",
        "wikitext2": "WikiText-2 train",
        "c4": "C4 train",
    }
    run = source.of(config)
    texts = [names.get(text) or markdown_code(public(text)) for text in texts_of(run.calibration)]
    text = texts[0] if len(texts) == 1 else f"{' and '.join(texts)} in equal parts, in turn"
    return f"{samples} of {text}, seed {run.seed}"


def public(name: str) -> str:
    """Return a name without the place of a file or folder on the machine that was used."""
    return PurePath(name).name if PurePath(name).is_absolute() else name


# Numbers: digits that mean something, units that the Hub uses, a dash for what is not known.


def metric(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a recorded number; None where there is none, or it is not a number."""
    value = None if metrics.get(name) is None else float(number(metrics[name]))
    return None if value is None or math.isnan(value) else value


def accuracy(metrics: Mapping[str, Any], name: str) -> str:
    """Return `.5980 ± .0041`, or of 0 and 1 with Wilson's 95% interval, `1.0000 [.9842, 1.0000]`; alone where its standard error
    is not known or, of 0 and 1, is 0, which is no estimate; a dash where nothing is."""
    value, stderr = metric(metrics, name), metric(metrics, f"{name}_stderr")
    if value is None:
        return UNKNOWN
    if stderr is None or (value in (0, 1) and stderr == 0):
        return fraction(value)
    if value in (0, 1):
        low, high = wilson_interval(value, wilson_items(stderr))
        return f"{fraction(value)} [{fraction(low)}, {fraction(high)}]"
    return f"{fraction(value)} ± {fraction(stderr)}"


def format_perplexity(value: float | None) -> str:
    """Return 2 digits; 3 significant ones where a model is broken and it is huge."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if value < 100_000 else f"{value:.3g}"


def share(value: float | None, whole: float | None) -> str:
    """Return `value` in percent of `whole`: 80.0%."""
    return UNKNOWN if value is None or not whole else f"{value / whole:.1%}"


def short_count(count: int) -> str:
    """Return a number of parameters in 3 digits: 8.03B."""
    return _in_units(count, ("", "k", "M", "B", "T"))


def short_bytes(count: float) -> str:
    """Return bytes in decimal units, as the Hub shows them: 16.1 GB."""
    return _in_units(count, (" B", " kB", " MB", " GB", " TB"))


def _in_units(count: float, units: Sequence[str]) -> str:
    power = 0
    while count >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    digits = 0 if power == 0 or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f}{units[power]}"


# The picture. matplotlib takes a second to be imported, so that only who draws one imports it.

_DPI = 160
# Okabe and Ito's colours, which people with any common colour blindness can tell apart (Color Universal Design, 2008).
_ORANGE, _BLUE, _GONE, _GREY = "#e69f00", "#0072b2", "#e4e4e4", "#666666"
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


def layer_counts(manifest: Manifest, geometry: Geometry) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return kept and dense counts [layers of the dense model] of KV groups and of MLP channels, or experts."""
    plan = manifest.plan
    groups = {"KV groups": (plan.kept_groups, geometry.kv_heads)} if any(geometry.kv_heads) else {}
    both = groups | {f"{geometry.channel_name}s": (plan.kept_channels, geometry.mlp_width)}
    return {name: (np.array([*map(len, kept)]), np.array(dense)) for name, (kept, dense) in both.items()}


def picture_text(manifest: Manifest, geometry: Geometry) -> str:
    """Return what layers.png shows, in words: for those who cannot see it."""
    parts = []
    for name, (kept, dense) in layer_counts(manifest, geometry).items():
        shares = kept / dense
        parts.append(
            f"{name} kept: {kept.sum() / dense.sum():.1%} in all, from {shares.min():.1%} (layer {shares.argmin()}) to "
            f"{shares.max():.1%} (layer {shares.argmax()})"
        )
    return "; ".join(parts) + "."


def picture(manifest: Manifest, geometry: Geometry) -> bytes:
    """Return the content of layers.png."""
    import matplotlib.style

    content = io.BytesIO()
    with matplotlib.style.context(_STYLE, after_reset=True):
        layers_figure(manifest, geometry).savefig(content, format="png", dpi=_DPI, metadata={"Software": None})
    return content.getvalue()


def layers_figure(manifest: Manifest, geometry: Geometry) -> Figure:
    """Draw a bar per layer of the dense model: the share of its KV groups (above) and MLP channels (below) that was kept."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    hatched: dict[str, Any] = {"facecolor": "white", "edgecolor": _GREY, "hatch": "////", "linewidth": 0.6}
    hatched["label"] = "whole layer dropped"
    dropped, layers = list(manifest.dropped_layers), np.arange(geometry.num_layers)
    figure = Figure(figsize=(min(10.0, 5.0 + 0.07 * geometry.num_layers), 3.2), layout="constrained")
    counts = layer_counts(manifest, geometry)
    panels = figure.subplots(len(counts), sharex=True, squeeze=False)[:, 0]
    for axes, (name, (kept, dense)) in zip(panels, counts.items(), strict=True):
        colour = _BLUE if name == "MLP channels" else _ORANGE
        axes.bar(layers, 1.0, 0.8, color=_GONE, label="removed")
        axes.bar(layers, kept / dense, 0.8, color=colour, label="kept")
        if dropped:
            axes.bar(dropped, 1.0, 0.8, **hatched)
        axes.set_ylim(0, 1)
        axes.set_xlim(-0.6, len(layers) - 0.4)
        axes.set_yticks([0, 0.5, 1])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(16, integer=True, steps=[1, 2, 4, 5, 8, 10]))
        axes.set_title(f"{name}: {kept.sum() / dense.sum():.1%} kept")
    panels[-1].set_xlabel("Layer of the original model")
    handles = [Patch(facecolor=_GONE, label="removed"), *([Patch(**hatched)] if dropped else [])]
    panels[0].legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2, borderpad=0)
    return figure
