"""Prompts for acceptance.sh, from texts that are on every machine: varied, short, and split by subject.

    python acceptance_prompts.py OUT --train 1500 --held-out 100

Writes ``train.jsonl`` and ``held-out.jsonl`` in OUT, rows with ``messages`` of one user's turn. A passage of a text
(the quickstart's essays, and Python's own reference as ``pydoc`` ships it) or a subject is in one of the two files
only, whatever question it comes with. The same arguments give the same prompts with the same Python. Standard library
only.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics

ESSAYS = Path(__file__).parent.parent / "quickstart_texts"
SENTENCES = re.compile(r".{80,360}[.:!?](?= |$)")

ABOUT_PASSAGE = (
    "Explain this in simple words:\n\n{}",
    "Summarise this in one sentence:\n\n{}",
    "Write three questions that this text answers:\n\n{}",
    "Give a title to this text, and say why it fits:\n\n{}",
    "What is the most important point here?\n\n{}",
    "Rewrite this as a letter to a friend:\n\n{}",
)
ABOUT_SUBJECT = (
    "What is {}?",
    "Write a short story about {}.",
    "Give me five facts about {}.",
    "How would you explain {} to a child?",
    "Why is {} important?",
    "Write a poem about {}.",
    "What are common mistakes people make about {}?",
    "Compare {} with something that most people know.",
)
SUBJECTS = """
photosynthesis, the water cycle, gravity, a rainbow, the moon, volcanoes, earthquakes, the ocean, whales, honey
bees, a desert, the rain forest, glaciers, the human heart, sleep, memory, vitamins, exercise, bread, cheese,
coffee, tea, chocolate, cooking rice, a vegetable garden, compost, an apple tree, a bicycle, a steam engine,
electricity, a battery, solar power, windmills, a bridge, a lighthouse, a sailing ship, maps, the compass, a
clock, the calendar, the printing press, paper, glass, iron, gold, money, a bank, trade, taxes, a budget,
democracy, a constitution, a court of law, human rights, the Roman Empire, ancient Egypt, the Renaissance, the
industrial revolution, a museum, a library, poetry, the novel, the theatre, the piano, the violin, jazz,
painting, sculpture, photography, cinema, chess, football, swimming, mountain climbing, a train journey, a
market, a village school, friendship, honesty, courage, patience, forgiveness, curiosity, a job interview,
public speaking, a good teacher, learning a language, mathematics, prime numbers, triangles, statistics,
probability, a computer, an operating system, a database, the internet, a search engine, encryption, a compiler,
machine learning, a neural network, robots, satellites, a telescope, the solar system, black holes, the speed of
light, atoms, the periodic table, water, salt, soap, medicine, a hospital, vaccines, bacteria, a cat, a dog,
horses, birds in winter, spiders, butterflies, dinosaurs, fossils, rivers, lakes, islands, snow, thunder, the
four seasons, recycling, clean air, a city park, traffic, an airport, a fire brigade, a post office, a
newspaper, radio, television, the telephone, a camera, a dictionary, a diary, dreams, laughter, music at home, a
birthday party
"""


def passages() -> list[str]:
    """Paragraphs of the essays and of Python's reference, without what is code or a table."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(ESSAYS.glob("*.txt"))]
    texts += [topics[name] for name in sorted(topics)]
    found: dict[str, None] = {}
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            whole = SENTENCES.match(" ".join(paragraph.split()))
            plain = whole[0] if whole else ""
            letters = sum(character.isalpha() or character.isspace() for character in plain)
            if plain[:1].isalpha() and letters > 0.9 * len(plain):
                found[plain] = None
    return list(found)


def prompts(questions: tuple[str, ...], subjects: list[str], shuffle: random.Random) -> list[str]:
    """Every question about every subject, in an order in which neighbours differ."""
    found = [question.format(subject) for question, subject in product(questions, subjects)]
    shuffle.shuffle(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, required=True, help="number of prompts")
    parser.add_argument("--held-out", type=int, required=True, help="number of prompts")
    options = parser.parse_args()
    shuffle = random.Random(17)
    texts, subjects = passages(), " ".join(SUBJECTS.split()).split(", ")
    shuffle.shuffle(texts)
    shuffle.shuffle(subjects)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, count in (("held-out", options.held_out), ("train", options.train)):
        texts_of_it, subjects_of_it = (
            [item for place, item in enumerate(items) if (place % 8 == 0) == (name == "held-out")]
            for items in (texts, subjects)
        )
        kinds = (prompts(ABOUT_PASSAGE, texts_of_it, shuffle), prompts(ABOUT_SUBJECT, subjects_of_it, shuffle))
        share = min(count // 2, len(kinds[1]))
        chosen = kinds[0][: count - share] + kinds[1][:share]
        if len(chosen) < count:
            parser.error(f"there are texts for {len(chosen)} prompts of {name}, not for {count}")
        shuffle.shuffle(chosen)
        rows = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in chosen]
        (options.out / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        print(f"{len(rows)} prompts, {len(kinds[0])} + {len(kinds[1])} possible → {options.out / name}.jsonl")


if __name__ == "__main__":
    main()
