"""The zero-shot suite of a run: made by lm-eval once for a model and its tasks, afterwards read from the artifact store."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.config import ModelRun
from tune_prune.data.sources import Contents, suite_key, task_source
from tune_prune.evaluation.suite import ZeroShotSuite


@dataclass(frozen=True)
class KeptSuite:
    """Makes, keeps and reads the suite of `run`, whose data `contents` reads and whose model has that `config`."""

    run: ModelRun
    contents: Contents
    config: PretrainedConfig
    model_fingerprint: str
    artifacts: ArtifactStore

    @cached_property
    def key(self) -> dict[str, Any]:
        """Return the key of the suite as an artifact."""
        length = self.config.max_position_embeddings
        return suite_key(self.run, self.contents.tasks, self.model_fingerprint, length)

    def read(self) -> ZeroShotSuite | None:
        """Return the suite that was kept, if one was. Raises UserError for a token id that the model does not know."""
        suite = self.artifacts.get(
            "suite", self.key, lambda arrays: ZeroShotSuite.from_arrays(arrays, self.run.protocol)
        )
        return suite and self._known(suite)

    def make(self, tokenizer: PreTrainedTokenizerBase) -> ZeroShotSuite:
        """Build the suite by lm-eval. Raises UserError as `build_suite` and `read` do."""
        from tune_prune.evaluation.zero_shot import build_suite  # imports lm_eval: seconds, and not needed before

        source, length = task_source(self.run), self.config.max_position_embeddings
        made = self.contents.of_tasks(lambda: build_suite(tokenizer, self.run.protocol, source, length))
        return self._known(made)

    def keep(self, suite: ZeroShotSuite) -> None:
        """Store what `make` has made, unless an item needs lm-eval's judgement."""
        arrays = suite.arrays()
        if arrays is not None:
            self.artifacts.put("suite", self.key, arrays)

    def _known(self, suite: ZeroShotSuite) -> ZeroShotSuite:
        suite.check_token_ids(self.run.label, self.config.vocab_size)
        return suite


def end_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the special token with which the tokenizer ends every text, if there is one."""
    whole, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    return str(tokenizer.convert_ids_to_tokens(whole[-1])) if plain and whole[-1] != plain[-1] else None


def ends_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Warn of a tokenizer that ends every text: accuracies are worthless then. Return a sentence or none."""
    if (end := end_token(tokenizer)) is None:
        return ()
    return (
        f"the tokenizer ends every text with {end}, also before an answer, so accuracies say nothing of the model; save it "
        "without (add_eos_token in tokenizer_config.json, post_processor in tokenizer.json)",
    )


def caveats(tokenizer: PreTrainedTokenizerBase, suite: ZeroShotSuite | None) -> tuple[str, ...]:
    """Return what a reader of the accuracies must know of how the items are tokens, in sentences."""
    if suite is None or not suite.num_crossing:
        return ends_texts(tokenizer)
    crossing = (
        f"{suite.num_crossing} of {suite.num_items} questions share a token with an answer; there every token that the answer "
        "changes is scored"
    )
    return (*ends_texts(tokenizer), crossing)
