"""Tunes a chat model on tool calls, and counts right calls for questions with unseen values.

    python scripts/tool_calls.py --model models/SmolLM2-135M-Instruct

A call is right if its name and all of its arguments are. The model runs on two virtual CPU devices.
"""

import argparse
import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtp.data.chat_template import ChatTemplate

TEMPLATE = Path(__file__).parent / "examples/chatml_tools.jinja"
QUESTIONS = {
    "get_weather": [
        "What is the weather in {city}?",
        "Will it rain in {city} today?",
        "How warm is it in {city} now?",
    ],
    "play_song": [
        "Play {title} by {artist}.",
        "I want to hear {title} by {artist}.",
        "Put on {title} by {artist}, please.",
    ],
    "set_timer": [
        "Wake me in {minutes} minutes.",
        "Set a timer for {minutes} minutes.",
        "Tell me when {minutes} minutes are over.",
    ],
    "send_message": [
        "Tell {name} that I am {state}.",
        "Write to {name} that I am {state}.",
        "Let {name} know that I am {state}.",
    ],
    "convert_money": [
        "How many {target} are {amount} {source}?",
        "Change {amount} {source} into {target}.",
        "What are {amount} {source} in {target}?",
    ],
}
"""Questions by function; the names in braces are its arguments."""
NUMBERS = {"minutes", "amount"}
MONEY = "dollars euros pounds yen francs pesos rupees kroner"
WORDS = {
    "city": "Oslo Lima Cairo Paris Tokyo Quito Milan Dakar Sofia Hanoi Perth Turin Accra Delhi "
    "Porto Dublin Boston Athens Vienna Prague",
    "title": "Yesterday Imagine Thriller Halo Creep Dreams Africa Jolene Hurt Roxanne Fever Crazy "
    "Hello Stay Waterloo Valerie Angie Hallelujah Umbrella Lola",
    "artist": "Adele Queen Prince Cher Moby Sade Bjork Drake Abba Blur Oasis Toto Muse Genesis "
    "Eagles Rihanna Madonna Santana Nirvana Coldplay",
    "minutes": " ".join(map(str, range(2, 95))),
    "name": "Anna Bruno Clara David Emma Felix Greta Hugo Ivan Julia Karl Laura Maria Noah Olga "
    "Peter Rosa Simon Tara Viktor",
    "state": "late tired at_home on_the_way in_a_meeting busy ill happy on_the_train hungry ready "
    "at_work out_of_town awake at_the_door cold",
    "amount": " ".join(map(str, range(3, 900))),
    "source": MONEY,
    "target": MONEY,
}
"""Values by argument; a line below a word stands for a space."""
UNSEEN = 0.25
"""The share of the values of an argument that only held-out questions have."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    argument: {"type": "integer" if argument in NUMBERS else "string"}
                    for argument in re.findall(r"{(\w+)}", questions[0])
                },
            },
        },
    }
    for name, questions in QUESTIONS.items()
]


def conversations(number: int, *, held_out: bool) -> list[dict[str, Any]]:
    """Returns rows of `messages` and `tools`: a question, and its call as the answer."""
    shuffled = random.Random(0)
    values = {}
    for argument, words in WORDS.items():
        given = [word.replace("_", " ") for word in words.split()]
        pool: list[str | int] = shuffled.sample(given, len(given))
        if argument in NUMBERS:
            pool = [int(word) for word in pool]
        at = round(len(pool) * UNSEEN)
        values[argument] = pool[:at] if held_out else pool[at:]
    draw = random.Random(int(held_out))
    rows = []
    for index in range(number):
        function = TOOLS[index % len(TOOLS)]["function"]
        name = function["name"]
        arguments = {key: draw.choice(values[key]) for key in function["parameters"]["properties"]}
        while arguments.get("target", 0) == arguments.get("source"):
            arguments["target"] = draw.choice(values["target"])
        question = draw.choice(QUESTIONS[name]).format(**arguments)
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        rows.append({"messages": messages, "tools": TOOLS})
    return rows


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    # a file that is written again would be another input of `jaxtp prepare`
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def run(command: str, *flags: object) -> None:
    """Runs a command of jaxtp; its output goes to standard error."""
    words = [sys.executable, "-m", "jaxtp", command, *map(str, flags)]
    subprocess.run(words, check=True, stdout=sys.stderr)


def called(text: str) -> object:
    """Returns the call in an answer, as name and arguments; None if it has another form."""
    found = re.fullmatch(r"<tool_call>(.*)</tool_call>", text.strip(), re.DOTALL)
    if found is None:
        return None
    try:
        return json.loads(found[1])
    except ValueError:
        return None


def count_right(model: Path, rows: Sequence[dict[str, Any]], folder: Path, when: str) -> None:
    """Asks the model each question; prints how many calls are right, and those that are wrong."""
    template = ChatTemplate(TEMPLATE.read_text(), "the template", {})
    prompts = []
    for row in rows:
        prompt = template.render(row["messages"][:1], arguments={"tools": row["tools"]})
        prompts.append({"prompt": prompt})
    write_rows(folder / "questions.jsonl", prompts)
    flags = ["--prompt-file", folder / "questions.jsonl", "--special-tokens"]
    flags += ["--max-tokens", 64, "--batch-size", len(rows), "--json", folder / "answers.jsonl"]
    run("generate", "--model", model, *flags)
    wrong = []
    for row, line in zip(rows, (folder / "answers.jsonl").open(), strict=True):
        question, answer = row["messages"]
        text = json.loads(line)["text"]
        if called(text) != answer["tool_calls"][0]["function"]:
            wrong.append(f"  {question['content']}\n    {text[:80]!r}")
    print(f"{when}: {len(rows) - len(wrong)} of {len(rows)} calls are right", flush=True)
    for line in wrong[:5]:
        print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a chat model")
    parser.add_argument("--rows", type=int, default=400, help="conversations (default 400)")
    parser.add_argument("--questions", type=int, default=40, help="held-out ones (default 40)")
    parser.add_argument("--steps", type=int, default=40, help="steps of the run (default 40)")
    parser.add_argument("--folder", type=Path, default=Path("runs/tool_calls"))
    given = parser.parse_args(argv)
    folder = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "calls.jsonl", conversations(given.rows, held_out=False))
    questions = conversations(given.questions, held_out=True)
    flags = ["--messages", "messages", "--tokenizer", given.model]
    flags += ["--template", TEMPLATE, "--held-out", 0, "--out", folder / "data"]
    print(f"{given.rows} conversations, {given.questions} held-out questions", flush=True)
    run("prepare", folder / "calls.jsonl", *flags)
    count_right(given.model, questions, folder, "before the run")
    flags = ["--data.path", folder / "data", "--data.sequence-length", 272]
    flags += ["--data.global-batch-size", 2, "--mesh", "tp=2"]
    flags += ["--model.lora.rank", 16, "--model.remat", "none"]
    flags += ["--optimizer.learning-rate", "1e-3", "--optimizer.warmup-steps", 5]
    flags += ["--train.steps", given.steps, "--run.dir", folder / "run"]
    run("train", "--model.from-hf", given.model, *flags)
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    losses = {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}
    for step, loss in losses.items():
        print(f"step {step}: loss {loss:.4f}", flush=True)
    count_right(folder / "run", questions, folder, "after the run")


if __name__ == "__main__":
    main()
