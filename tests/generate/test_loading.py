"""What is read of a folder in Hugging Face's format beside its weights, and generation from it."""

import io
import json
import shutil
import sys
from functools import partial

import jax
import pytest
from flax import nnx
from hf_folders import assert_same, move_adapters, random_model, values, write_tensors
from made_once import made_once
from small_tokenizers import byte_fallback
from support import use_mesh
from tables import assert_errors, raised_by, read_json, read_table, write_json
from variants import small_model

import jaxtp
from jaxtp import LoraConfig, Precision, add_adapters, make_mesh, merge_adapters
from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.config.schema import to_plain
from jaxtp.data.chat_template import ChatError, ChatTemplate
from jaxtp.data.tokenizer_files import TokenizerError
from jaxtp.generate.__main__ import GenerateConfig, main
from jaxtp.generate.loading import SourceError, _tokenizer_of_run, open_source
from jaxtp.generate.request import Piece
from jaxtp.tools.convert.__main__ import main as convert

CONFIG = small_model(vocab_size=300, d_ff=16)
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"


@pytest.fixture
def folder(tmp_path, tmp_path_factory):
    """A folder of a model, which a test may change."""

    def make(folder):
        jaxtp.hf.save(random_model(CONFIG), folder / "model")
        change(folder / "model", eos_token_id=7)
        write(
            folder / "model",
            "tokenizer_config.json",
            {"bos_token": {"content": "<s>"}, "chat_template": TEMPLATE},
        )
        (folder / "model/tokenizer.json").write_bytes(byte_fallback())

    shutil.copytree(
        made_once(tmp_path_factory, "model of test_loading", make) / "model", tmp_path / "model"
    )
    return tmp_path / "model"


def change(folder, **attributes):
    """Changes attributes of config.json; None removes one."""
    config = read_json(folder / "config.json") | attributes
    write(
        folder, "config.json", {name: value for name, value in config.items() if value is not None}
    )


def write(folder, name, record):
    write_json(folder / name, record)


def test_end_tokens_prefix_and_template(folder):
    source = open_source(folder)
    assert (source.end_ids, source.prefix, source.chat.text) == ({7}, (1,), TEMPLATE)
    assert source.chat.special_tokens == {"bos_token": "<s>"}
    assert source.config.num_kv_heads == CONFIG.num_kv_heads
    write(folder, "generation_config.json", {"eos_token_id": [7, 9]})
    (folder / "chat_template.jinja").write_text("a file of its own")
    source = open_source(folder)
    assert (source.end_ids, source.chat.text) == ({7, 9}, "a file of its own")
    (folder / "chat_template.jinja").unlink()
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    write(folder, "tokenizer_config.json", {"chat_template": several})
    assert open_source(folder).chat.text == "yes"
    write(folder, "tokenizer_config.json", {"bos_token": "<s>"})
    source = open_source(folder)
    assert (source.chat.text, source.chat.special_tokens) == (None, {"bos_token": "<s>"}), (
        "a --template FILE may name them"
    )


@pytest.fixture
def refusal(capsys):
    """Returns the error of a command with these words, which has to fail."""

    def refusal(*words):
        assert main(list(map(str, words))) == 2
        return capsys.readouterr().err

    return refusal


def test_a_run_of_a_mixture_has_the_tokenizer_of_its_first_dataset(folder, tmp_path):
    config = {"model": to_plain(CONFIG), "data": {"mixture": {str(folder): 1.0, "another": 2.0}}}
    with Checkpoints(tmp_path / "run/checkpoints") as checkpoints:
        state = nnx.state(random_model(CONFIG))
        checkpoints.save(1, state, make_mesh(devices=jax.devices()[:1]), {"config": config})
    tokenizer = open_source(tmp_path / "run").tokenizer
    assert tokenizer.info.sha256 == open_source(folder).tokenizer.info.sha256
    with pytest.raises(SourceError, match="does not record its tokenizer"):
        _tokenizer_of_run(tmp_path, None, None, GenerateConfig())


