"""`sample_text`: a callback of the trainer that prints texts of the model in training."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.config.entry import shown
from jaxtp.config.schema import ConfigError, expand
from jaxtp.data.manifest import MANIFEST
from jaxtp.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from jaxtp.generate.decode_model import DecodeModel, StackedDecodeModel, join_axes, model_mesh
from jaxtp.generate.engine import Generator
from jaxtp.generate.loading import open_tokenizer
from jaxtp.generate.request import GenerationError, Result
from jaxtp.generate.sampling import Settings, check_settings
from jaxtp.layers.parameter import is_variable, spec_of
from jaxtp.mesh import CP, FSDP, STORAGE, axes_of
from jaxtp.models.decoder import Decoder


def sample_text(
    prompt: str | Sequence[str],
    every: int = 100,
    *,
    settings: Settings = Settings(max_tokens=48),
    tokenizer: str | Path | None = None,
) -> Callable[[Any, Any], None]:
    """Returns a callback that continues texts with the current parameters, and prints them.

    It decodes with the training state's arrays, on the run's mesh, one layer at a time. So it needs
    memory only for a layer and a KV cache, and is slower than `Generator`.

    Args:
      every: steps between texts.
      tokenizer: a dataset, a `tokenizer.json` or its folder; by default as the run's data.

    Raises:
      ConfigError: an invalid setting.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    check_settings(settings)
    if every < 1:
        raise ConfigError(f"every={every}: should be 1 or more")
    generator: _InPlace | None = None
    made_for: object = None

    def callback(trainer: Any, step: Any) -> None:
        nonlocal generator, made_for
        if step.index % every:
            return
        # Virtual CPU devices can deadlock with several programs in flight.
        with trainer.paused("sample_text"):
            model = trainer.model
            run = (trainer.mesh, trainer.config)
            if not isinstance(model, Decoder):
                raise GenerationError(
                    f"sample_text needs a jaxtp.Decoder, and the model is a {type(model).__name__}"
                )
            if generator is None or made_for != run:
                if tokenizer is None:
                    opened = _tokenizer_of(trainer.config.data)
                else:
                    opened = open_tokenizer(tokenizer)
                generator = _InPlace(model, opened, batch_size=len(prompts) * settings.samples)
                made_for = run
            results = generator.sample(model, prompts, settings)
        for result in results:
            text = json.dumps(prompts[result.index] + result.text, ensure_ascii=False)
            trainer.line(f"step {step.index}: {shown(text)}")

    return callback


class _InPlace(Generator):
    """Decodes with the arrays of a training state, which it does not keep."""

    def sample(self, model: Decoder, prompts: Sequence[str], settings: Settings) -> list[Result]:
        encoded = self.tokenizer.encode_batch(prompts)
        ids = [[*self.tokenizer.info.prefix, *text_ids.tolist()] for text_ids in encoded]
        placed = model if self._mesh == model_mesh(model) else _on_mesh(model, self._mesh)
        self._model = StackedDecodeModel(placed)
        for programs in self._programs.values():
            programs.weights = nnx.state(self._model)
        try:
            return self.generate(ids, settings)
        finally:
            self._cache = None
            del self._model
            for programs in self._programs.values():
                programs.weights = nnx.State({})

    def _place(self, model: Decoder, mesh: Mesh, donate: bool) -> tuple[Mesh, int, DecodeModel]:
        # A KV cache cannot be split over cp. Parameters are split over fsdp and cp alike, so no
        # array moves.
        return join_axes(mesh, CP, FSDP), 0, StackedDecodeModel(model)


def _on_mesh(model: Decoder, mesh: Mesh) -> Decoder:
    # `mesh` has the same devices, and fsdp and cp as one axis, so most arrays are not copied.
    def place(variable: nnx.Variable[Array]) -> nnx.Variable[Array]:
        spec = spec_of(variable)
        # fsdp and cp are one axis now, which cannot split a dim over only one of them.
        if any(len({*axes_of(entry)} & {*STORAGE}) == 1 for entry in spec):
            spec = PartitionSpec()
        return variable.replace(jax.device_put(variable[...], NamedSharding(mesh, spec)))

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(place, state, is_leaf=is_variable))


def _tokenizer_of(data: Any) -> Tokenizer:
    if data.batches is not None:
        raise GenerationError(
            "sample_text: the batches are your own, and name no tokenizer; give one by tokenizer="
        )
    for path in (data.path, *data.mixture):
        if path is not None and (expand(Path(path)) / MANIFEST).is_file():
            return load_tokenizer(expand(Path(path)))
    return ByteTokenizer()
