"""Compares greedy tokens and log-probabilities with transformers, over batch sizes and meshes.

    python scripts/generate_parity.py --model DIR --transformers-python PATH

Prompts are excerpts of 4 to 60 tokens from this repository's texts. Transformers continues each
separately in float32, in its own process; jaxtp continues them in batches of several sizes on
several meshes of virtual CPU devices. The table has the number of texts with equal tokens, and the
largest difference in nats between log-probabilities of these tokens. Rounding may decide between
two tokens with nearly equal probabilities; so for a text that differs, the table has the difference
between their log-probabilities in transformers.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

BATCHES = (1, 8, 32)
TPS = (1, 3)


def prompts_of(tokenizer, count: int) -> list[list[int]]:
    """Returns the ids of prompts of different lengths."""
    root = Path(__file__).parent.parent
    text = "\n".join(path.read_text() for path in (root / "README.md", root / "jaxtp/README.md"))
    lines = [line.strip() for line in text.splitlines() if len(line.split()) > 6]
    step = len(lines) // count
    return [
        tokenizer(line)[: 4 + 7 * index % 57]
        for index, line in enumerate(lines[: step * count : step])
    ]


def of_transformers(folder: str) -> None:
    """Reads prompts as JSON from standard input; prints tokens and log-probabilities."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    prompts, tokens = json.load(sys.stdin)
    found = []
    for ids in prompts:
        given = torch.tensor([ids])
        options = {
            "max_new_tokens": tokens,
            "do_sample": False,
            "pad_token_id": 0,
            "return_dict_in_generate": True,
        }
        with torch.no_grad():
            made = model.generate(
                given, attention_mask=torch.ones_like(given), output_logits=True, **options
            )
        logprobs = torch.log_softmax(torch.stack(made.logits)[:, 0].double(), -1)
        top = logprobs.topk(2)
        found.append(
            [
                made.sequences[0, len(ids) :].tolist(),
                top.values[:, 0].tolist(),
                top.values[:, 1].tolist(),
            ]
        )
    print(json.dumps(found))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder in Hugging Face format")
    parser.add_argument(
        "--transformers-python", default=sys.executable, help="a Python with torch and transformers"
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        of_transformers(arguments.model)
        return

    import jaxtp
    from jaxtp.generate.loading import open_source

    source = open_source(Path(arguments.model))
    prompts = prompts_of(
        lambda text: source.tokenizer.encode_batch([text])[0].tolist(), arguments.prompts
    )
    command = [arguments.transformers_python, __file__, "--worker", "--model", arguments.model]
    given = json.dumps([prompts, arguments.tokens])
    theirs = json.loads(
        subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    sizes = sorted(map(len, prompts))
    print(
        f"{len(prompts)} prompts of {sizes[0]} to {sizes[-1]} tokens, {arguments.tokens} made "
        "for each"
    )
    print(f"{'tp':<8}{'rows':>6}{'same texts':>14}{'largest difference':>22}")
    # The largest mesh is made first, for its devices.
    meshes = [jaxtp.make_mesh(tp=tp) for tp in reversed(TPS)][::-1]
    for tp, mesh in zip(TPS, meshes, strict=True):
        for rows in BATCHES:
            options = {"end_ids": frozenset(), "batch_size": rows, "donate": True}
            generator = jaxtp.generate.Generator(source.load(mesh), source.tokenizer, **options)
            results = generator.generate(
                prompts, jaxtp.generate.Settings(max_tokens=arguments.tokens)
            )
            largest = 0.0
            same = 0
            ties = []
            for result, (ids, first, second) in zip(results, theirs, strict=True):
                pairs = zip(ids, result.ids, strict=True)
                until = next((at for at, (a, b) in enumerate(pairs) if a != b), len(ids))
                same += until == len(ids)
                differences = [
                    abs(a - b) for a, b in zip(first[:until], result.logprobs[:until], strict=True)
                ]
                largest = max([largest, *differences])
                if until < len(ids):
                    ties.append(round(first[until] - second[until], 6))
            print(
                f"{tp:<8}{rows:>6}{same:>10} of {len(results)}{largest:>18.1e}  {ties or ''}",
                flush=True,
            )


if __name__ == "__main__":
    main()
