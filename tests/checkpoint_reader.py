"""Read by tests/checkpoints.py: a program that loads checkpoints as a stranger would and writes down what it found.

    python -P checkpoint_reader.py remote | registered ANSWER.json        < {"name": ["folder", thorough], ...}

remote      with the checkpoint's own code (trust_remote_code), in a process that never imports tune_prune
registered  without code from the checkpoint: first before `import tune_prune`, which must fail, then after it

Numbers are largest absolute differences of logits.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, StaticCache

NEW_TOKENS = 5
NO_TOKEN = 64  # an id outside of the vocabulary: nothing ends early


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def one_by_one(model: PreTrainedModel, ids: torch.Tensor, static: bool) -> torch.Tensor:
    """Logits [B, T, V] of decoding `ids` token by token with a cache."""
    cache = StaticCache(config=model.config, max_cache_len=16) if static else None
    parts = []
    for position in range(ids.shape[1]):
        out = model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    return torch.cat(parts, dim=1)


def generated(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **how: object) -> list[list[int]]:
    """The new tokens of every row."""
    told = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=NO_TOKEN,
        **how,
    )
    return told[:, ids.shape[1] :].tolist()


def check(model: PreTrainedModel, case: dict[str, torch.Tensor]) -> dict[str, object]:
    ids, mask = case["ids"], case["mask"]
    full = model(input_ids=ids, use_cache=False).logits
    found: dict[str, object] = {
        "sdpa": far(full, case["logits"]),
        "left padding": far(
            model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()],
            case["masked_logits"][mask.bool()],
        ),
        "dynamic cache": far(one_by_one(model, ids, static=False), full),
        "generated": {
            cache: generated(model, ids, mask, cache_implementation=cache)
            for cache in ("dynamic", "static")[: 1 + model._can_compile_fullgraph]
        },
    }
    if model._can_compile_fullgraph:  # Falcon-H1 has no static cache
        found["static cache"] = far(one_by_one(model, ids, static=True), full)
    attention = next(filter(None, (getattr(layer, "self_attn", None) for layer in model.model.layers)))
    assert type(attention).__module__.startswith("transformers.models."), attention  # the family's own
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    found["eager"] = far(model(input_ids=ids, use_cache=False).logits, case["logits"])
    found["kernels"] = [before, attention.config._attn_implementation]
    return found


def decoder_output(decoder: torch.nn.Module, case: dict[str, torch.Tensor]) -> torch.Tensor:
    """Not the logits: some families scale those behind the head."""
    return decoder(input_ids=case["ids"]).last_hidden_state


def remote(folder: str, thorough: bool) -> dict[str, object]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    case = load_file(Path(folder) / "case.safetensors")
    found = check(model, case)
    found["keys"] = sorted(str(key) for names in info.values() for key in names)
    found["params"] = sum(p.numel() for p in model.parameters())
    found["layers"] = model.config.num_hidden_layers
    found["module"] = type(model).__module__
    found["dtype"] = str(model.dtype)
    if not thorough:
        return found
    again = f"{folder}.again"
    model.save_pretrained(again)
    twice = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
    found["saved again"] = far(twice(input_ids=case["ids"]).logits, case["logits"])
    decoder = AutoModel.from_pretrained(again, trust_remote_code=True)
    found["decoder"] = far(decoder_output(decoder, case), decoder_output(model.model, case))
    small = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    found["bfloat16"] = [str(small.dtype), far(small(input_ids=case["ids"]).logits.float(), case["logits"])]
    return found


def failure(call: object) -> str:
    """The name of the exception that `call` raises and its text; "" if it raises none."""
    try:
        call()  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001 - the test judges it
        return f"{type(error).__name__}: {error}"
    return ""


def main(how: str) -> dict[str, object]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    folders = json.loads(sys.stdin.read())
    if how == "remote":
        found = {name: remote(*each) for name, each in folders.items()}
        assert "tune_prune" not in sys.modules
        return found

    found = {}
    for name, (folder, _) in folders.items():
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        own = config["architectures"][0].removeprefix("Pruned").replace("InternLM3", "Llama").replace("TextFor", "For")
        stock = getattr(transformers, own)
        found[name] = {
            "nobody knows it": failure(lambda folder=folder: AutoModelForCausalLM.from_pretrained(folder)),
            "refused": failure(
                lambda folder=folder: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
            ),
            "stock class": failure(lambda stock=stock, folder=folder: stock.from_pretrained(folder)),
        }
    assert "tune_prune" not in sys.modules
    import tune_prune  # noqa: F401

    for name, (folder, thorough) in folders.items():
        if not thorough:
            continue
        case = load_file(Path(folder) / "case.safetensors")
        model = AutoModelForCausalLM.from_pretrained(folder)
        found[name] |= check(model, case) | {"module": type(model).__module__}
        decoder = AutoModel.from_pretrained(folder)
        found[name]["decoder"] = far(decoder_output(decoder, case), decoder_output(model.model, case))
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(sys.argv[1])), encoding="utf-8")
    gc.freeze()  # the exit would look through torch for garbage
