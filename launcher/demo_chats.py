"""Make the shipped demo chats: our prompts, answered by the demo model itself with greedy decoding.

Run: python launcher/demo_chats.py --out launcher/presets/demo_chats.jsonl --seed 0     (about 15 minutes on two cores)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch


def answer_batch(model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int) -> list[str | None]:
    """Greedy answers; None where the model did not end by its own stop token within `max_new_tokens`."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(texts, add_special_tokens=False, return_tensors="pt", padding=True, padding_side="left")
    ids_BT = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    new_BT = ids_BT[:, inputs["input_ids"].shape[1] :]
    ended = (new_BT == tokenizer.eos_token_id).any(dim=1).tolist()
    answers = tokenizer.batch_decode(new_BT, skip_special_tokens=True)
    return [answer.strip() if done else None for answer, done in zip(answers, ended, strict=True)]


def usable(answers: Sequence[tuple[str, str | None]], seen: set[str]) -> Iterator[dict[str, Any]]:
    """Chats with a finished answer of at least three words that no earlier chat has; `seen` is kept up to date."""
    for prompt, answer in answers:
        if answer is None or len(answer.split()) < 3 or answer in seen:
            continue
        seen.add(answer)
        yield {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice and order of prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--batch", type=int, default=48, help="prompts answered at a time")
    parser.add_argument("--prompts", type=int, default=1392, help="prompts to answer, about 1 in 7 in vain")
    options = parser.parse_args(argv)

    from launcher.demo_prompts import compose_prompts
    from models.target import load_full_target
    from models.target_files import load_tokenizer, resolve_target

    folder = resolve_target("demo")
    tokenizer = load_tokenizer(folder)
    # Many CPUs compute bfloat16 ten times more slowly than float32.
    model = load_full_target(folder, torch.float32, "cpu")
    prompts = compose_prompts(options.seed)[: options.prompts]
    unfinished = options.out.with_suffix(".tmp")
    seen: set[str] = set()
    with unfinished.open("w", encoding="utf-8") as file:
        for start in range(0, len(prompts), options.batch):
            batch = prompts[start : start + options.batch]
            answers = answer_batch(model, tokenizer, batch, options.max_new_tokens)
            for chat in usable(list(zip(batch, answers, strict=True)), seen):
                file.write(json.dumps(chat, ensure_ascii=False) + "\n")
            print(f"{start + len(batch)} of {len(prompts)} prompts, {len(seen)} chats", flush=True)
    unfinished.rename(options.out)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # run as a file, its own folder would come first
    main()
