"""Small datasets: inputs in every format, `jaxtp prepare` in this process, and its output decoded.

A command line is written as in a shell; its files are those of the present folder, and its dataset
is in `d` unless it names another one by `--out`.
"""

import contextlib
import gzip
import io
import json
import random
import shlex
from importlib import import_module
from pathlib import Path

from small_tokenizers import CHAT_TOKENS, begins_texts, byte_level
from tokenizers import Tokenizer

from jaxtp.data.prepare.__main__ import main
from jaxtp.data.prepare.readers import ZSTD_LIBRARY
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import load_tokenizer

ZSTD = import_module(ZSTD_LIBRARY)
WORDS = [
    "the",
    "of",
    "naïve",
    "語",
    "🙂",
    "def",
    "x1",
    "'",
    "3.14",
    "<|endoftext|>",
    "é",
    "",
    "",
    "\n",
    "\t",
    "\r\n",
]


def texts(count, seed=0, longest=60):
    """Returns documents of mixed scripts, some of them repeated."""
    numbers = random.Random(seed)
    made = [
        " ".join(numbers.choices(WORDS, k=numbers.randint(1, longest))) or "x" for _ in range(count)
    ]
    return [made[numbers.randrange(i + 1)] if i % 5 == 4 else text for i, text in enumerate(made)]


def with_text(rows):
    """Returns rows; a string is a row with this text."""
    return [{"text": row} if isinstance(row, str) else row for row in rows]


def jsonl(path, rows):
    """Writes rows as JSONL, compressed by suffix."""
    lines = [
        json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(with_text(rows))
    ]
    path.write_bytes(packed(path.suffix, "".join(lines).encode()))
    return path


def packed(suffix, content):
    return {".gz": gzip.compress, ".zst": ZSTD.compress}.get(suffix, bytes)(content)


def parquet(path, rows, **settings):
    """Writes rows as Parquet, in row groups of 10."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.Table.from_pylist(with_text(rows)), path, row_group_size=10, **settings
    )
    return path


def write(name, content):
    """Writes bytes as they are; a text and the rows of a list are written in the format of the
    suffix.
    """
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_bytes(packed(path.suffix, content.encode()))
    else:
        (parquet if path.suffix == ".parquet" else jsonl)(path, content)
    return path


def prepared(out, *arguments):
    """Runs the command, and returns its dataset."""
    assert main([*map(str, arguments), f"--out={out}"]) == 0
    return open_dataset(Path(out))


def decoded(dataset, split="train"):
    """Returns the documents of a split, as bytes."""
    tokenizer = load_tokenizer(dataset.folder)
    found = dataset.splits[split]
    return [tokenizer.decode(found.document(index)) for index in range(found.num_documents)]


def run(line):
    """Runs a command line, and returns its exit code, its output and its errors."""
    words = shlex.split(line)
    if {"--out", "--verify", "--show"}.isdisjoint(words):
        words += ["--out=d"]
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        code = main(words)
    assert "Traceback" not in out.getvalue() + errors.getvalue()
    return code, out.getvalue(), errors.getvalue()


def output(line):
    """Runs a command line that succeeds, and returns its output."""
    code, out, errors = run(line)
    assert code == 0, errors
    return out


def dataset(line):
    """Runs a command line, and returns its dataset."""
    output(line)
    words = shlex.split(line)
    return open_dataset(Path(words[words.index("--out") + 1] if "--out" in words else "d"))


def documents(line):
    """Runs a command line that holds nothing out and starts over, and returns the documents, as
    text.
    """
    return [content.decode() for content in decoded(dataset(f"{line} --held-out 0 --overwrite"))]


def refusal(line):
    """Runs a command line that is refused with exit code 2, and returns the message."""
    code, _, errors = run(line)
    assert code == 2, errors
    assert errors.startswith("jaxtp prepare: error: ")
    return errors


def write_bpe(folder="t", rows=(), size=300, end="<|endoftext|>"):
    """Writes a byte-level tokenizer with an end token, and returns its folder."""
    content = byte_level(rows or texts(60, seed=5), size, [end])
    return write(f"{folder}/tokenizer.json", content).parent


CHAT_TOKENIZER = Tokenizer.from_str(begins_texts().decode())
BEGIN, END, TURN, STOP = map(CHAT_TOKENIZER.token_to_id, CHAT_TOKENS)
CHAT_NAMES = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content | trim "
    "}}<|stop|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def write_chat_tokenizer(folder="t"):
    """Writes a tokenizer that begins texts, with its chat template."""
    write(f"{folder}/tokenizer.json", begins_texts())
    write(
        f"{folder}/tokenizer_config.json", json.dumps(CHAT_NAMES | {"chat_template": CHAT_TEMPLATE})
    )


def conversation(*contents):
    """Returns a row in which user and assistant take turns."""
    roles = ["user", "assistant"] * len(contents)
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
    ]
    return {"messages": messages}


def spelled(ids):
    """Returns the text of ids of the chat tokenizer, with its special tokens."""
    return CHAT_TOKENIZER.decode(list(ids), skip_special_tokens=False)


def prompts_and_answers(dataset, name="train"):
    """Returns prompt and answer of each document, as ids."""
    split = dataset.splits[name]
    pairs = []
    for index in range(split.num_documents):
        ids = split.document(index).tolist()
        cut = split.prompt_length(index)
        pairs.append((ids[:cut], ids[cut:]))
    return pairs
