"""tune_prune: find the best way to prune a given large language model, by a distributed search.

Its public API is tune_prune.open, .search and .load_results (tune_prune/commands/api.py). Importing it is also all that
AutoModelForCausalLM needs to load a pruned checkpoint without code from the checkpoint.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from tune_prune.commands.api import UserError as UserError
    from tune_prune.commands.api import load_results as load_results
    from tune_prune.commands.api import open as open
    from tune_prune.commands.api import search as search

__version__ = "0.2.0"
_API = ("UserError", "load_results", "open", "search")


def __getattr__(name: str) -> Any:
    """The public API, imported when it is first asked for: `import tune_prune` alone imports nothing heavy."""
    if name in _API:
        return getattr(importlib.import_module("tune_prune.commands.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})


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
