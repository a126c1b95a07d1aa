"""`sample_text`: a callback of the trainer that prints texts of the model in training.

A token takes a forward pass over whole texts, on the mesh of the run. That needs neither a copy of
the weights nor a cache, and for short texts not much time.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxtp.config.entry import shown
from jaxtp.config.files import open_directly, writing
from jaxtp.config.schema import ConfigError
from jaxtp.data.copies import local
from jaxtp.data.manifest import MANIFEST
from jaxtp.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from jaxtp.generate.loading import open_tokenizer
from jaxtp.generate.request import (
    GenerationError,
    Request,
    Result,
    encode_prompts,
    limits_of,
    requests_of,
)
from jaxtp.generate.sampling import Settings, check_settings, sample
from jaxtp.layers.kernels.padding import round_up
from jaxtp.mesh import CP, TP, batch_parts, mesh_sizes
from jaxtp.models.decoder import Decoder

SAMPLES = "samples.jsonl"  # File of the texts, in the folder of a run
# Lengths of texts are multiples of this number of tokens on each device along cp and tp
_BLOCK = 64


def sample_text(
    prompt: str | Sequence[str],
    every: int = 100,
    *,
    settings: Settings = Settings(max_tokens=48),
    tokenizer: str | Path | None = None,
) -> Callable[[Any, Any], None]:
    """Returns a callback that continues texts with the current parameters, and prints them.

    Args:
      every: steps between texts.
      tokenizer: a dataset, a `tokenizer.json` or its folder; by default as the run's data.

    Raises:
      ConfigError: an invalid setting.
      TokenizerError: there is no tokenizer at `tokenizer`.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    check_settings(settings)
    if every < 1:
        raise ConfigError(f"every={every}: should be 1 or more")
    given_tokenizer = None if tokenizer is None else open_tokenizer(tokenizer)

    def callback(trainer: Any, step: Any) -> None:
        if step.index % every:
            return
        # Virtual CPU devices can deadlock with several programs in flight.
        with trainer.paused("sample_text"):
            model = trainer.model
            if not isinstance(model, Decoder):
                raise GenerationError(
                    f"sample_text needs a jaxtp.Decoder, and the model is a {type(model).__name__}"
                )
            own_tokenizer = given_tokenizer or _tokenizer_of(trainer.config.data)
            results = _continue_texts(model, trainer.mesh, own_tokenizer, prompts, settings)
        for result in results:
            text = prompts[result.index] + result.text
            trainer.line(f"step {step.index}: {shown(json.dumps(text, ensure_ascii=False))}")
            _record(trainer.config.run.dir / SAMPLES, {"step": step.index, "text": text})

    return callback


def _record(path: Path, sample: Mapping[str, object]) -> None:
    if jax.process_index() != 0:
        return
    with writing(f"{SAMPLES} of the run", path), open_directly(path, "a") as file:
        file.write(json.dumps(sample) + "\n")


def _continue_texts(
    model: Decoder,
    mesh: Mesh,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    settings: Settings,
) -> list[Result]:
    info = tokenizer.info
    sizes = mesh_sizes(mesh)
    parts = sizes[CP] * sizes[TP]  # of a sequence
    limits = limits_of(model.config, None)
    if limits.context is not None:
        limits = replace(limits, context=limits.context // parts * parts)
    encoded = encode_prompts(prompts, tokenizer, info.prefix, limits)
    requests = requests_of(encoded, tokenizer, settings, info.end_ids, limits.context)
    longest = max(request.num_prompt for request in requests) + settings.max_tokens
    length = min(round_up(longest, _BLOCK * parts), limits.context or sys.maxsize)
    shape = (round_up(len(requests), batch_parts(sizes)), length)
    num_ids = min(info.vocab_size, model.config.vocab_size)
    choose = partial(_next_tokens, *nnx.split(model), settings=settings, num_ids=num_ids)
    results: list[Result] = []
    while len(results) < len(requests):
        with jax.set_mesh(mesh):
            tokens, logprobs = jax.device_get(choose(*_arrays_of(requests, shape)))
        for row, request in enumerate(requests):
            if request.finish is None:
                piece = request.append(int(tokens[row]), float(logprobs[row]))
                results += filter(None, [piece.result])
    return sorted(results, key=lambda result: (result.index, result.sample))


def _arrays_of(requests: Sequence[Request], shape: tuple[int, int]) -> Iterator[np.ndarray]:
    """Yields the tokens of each row, `[B, T]`, their number, and the seed of the row."""
    ids = np.zeros(shape, np.int32)
    lengths = np.ones(len(ids), np.int32)
    seeds = np.zeros(len(ids), np.uint32)
    for row, request in enumerate(requests):
        lengths[row] = len(request.tokens)
        ids[row, : lengths[row]] = request.tokens
        seeds[row] = request.seed
    yield from (ids, lengths, seeds)


@partial(jax.jit, static_argnums=0, static_argnames=("settings", "num_ids"))
def _next_tokens(
    graph: nnx.GraphDef[Decoder],
    state: nnx.State,
    ids_BT: Array,
    lengths_B: Array,
    seeds_B: Array,
    *,
    settings: Settings,
    num_ids: int,
) -> tuple[Array, Array]:
    """Returns the token after each row's first `lengths_B` ones, and its log-probability."""
    model = nnx.merge(graph, state)
    model.eval()
    logits_BTV = model(ids_BT)
    # A masked sum: indexing along T, which cp splits, would gather all logits.
    is_last_BT = jnp.arange(ids_BT.shape[1]) == lengths_B[:, None] - 1
    logits_BV = jnp.sum(jnp.where(is_last_BT[..., None], logits_BTV, 0), axis=1)
    return sample(logits_BV, seeds_B, lengths_B, settings=settings, num_ids=num_ids)


def _tokenizer_of(data: Any) -> Tokenizer:
    if data.batches is not None:
        raise GenerationError(
            "sample_text: the batches are your own, and name no tokenizer; give one by tokenizer="
        )
    for path in (data.path, *data.mixture):
        folder = local(path)
        if folder is not None and (folder / MANIFEST).is_file():
            return load_tokenizer(folder)
    return ByteTokenizer()
