"""The work of `jaxtp generate`: it loads a model, continues texts or talks, and says how fast that was.

Generated text goes to standard output, everything else to standard error.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TextIO

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxtp import entry
from jaxtp.checkpoint.logical import logical_size
from jaxtp.data.template import ChatError, ChatTemplate
from jaxtp.data.tokenizer_files import read_template
from jaxtp.files import require_writable, writing
from jaxtp.generate.chat import Chat, opening
from jaxtp.generate.config import STDOUT, GenerateConfig, open_mesh, request_devices
from jaxtp.generate.engine import Generator
from jaxtp.generate.listener import Listener
from jaxtp.generate.loading import Source, open_source
from jaxtp.generate.prompts import Ids, Limits, encode_prompts, limits_of, read_prompts
from jaxtp.generate.request import Piece, Result
from jaxtp.generate.scheduler import GenerationError
from jaxtp.interrupt import Interrupt
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
    if config.json != STDOUT:
        require_writable("--json", config.json)
    prompts: list[str | None] = list(config.prompt)
    if config.prompt_file is not None:
        prompts += read_prompts(config.prompt_file, config.field)
    request_devices(config.mesh)
    source = open_source(folder, config)
    context = None if config.beyond_context else source.context
    limits = limits_of(source.config, context)
    listener = _listener(config, source, limits) if config.chat else None
    encoded = encode_prompts(prompts, source.tokenizer, source.prefix, limits, partial(_name, config))
    mesh = open_mesh(config.mesh, source.config)
    progress = Progress()
    generator = Generator(
        load(source, mesh),
        source.tokenizer,
        end_ids=source.end_ids,
        prefix=source.prefix,
        batch_size=config.batch_size,
        context=context,
        donate=True,
        progress=progress.read,
    )
    if listener is not None:
        chat = Chat(generator, listener, config.sampling, config.system)
        progress.check = chat.check
        chat.run()
        speed = chat.speed
    else:
        _complete(generator, prompts, encoded, config, progress)
        speed = generator.speed
    say("\n".join(speed.lines()))


def _name(config: GenerateConfig, index: int) -> str:
    """Returns the name of a prompt in messages."""
    line = index - len(config.prompt) + 1
    return f"prompt {index}" + (f" ({config.prompt_file}, line {line:,})" if line > 0 else "")


def _listener(config: GenerateConfig, source: Source, limits: Limits) -> Listener:
    """Returns the listener of a chat; a beginning that cannot be answered is found before the weights are read."""
    text, name = source.template, f"the chat template of {source.name}"
    if config.template is not None:
        text, name = read_template(config.template), str(config.template)
    if text is None:
        raise ChatError(f"{source.name} has no chat template; give one by --template FILE, or texts by --prompt TEXT")
    template = ChatTemplate(text, name, source.special_tokens)
    listener = Listener(source.tokenizer, template, special_tokens=config.special_tokens)
    begun = listener.ids([*opening(config.system), {"role": "user", "content": "a"}])
    if problem := limits.problem(begun):
        raise GenerationError(f"the conversation, before anything is said, {problem}")
    return listener


def _complete(
    generator: Generator,
    prompts: Sequence[str | None],
    encoded: Sequence[Ids | None],
    config: GenerateConfig,
    progress: "Progress",
) -> None:
    """Prints one text as it comes, several each as a whole and in their order.

    A first Ctrl-C is heeded between calls: a process that ends while one is under way may crash.
    """
    with Interrupt(signal.SIGINT) as interrupt:
        progress.check = interrupt.check
        pieces = progress.checked(generator.stream(encoded, config.sampling))
        _print_pieces(pieces, prompts, config, progress)


def _print_pieces(
    pieces: Iterable[Piece], prompts: Sequence[str | None], config: GenerateConfig, progress: "Progress"
) -> None:
    with ExitStack() as stack:
        as_text, file = config.json != STDOUT, None
        if as_text and config.json is not None:
            with writing("--json", config.json):
                file = stack.enter_context(config.json.open("w", encoding="utf-8"))
        if as_text and len(prompts) == 1:
            pieces = _shown(pieces)
        indices = [index for index, prompt in enumerate(prompts) if prompt is not None]
        for result in in_order(progress.made(pieces, len(indices)), indices):
            prompt = prompts[result.index]
            record = json.dumps({"prompt": prompt, **asdict(result)}, ensure_ascii=False)
            if as_text and len(prompts) > 1:
                _write_whole(f"--- {result.index}: {json.dumps(prompt, ensure_ascii=False)}\n{result.text}", sys.stdout)
            elif not as_text:
                _write_whole(record, sys.stdout)
            if file is not None and config.json is not None:
                with writing("--json", config.json):
                    _write_whole(record, file)


def _shown(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yields the pieces of one text, and prints each as it comes."""
    for piece in pieces:
        print(piece.text, end="", flush=True)
        yield piece
    print()


def _write_whole(text: str, file: TextIO) -> None:
    """Writes text and the end of its line by one write, so that a process that is killed leaves no part of them."""
    file.write(f"{text}\n")
    file.flush()


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
    """Prints every few seconds how far prompts have been read and texts made, where that takes long."""

    def __init__(self) -> None:
        self.check: Callable[[], None] = lambda: None
        """Called after each part of prompts; may raise an error that ends the reading."""
        self._said = time.monotonic()

    def read(self, read: int, total: int) -> None:
        """Takes the number of tokens that have been read, and of all those that are being read."""
        self.check()
        if read < total and self._is_time():
            say(f"read {read:,} of {total:,} tokens of prompts")

    def checked(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yields pieces, and checks after each."""
        for piece in pieces:
            yield piece
            self.check()

    def made(self, pieces: Iterable[Piece], total: int) -> Iterator[Piece]:
        """Yields the pieces of so many texts; of these it tells where no terminal shows them on standard output."""
        done, tokens, since = 0, 0, time.monotonic()
        for piece in pieces:
            yield piece
            done, tokens = done + (piece.result is not None), tokens + 1
            if total > 1 and not sys.stdout.isatty() and self._is_time():
                say(f"{done:,} of {total:,} texts, {tokens / (self._said - since):,.0f} tokens/s")
                tokens, since = 0, self._said

    def _is_time(self) -> bool:
        now = time.monotonic()
        if now - self._said < PROGRESS_SECONDS:
            return False
        self._said = now
        return True


def load(source: Source, mesh: Mesh) -> Decoder:
    """Returns a model on its mesh, and says its name, its size and the devices."""
    keep_programs(mesh.devices.flat[0].platform)
    model = source.load(mesh)
    say(_summary(source, model, mesh))
    return model


def _summary(source: Source, model: Decoder, mesh: Mesh) -> str:
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
        entry.say(text)
