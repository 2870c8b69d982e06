"""Conversations with a running vLLM server: 10 of four turns, each turn sent with all that was said before.

    python talk.py URL TURNS.jsonl

Writes one row for each turn: the request's id, the tokens of prompt and answer as the server counts them, and
`input_ids` and `loss_mask` as a trainer wants them. Texts and questions are the quickstart's. Standard library only.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).parent.parent / "quickstart_texts"
EXCERPT, ANSWER = 900, 32  # characters of text, tokens of an answer


def conversations() -> list[list[str]]:
    """What the user says, turn by turn: a piece of a text with a first question about it, then three more."""
    result = []
    for name, questions in json.loads((TEXTS / "questions.json").read_text()).items():
        text = (TEXTS / name).read_text()
        for begin in (0, len(text) // 2):
            result.append([f"{text[begin : begin + EXCERPT]}\n\n{questions[0]}", *questions[1:]])
    return result


def ask(url: str, model: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {
        "model": model, "messages": messages, "max_tokens": ANSWER, "temperature": 0, "return_token_ids": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        result: dict[str, Any] = json.load(answer)
    return result


def talk(url: str, model: str, said: list[str]) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": "Answer from the text."}]
    rows = []
    for question in said:
        messages.append({"role": "user", "content": question})
        answer = ask(url, model, messages)
        choice = answer["choices"][0]
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
        prompt, new = answer["prompt_token_ids"], choice["token_ids"]
        # The last token was sampled, but no forward has seen it: it has no hidden states.
        rows.append({
            "request_id": answer["id"], "prompt_tokens": len(prompt), "generated_tokens": len(new),
            "finish_reason": choice["finish_reason"], "text": choice["message"]["content"],
            "input_ids": [*prompt, *new[:-1]], "loss_mask": [0] * len(prompt) + [1] * (len(new) - 1),
        })  # fmt: skip
    return rows


def main(url: str, path: str) -> None:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    with ThreadPoolExecutor(4) as pool:
        rows = [row for rows in pool.map(lambda said: talk(url, model, said), conversations()) for row in rows]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompt, new = (sum(row[key] for row in rows) for key in ("prompt_tokens", "generated_tokens"))
    print(f"{len(rows)} requests: {prompt} tokens of prompts, {new} of answers → {path}")
    print(f"the first answer: {rows[0]['text']!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