def test_build_is_refused_where_it_has_no_effect(folder, refusal):
    error = refusal("--model", folder, "--build=mine.py:build", "--prompt=a")
    assert f"--build names the Decoder of a run, and {folder} is a model in" in error


def test_the_context_is_what_the_model_was_made_for(folder):
    change(folder, max_position_embeddings=None)
    assert open_source(folder).context is None
    change(folder, max_position_embeddings=32)
    assert open_source(folder).context == 32
    for kind in ("linear", "yarn"):
        change(folder, rope_scaling={"rope_type": kind, "factor": 4.0})
        assert open_source(folder).context == 128, kind
    for length in (-1, 0, "many", 1.5, True):
        change(folder, max_position_embeddings=length)
        with pytest.raises(ValueError, match="max_position_embeddings"):
            open_source(folder)


@pytest.mark.journey
def test_a_prompt_beyond_the_context_is_refused_unless_it_is_allowed(folder, refusal, capsys):
    change(folder, max_position_embeddings=12)
    command = [
        f"--model={folder}",
        "--prompt=to a cap to a cap",
        "--max-tokens=3",
        "--json=-",
    ]
    assert "--beyond-context" in refusal(*command)
    assert main([*command, "--beyond-context"]) == 0
    assert json.loads(capsys.readouterr().out)["finish"] in ("length", "end")


@pytest.fixture
def conversation(folder, monkeypatch):
    """Chats with a generator that gives listed answers; returns the generator and the prompts
    that it was given.
    """

    def chat(lines, answers, *flags):
        prompts = []
        generators = []
        answers = iter(answers)

        def stream(self, given, settings, **_):
            generators.append(self)
            prompts.extend(given)
            yield Piece(0, 5, next(answers), None)

        monkeypatch.setattr(jaxtp.generate.Generator, "stream", stream)
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        assert main([f"--model={folder}", "--chat", *flags]) == 0
        return generators[0], prompts

    return chat


def test_a_text_and_a_chat(folder, conversation, capsys):
    assert (
        main(
            [
                f"--model={folder}",
                "--prompt=to",
                "--max-tokens=3",
                "--mesh.tp=2",
                "--json=-",
            ]
        )
        == 0
    )
    record = json.loads(capsys.readouterr().out)
    assert record["prompt_tokens"] == 1 + 3, "the first token, and a mark and two letters"
    generator, prompts = conversation("to\n", [""], "--dtype=bfloat16")
    assert generator.config.precision == Precision(param="bfloat16", compute="bfloat16")
    assert prompts[0].count(1) == 1, (
        "the template spells the first token, and it is not put there twice"
    )


@pytest.mark.wide
def test_adapters_are_added_before_the_cast(folder, refusal, capsys):
    """In float32 to the stored weights, on a mesh; of a run, they are added to what it trained."""
    with use_mesh(tp=2):
        adapted = move_adapters(add_adapters(jaxtp.hf.load(folder), LoraConfig(rank=2)))
        jaxtp.hf.save_adapters(adapted, folder.parent / "adapters")
    asked = GenerateConfig(adapters=folder.parent / "adapters", dtype="float16")
    source = open_source(folder, asked)
    assert source.name == f"{folder} with {asked.adapters}"
    loaded = source.stored.load(source.config, make_mesh(tp=2))
    assert loaded.config.precision == Precision(param="float16", compute="float16")
    merged = values(merge_adapters(adapted))
    assert_same(values(loaded), {name: array.astype("float16") for name, array in merged.items()})
    assert convert(["import", str(folder), str(folder.parent / "run")]) == 0
    flags = [
        f"--model={folder.parent / 'run'}",
        "--prompt=to",
        "--max-tokens=2",
        "--dtype=float16",
    ]
    assert main([*flags, f"--adapters={asked.adapters}"]) == 0
    assert f"with {asked.adapters}: " in capsys.readouterr().err
    error = refusal("--model", asked.adapters, "--prompt=to")
    assert f"give the model by --model and these by --adapters {asked.adapters}" in error


