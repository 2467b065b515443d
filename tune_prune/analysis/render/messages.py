"""Numbers and remarks in words, in every language of the reports.

A value is formatted where its sentence is written, by the part of the placeholder behind the colon: `{naive:acc}` is
`.5980`, `{points:points}` is `1.25`, `{count:row}` is `1 row` or `3 rows`, `{others:list}` is `a, b and 2 more`,
`{side:word}` is looked up in WORDS. Without one, a list is joined with commas and a number is printed short.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Mapping
from typing import Any

from tune_prune.analysis.statistics.findings import Message, Trend
from tune_prune.analysis.tables.table import Column, Row, missing

LANGUAGES = ("en", "zh")
MISSING = "–"
_LISTED = 4  # names of a list that a sentence spells out

SENTENCES: Mapping[str, Mapping[str, str]] = {
    "edge": {
        "en": "The best {knob}, {value}, is the {side:word} one tried: the optimum may lie outside the range, so widen it.",
        "zh": "最优的 {knob}（{value}）是所试取值中{side:word}的一个：最优点可能在搜索范围之外，应扩大范围。",
    },
    "within_noise": {
        "en": "{best} cannot be told from {others:list}: the next is {points:points} points behind, which is within noise.",
        "zh": "{best} 与 {others:list} 无法区分：次优仅低 {points:points} 个百分点，在噪声范围之内。",
    },
    "ppl_disagrees": {
        "en": "The most accurate configuration, {best}, is not the one of lowest perplexity, {best_ppl}.",
        "zh": "准确率最高的配置 {best} 并不是困惑度最低的配置 {best_ppl}。",
    },
    "rank_disagrees": {
        "en": "Methods ranked by mean ({by_mean}) and by maximum ({by_max}) accuracy disagree.",
        "zh": "各方法按平均准确率（{by_mean}）与按最高准确率（{by_max}）的排名不一致。",
    },
    "not_finite": {
        "en": "{column} is not computable: it is not a finite number in {count:row}.",
        "zh": "{column} 无法计算：有 {count:row}的取值不是有限数。",
    },
    "no_items": {
        "en": "No outcomes per item were kept: configurations are compared by the standard error of each alone, and the best's "
        "accuracy cannot be freed of selection bias.",
        "zh": "没有保存逐题结果：只能用各配置自身的标准误进行比较，也无法消除最优配置准确率中的选择偏差。",
    },
    "too_few": {
        "en": "Too few values ({n}) to compute it.",
        "zh": "数据过少（{n} 个），无法计算。",
    },
    "constant": {
        "en": "{column} is the same in every row, so nothing can be correlated with it.",
        "zh": "{column} 在所有行中取值相同，无法计算相关系数。",
    },
    "not_a_grid": {
        "en": "The complete trials are no full grid, so an analysis of variance is not given.",
        "zh": "完成的试验不构成完整网格，因此不给出方差分析。",
    },
    "shared_gradients": {
        "en": "{column} is the same for all methods of one gradient pass: the rows stand for {passes:pass}, and the interval "
        "counts each pass once.",
        "zh": "同一次梯度计算下各方法的 {column} 相同：这些行只对应 {passes:pass}，置信区间中每次只计一次。",
    },
    "at_chance": {
        "en": "The dense model itself is at chance on these tasks ({dense:acc}, chance {chance:acc}): their accuracies say "
        "nothing about pruning here; go by perplexity.",
        "zh": "稠密模型在这些任务上本身就处于随机水平（{dense:acc}，随机为 {chance:acc}）："
        "这里的准确率不能说明剪枝效果，请以困惑度为准。",
    },
    "dense_unknown": {
        "en": "The dense model's accuracy is not known, so what a configuration keeps of it is not given.",
        "zh": "稠密模型的准确率未知，因此不给出保留率。",
    },
    "missing_trials": {
        "en": "{missing} of the {expected} combinations of the levels seen have no complete trial: means over a level do not "
        "cover the same configurations.",
        "zh": "在已出现取值的 {expected} 个组合中，有 {missing} 个没有完成的试验：各水平的均值所覆盖的配置并不相同。",
    },
    "unpaired": {
        "en": "Configurations are compared by the standard error of each alone, not on the same items: differences are known "
        "less well than they could be.",
        "zh": "各配置按自身的标准误比较，而不是在相同题目上成对比较：差值的精度低于可达到的水平。",
    },
    "partly_unpaired": {
        "en": "{names:list} kept no outcomes on the items of the others: compared by the standard error of each alone, "
        "differences to the others are known less well.",
        "zh": "{names:list} 没有与其他配置相同题目的逐题结果：只能按各自的标准误比较，差值的精度较低。",
    },
    "stderr_unknown": {
        "en": "No standard error is known for {names:list}: counted among those that cannot be told from the best.",
        "zh": "{names:list} 的标准误未知：计入无法与最优配置区分的配置。",
    },
    "stopped_early": {
        "en": "Trials stopped early on part of the items: {count}. They do not compete, so what is said of the best is said among "
        "the complete ones.",
        "zh": "有 {count} 个试验在只评测部分题目后提前停止，不参与比较：关于最优配置的结论仅限于已完成的试验。",
    },
    "seeds_one": {
        "en": "Each configuration was run once: how much another calibration sample would change it is not in these intervals.",
        "zh": "每个配置只运行了一次：更换校准样本带来的变化不在这些区间之内。",
    },
    "selection_bias": {
        "en": "The best's accuracy, {naive:acc}, gains from being chosen as the highest: with choice and score on different "
        "items it is {corrected:acc}.",
        "zh": "最优配置的准确率 {naive:acc} 因“取最高者”而偏高：在不同题目上选择和评分时为 {corrected:acc}。",
    },
    "not_computable": {"en": "not computable", "zh": "无法计算"},
    "not_computable_in": {"en": "not computable ({what} in {count:row})", "zh": "无法计算（{count:row}为 {what}）"},
    "problem_stopped_early": {"en": "stopped early", "zh": "提前停止"},
    "problem_failed": {"en": "failed", "zh": "失败"},
    "problem_not_finite": {"en": "values not finite", "zh": "非有限数值"},
    "problem_duplicate": {"en": "duplicate", "zh": "重复"},
    "problem_missing": {"en": "missing", "zh": "缺失"},
    "problem_note": {"en": "to note", "zh": "说明"},
    "trend_rises": {
        "en": "accuracy rises with {knob}, by {spread:points} ± {stderr:points} points from the lowest to the highest level mean",
        "zh": "准确率随 {knob} 增大而上升，各水平均值最低与最高相差 {spread:points} ± {stderr:points} 个百分点",
    },
    "trend_falls": {
        "en": "accuracy falls with {knob}, by {spread:points} ± {stderr:points} points from the highest to the lowest level mean",
        "zh": "准确率随 {knob} 增大而下降，各水平均值最高与最低相差 {spread:points} ± {stderr:points} 个百分点",
    },
    "trend_rises_then_falls": {
        "en": "accuracy rises with {knob} up to {best_level} and falls beyond; the level means span {spread:points} ± "
        "{stderr:points} points",
        "zh": "准确率随 {knob} 增大先升后降，在 {best_level} 处最高；各水平均值相差 {spread:points} ± {stderr:points} 个百分点",
    },
    "trend_falls_then_rises": {
        "en": "accuracy first falls with {knob} and then rises, highest at {best_level}; the level means span {spread:points} "
        "± {stderr:points} points",
        "zh": "准确率随 {knob} 增大先降后升，在 {best_level} 处最高；各水平均值相差 {spread:points} ± {stderr:points} 个百分点",
    },
    "trend_flat": {
        "en": "an effect of {knob} cannot be told from noise: the level means span {spread:points} ± {stderr:points} points",
        "zh": "{knob} 的影响无法与噪声区分：各水平均值相差 {spread:points} ± {stderr:points} 个百分点",
    },
    "trend_mixed": {
        "en": "accuracy goes up and down with {knob} without one direction, highest at {best_level}; the level means span "
        "{spread:points} ± {stderr:points} points",
        "zh": "准确率随 {knob} 时升时降，没有单一方向，在 {best_level} 处最高；"
        "各水平均值相差 {spread:points} ± {stderr:points} 个百分点",
    },
    "trend_unknown": {
        "en": "no trend of {knob} can be told from noise, as each level has one run and no standard error; the level means span "
        "{spread:points} points",
        "zh": "{knob} 的每个水平只有一次运行且没有标准误，无法区分趋势与噪声；各水平均值相差 {spread:points} 个百分点",
    },
    "rule_accuracy": {
        "en": "highest accuracy",
        "zh": "准确率最高",
    },
    "rule_perplexity": {
        "en": "lowest perplexity",
        "zh": "困惑度最低",
    },
    "rule_one-standard-error": {
        "en": "fewest calibration tokens within one standard error of the most accurate",
        "zh": "与最高准确率相差不超过一个标准误者中校准词元最少",
    },
    "rule_pareto": {
        "en": "the most accurate of those that no other dominates in accuracy, perplexity, size and latency (where measured)",
        "zh": "在准确率、困惑度、参数量和延迟（若有测量）上不被其他配置支配；取其中准确率最高者",
    },
}

# What `{name:word}` and a noun behind a number become; English nouns that are not here take an s.
WORDS: Mapping[str, Mapping[str, str]] = {
    "lower": {"en": "smallest", "zh": "最小"},
    "upper": {"en": "largest", "zh": "最大"},
    "row": {"en": "row", "zh": "行"},
    "pass": {"en": "gradient pass", "zh": "次梯度计算"},
}
_PLURALS = {"gradient pass": "gradient passes"}


def format_message(remark: Message, language: str = "en") -> str:
    """The sentence of `remark`. KeyError naming a kind, a language or a value that is not there."""
    if remark.kind not in SENTENCES:
        raise KeyError(f"no sentence for a remark of kind {remark.kind!r}; add one to SENTENCES")
    return _Sentence(language).vformat(SENTENCES[remark.kind][language], (), remark.values)


def trend_remark(trend: Trend) -> Message:
    """What a trend says, as a clause without a full stop."""
    values = {"knob": trend.knob, "spread": trend.spread_points, "stderr": trend.stderr_points}
    return Message(f"trend_{trend.direction}", values | {"best_level": trend.best_level})


def names(items: Iterable[Any], language: str = "en", most: int = _LISTED) -> str:
    """The first `most` of a list, and how many more there are."""
    texts = [str(item) for item in items]
    if not texts:
        return MISSING
    shown, left = (texts, 0) if len(texts) <= most + 1 else (texts[:most], len(texts) - most)
    if language == "zh":
        return "、".join(shown) + (f" 及另外 {left} 个" if left else "")
    if left:
        return f"{', '.join(shown)} and {left} more"
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


class _Sentence(string.Formatter):
    def __init__(self, language: str) -> None:
        self.language = language

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "list":
            return names(value, self.language)
        if format_spec == "word":
            return WORDS[value][self.language]
        if format_spec in NUMBERS:
            return NUMBERS[format_spec](value)
        if format_spec:
            return f"{integer(value)} {self._noun(format_spec, value)}"
        if isinstance(value, (list, tuple)):
            return ", ".join(map(str, value))
        return str(value) if isinstance(value, (str, bool)) else number(value)

    def _noun(self, name: str, count: float) -> str:
        noun = WORDS[name][self.language]
        return noun if self.language != "en" or count == 1 else _PLURALS.get(noun, f"{noun}s")


def _finite(value: Any, form: str, scale: float = 1.0) -> str:
    """`value` by `form`; an en dash where there is none, and no sign before a number that is printed as zero."""
    if missing(value):
        return MISSING
    if not math.isfinite(value):
        return "inf" if value > 0 else "-inf"
    text = form.format(scale * value)
    return text.removeprefix("-") if not text.strip("-0.,") else text


def acc(value: Any) -> str:
    """A fraction with 4 digits and no leading zero, as accuracies were published: .5980, -.7972, 1.0000."""
    text = _finite(value, "{:.4f}")
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def points(value: Any) -> str:
    """Percentage points, or any number, with 2 digits."""
    return _finite(value, "{:.2f}")


def percent(value: Any) -> str:
    """A fraction as a percentage with 1 digit: 85.5%."""
    text = _finite(value, "{:.1f}", 100.0)
    return text if text == MISSING else f"{text}%"


def integer(value: Any) -> str:
    """A whole number with thousands."""
    return _finite(value, "{:,.0f}")


def number(value: Any) -> str:
    """Any number, short: at most 4 significant digits where it has a fraction."""
    if not missing(value) and math.isfinite(value) and value == int(value):
        return integer(value) if abs(value) >= 10_000 else str(int(value))
    return _finite(value, "{:.4g}")


def perplexity(value: Any) -> str:
    """2 digits; 3 significant ones where a model is broken and it is huge."""
    return _finite(value, "{:.2f}" if missing(value) or abs(value) < 100_000 else "{:.3g}")


def p_value(value: Any) -> str:
    """3 digits; <.001 below."""
    if missing(value):
        return MISSING
    return "<.001" if value < 0.001 else _finite(value, "{:.3f}").replace("0.", ".", 1)


def pm(value: Any, stderr: Any, form: str = "acc") -> str:
    """`value ± stderr`, both by the same one of NUMBERS; the value alone where there is no standard error."""
    text = NUMBERS[form](value)
    return text if missing(value) or missing(stderr) else f"{text} ± {NUMBERS[form](stderr)}"


def cell_text(column: Column, row: Row, language: str = "en") -> str:
    """What a table shows of a row in a column: `value`, `value ± stderr` or `[lower, upper]`; an en dash for a number that is
    not known, nothing for such a text."""
    value = row.get(column.key)
    if isinstance(value, Message):
        return format_message(value, language)
    if missing(value) or not column.format:
        return MISSING if column.format else "" if missing(value) else str(value)
    form = row.get("_format", column.format)
    if column.upper:
        return f"[{NUMBERS[form](value)}, {NUMBERS[form](row[column.upper])}]"
    return pm(value, row.get(column.stderr), form)


NUMBERS = {
    "acc": acc,
    "points": points,
    "percent": percent,
    "int": integer,
    "number": number,
    "ppl": perplexity,
    "p": p_value,
}
