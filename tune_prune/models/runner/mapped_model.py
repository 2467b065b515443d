"""Whether the weights of a model can stay in the files of its checkpoint, to be read when their layer's turn comes."""

from __future__ import annotations

from tune_prune.models import loading, weight_files
from tune_prune.models.catalog import ModelSource


def readable_in_place(source: ModelSource) -> bool:
    """Return whether the weights can stay in their files: pickled ones cannot. Downloads those of the hub. Raises UserError."""
    return bool(weight_files.files(loading.weights_folder(source)))


def to_bring_layers(readable: bool, gpus: int) -> str:
    """Return what has to be done before layers can be brought one at a time, of weights that are `readable_in_place` or not, to so
    many GPUs; "" where they can be."""
    steps = {
        "save the model with save_pretrained, which writes safetensors (tensors of a pickle cannot be read one at a time)": (
            not readable
        ),
        "use --gpus-per-trial 1 (layers are brought one at a time to one GPU only)": gpus > 1,
    }
    return " and ".join(step for step, needed in steps.items() if needed)
