"""`jaxtp prepare --show`: documents as they are trained, and nothing is written."""

import io
import sys
from pathlib import Path

import pytest
from corpora import conversation, output, refusal, run, write, write_bpe, write_chat_tokenizer

from jaxtp.data.prepare.__main__ import main

CHATS = "a.jsonl --messages messages --tokenizer t"
FIRST = """\
<|begin|><|turn|>user
naïve?<|stop|>
<|turn|>assistant
⟦yes<|stop|>
⟧
"""


@pytest.fixture(autouse=True)
def _rows(folder):
    write_chat_tokenizer()
    write("a.jsonl", [conversation("naïve?", "yes", "and 🙂", "no"), conversation("a", "⟦b⟧\x1b")])


def test_conversations_are_shown_with_marks_around_what_is_learned():
    out = output(f"{CHATS} --show 1")
    assert f"== a.jsonl, line 1, answer 1 of 2 ==\n{FIRST}tokens      26: 22 in the pro" in out
    assert "== a.jsonl, line 1, answer 2 of 2 ==\n" in out
    assert "assistant\nyes<|stop|>\n<|turn|>user\nand 🙂<|stop|>\n" in out
    assert "line 2" not in out
    assert sorted(path.name for path in Path().iterdir()) == ["a.jsonl", "t"]


def test_marks_and_control_characters_of_a_text_are_escaped():
    out = output(f"{CHATS} --show 2")
    assert r"assistant" "\n" r"⟦\u27e6b\u27e7\x1b<|stop|>" in out


def test_a_dataset_is_shown_as_its_inputs_are():
    inputs = [line for line in output(f"{CHATS} --show 9").splitlines() if "==" not in line]
    output(f"{CHATS} --held-out 0")
    out = output("d --show 9")
    assert "== d/train-00000.tokens, document 2 ==" in out
    assert [line for line in out.splitlines() if "==" not in line] == inputs
    assert out.startswith(output("d --show 1"))
    assert "d is a dataset, which has its tokens already" in refusal("d --tokenizer t --show 1")
    Path("d/tokenizer.json").unlink()
    assert "d/tokenizer.json: No such file or directory" in refusal("d --show 1")


def test_texts_and_pairs_are_shown_and_held_out_documents_too():
    write("b.txt", "語 ab")
    assert output("b.txt --show 1 --show-tokens").splitlines()[3:6] == [
        r"     158  ⟦'\\x9e'⟧",
        "      32  ⟦' '⟧",
        "      97  ⟦'a'⟧",
    ]
    ended = output(f"b.txt --show 1 --tokenizer {write_bpe('u', end='<end>')} --eos '<end>'")
    assert ended.startswith("== b.txt ==\n")
    assert "ab<end>⟧\ntokens" in ended
    write("p.jsonl", [{"prompt": str(i), "chosen": "4", "rejected": "5"} for i in range(9)])
    output("p.jsonl --preference --held-out 0.5")
    for line in ("p.jsonl --preference --show 7", "d --show 7"):
        out = output(line)
        assert (
            out.count(", chosen ==\n") == out.count("⟦4⟧\ntokens      2: 1 in the prompt, 1") == 7
        )
        assert out.count(", rejected ==") == out.count("⟦5⟧") == 7


def test_what_is_left_out_is_said():
    row = conversation("a", "BAD", "b", "c")
    row["messages"][1]["weight"] = 0
    write("a.jsonl", [row, {"messages": 3}, conversation("a", "b")])
    out = output(f"{CHATS} --show 2 --on-error skip")
    assert "left out    a.jsonl, line 2: 'messages': not a list of messages, but 3\n" in out
    assert out.endswith("\nleft out    1 x answer marked as not learned\n")
    code, out, errors = run(f"{CHATS} --show 2")
    assert code == 2
    assert "⟦c<|stop|>\n⟧" in out
    assert "a.jsonl, line 2: " in errors
    write("a.jsonl", [""])
    assert "no document in 1 files" in refusal("a.jsonl --show 2")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_colours(monkeypatch):
    for name in ("NO_COLOR", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main([*CHATS.split(), "--show=2"]) == 0
    assert "\x1b[32m⟦b⟧\\x1b<|stop|>\x1b[0m\n\n" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    assert main([*CHATS.split(), "--show=1"]) == 0
    assert terminal.getvalue().partition("line 1, answer 1")[2].partition(FIRST)[1] == FIRST
