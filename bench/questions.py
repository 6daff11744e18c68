"""Questions that a chat verifier makes up itself: what it writes where a user would (Magpie, arXiv:2406.08464).

    python bench/questions.py --verifier FOLDER --count 4000 --out questions.jsonl

A drafter learns its verifier's own answers, so questions are all the data it needs, and files of questions are short. Rows are
{"turns": [question]}, without repeats; answers come from prepare.responses = verifier.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def user_prefix(tokenizer) -> tuple[list[int], list[int]]:
    """(tokens before a user's words, tokens that end them) by the chat template."""
    mark = "\ue000"
    before, after = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False).split(mark)
    end = tokenizer(after.strip(), add_special_tokens=False)["input_ids"][:1]
    return tokenizer(before, add_special_tokens=False)["input_ids"], end


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--verifier", required=True, help="a folder in Hugging Face's layout with a chat template")
    p.add_argument("--count", type=int, default=4000, help="questions to write; repeats come off this")
    p.add_argument("--max-new-tokens", type=int, default=128, help="longer questions are cut there, and asked as they are")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--engine-args", type=json.loads, default={}, help="JSON of vLLM's EngineArgs")
    a = p.parse_args()
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams
    from vllm.inputs import tokens_input

    tokenizer = AutoTokenizer.from_pretrained(a.verifier)
    prefix, end = user_prefix(tokenizer)
    settings = {"max_model_len": len(prefix) + a.max_new_tokens, "skip_tokenizer_init": True}
    llm = LLM(a.verifier, **settings, **a.engine_args)
    sampling = {"temperature": 1.0, "top_p": 0.99, "max_tokens": a.max_new_tokens, "stop_token_ids": end, "detokenize": False}
    found = llm.generate([tokens_input(prefix)] * a.count, [SamplingParams(seed=i, **sampling) for i in range(a.count)])
    texts = [tokenizer.decode(o.outputs[0].token_ids, skip_special_tokens=True).strip() for o in found]
    kept = list(dict.fromkeys(t for t in texts if len(t) > 15))
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text("".join(json.dumps({"turns": [t]}) + "\n" for t in kept), encoding="utf-8")
    print(f"{len(kept)} different questions of {a.count}, in {a.out}")


if __name__ == "__main__":
    main()
