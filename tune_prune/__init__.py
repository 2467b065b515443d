"""tune_prune: find the best way to prune a given large language model, by a distributed search.

Importing it is all that AutoModelForCausalLM needs to load a pruned checkpoint without code from the checkpoint.
"""

from types import ModuleType
from typing import Any

import wrapt

__version__ = "0.1.0"


@wrapt.when_imported("transformers.models.auto.configuration_auto")
def _register_at_first_use(module: ModuleType) -> None:
    """Have the classes of pruned checkpoints registered when the first config is loaded.

    Not earlier: transformers takes seconds to import, most modules here do without it, and while it imports itself its
    classes cannot be asked for.
    """
    auto_config: Any = module.AutoConfig
    own = auto_config.__dict__["from_pretrained"]

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        auto_config.from_pretrained = own
        from tune_prune.models.registration import register

        register()
        return cls.from_pretrained(*args, **kwargs)

    auto_config.from_pretrained = classmethod(from_pretrained)
