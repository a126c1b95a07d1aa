"""The work of `python -m jaxtp.generate`: it loads a model, continues texts or talks, and says how fast that was.

Generated text goes to standard output, everything else to standard error.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint.logical import logical_size
from jaxtp.data.template import ChatError, ChatTemplate
from jaxtp.data.tokenizer_files import read_template
from jaxtp.generate.chat import Listener, converse, opening
from jaxtp.generate.config import GenerateConfig, open_mesh, request_devices
from jaxtp.generate.engine import Generator
from jaxtp.generate.loading import Source, open_source
from jaxtp.generate.prompts import read_prompts
from jaxtp.generate.request import Piece, Result
from jaxtp.launch.environment import keep_programs
from jaxtp.mesh import describe_mesh, mesh_sizes
from jaxtp.models.decoder import Decoder

PROGRESS_SECONDS = 5.0


def run(config: GenerateConfig, folder: Path) -> None:
    """Carries out a configuration.

    Args:
      config: the configuration.
      folder: the folder of the model.

    Raises:
      ValueError: a user's mistake, most of them before the weights are read.
    """
    prompts: list[str | None] = list(config.prompt)
    if config.prompt_file is not None:
        prompts += read_prompts(config.prompt_file, config.field)
    request_devices(config.mesh)
    source = open_source(folder, config)
    listener = _listener(config, source) if config.chat else None
    mesh = open_mesh(config.mesh, source.config)
    keep_programs(mesh.devices.flat[0].platform)
    model = source.load(mesh)
    say(summary(source, model, mesh))
    generator = Generator(
        model,
        source.tokenizer,
        end_ids=source.end_ids,
        prefix=source.prefix,
        batch_size=config.batch_size,
        context=None if config.beyond_context else source.context,
        progress=Progress(),
    )
    if listener is not None:
        converse(generator, listener, config.sampling, config.system)
    else:
        _complete(generator, prompts, config)
    say("\n".join(generator.speed.lines()))


def _listener(config: GenerateConfig, source: Source) -> Listener:
    """Returns the listener of a chat; a template that refuses its beginning is found before the weights are read."""
    text, name = source.template, f"the chat template of {source.name}"
    if config.template is not None:
        text, name = read_template(config.template), str(config.template)
    if text is None:
        raise ChatError(f"{source.name} has no chat template; give one by --template FILE, or texts by --prompt TEXT")
    template = ChatTemplate(text, name, source.special_tokens)
    listener = Listener(source.tokenizer, template, special_tokens=config.special_tokens)
    listener.ids([*opening(config.system), {"role": "user", "content": "a"}])
    return listener


def _complete(generator: Generator, prompts: Sequence[str | None], config: GenerateConfig) -> None:
    """Prints one text as it comes, several each as a whole and in their order."""
    pieces = generator.stream(prompts, config.sampling)
    if len(prompts) == 1 and not config.json:
        for piece in pieces:
            print(piece.text, end="", flush=True)
        print()
        return
    for result in in_order(pieces, [index for index, prompt in enumerate(prompts) if prompt is not None]):
        prompt = prompts[result.index]
        if config.json:
            print(json.dumps({"prompt": prompt, **asdict(result)}, ensure_ascii=False), flush=True)
        else:
            print(f"--- {result.index}: {json.dumps(prompt, ensure_ascii=False)}\n{result.text}", flush=True)


def in_order(pieces: Iterable[Piece], indices: Iterable[int]) -> Iterator[Result]:
    """Yields results in the order of their prompts' indices, each as soon as it and those before it are there."""
    waiting: dict[int, Result] = {}
    following = iter(indices)
    index = next(following, None)
    for piece in pieces:
        if piece.result is not None:
            waiting[piece.index] = piece.result
        while index in waiting:
            yield waiting.pop(index)
            index = next(following, None)


class Progress:
    """Prints every few seconds how far long prompts have been read."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, read: int, longest: int) -> None:
        """Takes the number of tokens of each prompt read so far, and that of the longest prompt."""
        now = time.monotonic()
        if read < longest and now - self._said >= PROGRESS_SECONDS:
            say(f"reading {read:,} of {longest:,} tokens of the longest prompt")
            self._said = now


def summary(source: Source, model: Decoder, mesh: Mesh) -> str:
    """Returns what is said of a model once it is loaded: its name and size, and the devices that it is on."""
    size = logical_size(nnx.state(model))
    kind = mesh.devices.flat[0].device_kind
    device = "CPU device" if mesh.devices.flat[0].platform == "cpu" else kind
    return (
        f"model   {source.name}: {size:,} parameters, {source.config.precision.compute}\n"
        f"mesh    {describe_mesh(mesh_sizes(mesh))} = {mesh.size} {device}{'s' if mesh.size > 1 else ''}"
    )


def say(text: str) -> None:
    """Prints a line on standard error, in one process of several."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)
