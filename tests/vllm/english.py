"""Real English prompts: paragraphs of the quickstart's texts, each with a question, in the model's chat form."""

from __future__ import annotations

import json
from pathlib import Path

TEXTS = Path(__file__).resolve().parents[2] / "scripts" / "quickstart_texts"


def chat(text: str) -> str:
    """A user's turn, in ChatML as SmolLM2-Instruct knows it; without it the model rarely answers at all."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def _texts() -> list[tuple[str, list[str]]]:
    questions = json.loads((TEXTS / "questions.json").read_text())
    return [((TEXTS / name).read_text(), asked) for name, asked in sorted(questions.items())]


def different(count: int) -> list[str]:
    """Prompts of 100 to 500 tokens that share little: one paragraph and one question each."""
    found = []
    for text, questions in _texts():
        paragraphs = [paragraph for paragraph in text.split("\n\n") if len(paragraph) > 200]
        for number, paragraph in enumerate(paragraphs):
            for question in (questions[number % len(questions)], questions[(number + 1) % len(questions)]):
                found.append(chat(f"{paragraph}\n\n{question}"))
    # Every paragraph once before any comes twice.
    ordered = found[::2] + found[1::2]
    assert len(ordered) >= count
    return ordered[:count]


def sharing(count: int, characters: int = 4600) -> list[str]:
    """Prompts that share a prefix of a little more than 1,000 tokens."""
    text, questions = _texts()[0]
    asked = [question for _, more in _texts() for question in more] + questions
    return [chat(f"{text[:characters]}\n\nQuestion {n}: {asked[n % len(asked)]}") for n in range(count)]
