"""Read by tests/serving/test_vllm.py: a program without tune_prune that runs checkpoints in vLLM and in transformers.

    python -P vllm_reader.py ANSWER.json
        < {"lines": {"name": ["vllm", "serve", "folder", ...], ...}, "dtype": "float32", "prompt": [3, 10, ...], "new": 8}

Each is loaded by both from its own files, by vLLM as the line says. The answer has, by name, the tokens that vLLM and transformers
choose, the log-probabilities that they give the prompt's tokens, and the seconds that vLLM took, or the error with which it
refuses the folder.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import vllm
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory


@torch.no_grad()
def by_transformers(folder: str, prompt: list[int], new: int, dtype: str) -> dict[str, Any]:
    """Every new token by a pass over all that stand before it, without a cache."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, ids = load(folder, trust_remote_code=True, dtype=dtype), list(prompt)
    for _ in range(new):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
        ids.append(int(logits[-1].argmax()))
    logprobs = logits[: len(prompt) - 1].log_softmax(-1)  # position t predicts token t + 1
    return {
        "tokens": ids[len(prompt) :],
        "logprobs": logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist(),
    }


def by_vllm(line: list[str], prompt: list[int], new: int, dtype: str) -> dict[str, Any]:
    program, command, folder, *options = line
    assert (program, command) == ("vllm", "serve")
    started = time.perf_counter()
    try:
        engine = vllm.LLM(
            folder,
            trust_remote_code="--trust-remote-code" in options,
            model_impl=options[options.index("--model-impl") + 1] if "--model-impl" in options else "auto",
            dtype=dtype,
            max_model_len=64,
            kv_cache_memory_bytes=2**26,
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
        )
        how = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, prompt_logprobs=0, detokenize=False)
        (out,) = engine.generate({"prompt_token_ids": prompt}, how, use_tqdm=False)
    except Exception as error:  # noqa: BLE001 - the test judges it
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        cleanup_dist_env_and_memory()
    first, *rest = out.prompt_logprobs
    assert first is None  # nothing stands before the first token
    return {
        "tokens": list(out.outputs[0].token_ids),
        "logprobs": [given[token].logprob for token, given in zip(prompt[1:], rest, strict=True)],
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    request, answer = json.load(sys.stdin), dict[str, Any]()
    how = request["prompt"], request["new"], request["dtype"]
    for name, line in request["lines"].items():  # all of them before vLLM, which changes the models' classes
        answer[name] = {"transformers": by_transformers(line[2], *how)}
    for name, line in request["lines"].items():
        answer[name]["vllm"] = by_vllm(line, *how)
    packages = {package.__name__: package.__version__ for package in (vllm, torch, transformers)}
    Path(sys.argv[1]).write_text(json.dumps({"packages": packages, "checkpoints": answer}), "utf-8")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