def test_the_dtype_is_the_models_on_gpus_and_float32_on_cpus(folder, monkeypatch):
    for attributes, backend, dtype in read_table(__file__):
        change(folder, **attributes)
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        for asked in (None, "bfloat16"):
            found = open_source(folder, GenerateConfig(dtype=asked)).config.precision
            assert found == Precision(param=asked or dtype, compute=asked or dtype), (
                attributes,
                backend,
            )


def test_prompts_are_checked_before_the_weights_are_read(folder, tmp_path, refusal):
    """Of a file that has none; the messages name the first such prompt, and what would fit."""
    write_tensors(folder / "model.safetensors", {})
    change(folder, max_position_embeddings=16)
    (tmp_path / "p.txt").write_text("\n".join(["", "to", *["t" * 20] * 7]))
    model = ["--model", folder]
    of_file = ["--prompt-file", tmp_path / "p.txt"]
    error = refusal(*model, "--prompt", "t" * 15, *of_file)
    assert "error: prompt 0 has 17 tokens, and the model's context is 16" in error
    assert "shorten it by 2, or allow it by --beyond-context" in error
    assert f"prompt 2 ({tmp_path / 'p.txt'}, line 3) has 22 tokens" in refusal(*model, *of_file)
    assert "an empty conversation has 2" in refusal(*model, "--chat", "--system", "t" * 20)
    change(folder, vocab_size=100)
    assert "has the token 258, but the model's tokens are 0 to 99: this is not" in refusal(
        *model, "--prompt=to"
    )


@pytest.mark.parametrize(("flags", "first_tokens"), [([], [1, 1]), (["--special-tokens"], [2, 3])])
def test_what_is_typed_or_spelled_by_the_model_is_text(flags, first_tokens, conversation):
    """The template writes one <s> (1), the person two, the model one."""
    _, prompts = conversation("<s>to\nto<s>\n", ["to<s>", ""], *flags)
    assert [prompt.count(1) for prompt in prompts] == first_tokens


DAMAGED = [
    ("tokenizer_config.json", b"[]", "is a list, not an object"),
    ("generation_config.json", b"{", "is not JSON"),
    ("generation_config.json", b'{"eos_token_id": "</s>"}', "eos_token_id = </s>: should be ids"),
    ("chat_template.jinja", b"\xff", "not UTF-8"),
]


def test_damaged_files_are_named(folder):
    for name, content, message in DAMAGED:
        (folder / name).write_bytes(content)
        with pytest.raises(TokenizerError, match=message):
            open_source(folder)
        (folder / name).write_text("{}")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match="give one by --tokenizer"):
        open_source(folder)


TEMPLATES = {
    "{{ messages[0]['content'] }}{{ eos_token }}{{ bos_token }}": "é</s>",
    "{% for m in messages %}\n  {{ m.role }}\n{% endfor %}{% if add_generation_prompt %}!{% "
    "endif %}": "  user\n!",
    "{{ messages | tojson }}": '[{"role": "user", "content": "é"}]',
    "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "01",
    "{{ strftime_now('%Y') | length }}": "4",
}


def test_templates():
    messages = [{"role": "user", "content": "é"}]
    for template, expected in TEMPLATES.items():
        assert ChatTemplate(template, "t", {"eos_token": "</s>"}).render(messages) == expected


def test_templates_that_fail_or_reach_out_are_errors():
    def render(row):
        ChatTemplate(row["template"], "t", {}).render([{"role": "user", "content": "x"}])

    rows = read_table(__file__, "failing_templates")
    assert_errors(rows, partial(raised_by, render, kind=ChatError))


def test_the_library_that_a_chat_needs_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ChatError, match=r"pip install 'jaxtp\[chat\]'"):
        ChatTemplate("", "t", {})
