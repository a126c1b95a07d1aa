"""`jaxtp convert`: imports and exports models in Hugging Face format."""

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint import silence_orbax
from jaxtp.checkpoint.manager import Checkpoints, load_weights, weight_average
from jaxtp.checkpoint.storage import CONFIG
from jaxtp.config import entry
from jaxtp.config.affects import POSITIONAL, Argument
from jaxtp.config.command_line import Command, choose
from jaxtp.config.console import Display
from jaxtp.config.schema import (
    Address,
    FolderOrUrl,
    Keys,
    OptionalFile,
    OptionalFolder,
    to_plain,
    to_yaml,
)
from jaxtp.data.copies import local, recorded, sending
from jaxtp.data.tokenizer_files import MAX_POSITIONS
from jaxtp.generate.loading import SourceConfig, StoredModel, open_stored
from jaxtp.hf import saving
from jaxtp.hf.config_json import dtype_of, family_of
from jaxtp.hf.families import FAMILIES, WRAPPERS
from jaxtp.hf.families.family import Layout
from jaxtp.hf.loading import Progress, import_config, load_folder
from jaxtp.hf.model_folder import HFError, open_folder
from jaxtp.hf.peft import save_adapters
from jaxtp.hf.runs import BASE, copy_hf_files, hf_files_of, load_adapted, load_adapters, origin_of
from jaxtp.hf.saving import atomic_folder, copied_attributes, has_tokenizer
from jaxtp.hf.wrapper import is_part
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import DType, Precision
from jaxtp.mesh import mesh_of, mesh_shape, mesh_sizes
from jaxtp.models.decoder import Decoder
from jaxtp.train import run_folder
from jaxtp.train.config import MeshConfig, RunConfig, TrainConfig

PROGRAM = "jaxtp convert"
IMPORT_HELP = """\
Reads a folder in Hugging Face format into a new run: config.yaml and a checkpoint at step 0.

jaxtp convert import models/Llama-3.2-1B runs/llama

Train from it by
jaxtp train --config runs/llama/config.yaml --run.init-from runs/llama --run.dir runs/tuned
"""
EXPORT_HELP = """\
Writes a run's checkpoint as a folder in Hugging Face format, or its adapters in PEFT's format.

jaxtp convert export runs/tuned models/tuned --tokenizer-from models/Llama-3.2-1B

With --adapters, merges adapters into a model:

jaxtp convert export models/Llama-3.2-1B models/merged --adapters models/adapters
"""
LIST_HELP = "Lists the model_type of every supported model, grouped by architecture."
IMPORTED = "imported"  # Key of a checkpoint's info: folder and dtype of the imported model
HFDir = Annotated[FolderOrUrl, POSITIONAL, Argument("HF_DIR")]
RunDir = Annotated[FolderOrUrl, POSITIONAL, Argument("RUN_DIR")]


@dataclass(frozen=True, kw_only=True)
class MeshFlags:
    """Devices that hold the model during the conversion.

    Without GPUs they are virtual devices of this host.
    """

    fsdp: int = 1
    """Shards of each parameter."""
    tp: int = 1
    """Shards of each matrix product."""

    def make(self) -> Mesh:
        """Returns the mesh; raises `MeshError` if there are too few devices."""
        return mesh_of(mesh_shape(**asdict(self)))


@dataclass(frozen=True, kw_only=True)
class Import:
    """Flags of `jaxtp convert import`."""

    source: HFDir
    """Folder, or its URL, with config.json and safetensors, in one file or several with an
    index."""
    run: RunDir
    """New folder for the run, or its URL; the tokenizer files are copied to its hf/, where export
    finds them."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the parameters in the run; by default the dtype of the safetensors (float16 becomes
    float32)."""
    ignore_config: Keys = ()
    """Unknown attributes of config.json to ignore, because they do not affect the model's outputs.
    Repeatable."""
    mesh: MeshFlags = MeshFlags()


@dataclass(frozen=True, kw_only=True)
class Export:
    """Flags of `jaxtp convert export`."""

    run: RunDir
    """Folder of a run (its newest checkpoint), or of one checkpoint; with --adapters also a model
    in Hugging Face format."""
    out: HFDir
    """New folder for the model, or its URL; it appears when it is complete."""
    family: str | None = None
    """Family to write, by its model_type, such as qwen3 or gemma2; by default the family of the
    model that the run started from, or the first that fits."""
    tokenizer_from: OptionalFolder = None
    """Folder in Hugging Face format whose tokenizer files are copied; by default the hf/ of an
    imported run."""
    merged: bool = False
    """Write the whole model of a run that trained adapters, with the adapters merged into the
    kernels."""
    adapters: OptionalFolder = None
    """Folder of adapters in PEFT's format, to merge into the kernels in float32."""
    ema: bool = False
    """Write the moving average of the weights that the run's optimizer made, in place of the
    weights (scripts/examples/ema.py)."""
    base: OptionalFolder = None
    """Base model of a run that trained adapters, if it has moved."""
    like: OptionalFolder = None
    """Folder that the model came from, if it has moved. The vision tower and other tensors outside
    of the text model are copied from there."""
    heads: OptionalFile = None
    """File of safetensors with prediction heads that were trained with this model, by the names in
    the folder that the model came from, whose heads they replace
    (scripts/examples/prediction_head.py)."""
    text_only: bool = False
    """Write the text model of a multimodal model by itself."""
    dtype: DType | None = None
    """Dtype of the written tensors; by default the dtype of an imported model's files, and for
    other runs the dtype of the parameters (model.precision.param)."""
    experts: Layout | None = None
    """Tensors of a mixture of experts: separate has one for each expert, as on the Hub, the default
    for models; stacked has one for all experts of a layer, as in the memory of transformers 5, the
    default for adapters."""
    max_shard_size: str = "5GB"
    """Maximum size of a file of weights, such as 500MB; a tensor is never split."""
    allow_non_finite: bool = False
    """Write weights even if they are not finite."""
    ignore_config: Keys = ()
    """Unknown attributes of config.json to ignore, as in an import. Repeatable."""
    mesh: MeshFlags = MeshFlags()


@dataclass(frozen=True, kw_only=True)
class List:
    """Flags of `jaxtp convert list`."""


COMMANDS: dict[str, Command[Any]] = {
    "import": Command(program=f"{PROGRAM} import", schema=Import, description=IMPORT_HELP),
    "export": Command(program=f"{PROGRAM} export", schema=Export, description=EXPORT_HELP),
    "list": Command(program=f"{PROGRAM} list", schema=List, description=LIST_HELP),
}
_GROUPS = {
    "delta_value_heads": "Gated DeltaNet and Mamba-2",
    "short_conv": "short convolutions",
    "kv_rank": "latent attention",
    "num_experts": "experts",
}
"""Groups of families by a field of `ModelConfig` that the others lack."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code.

    The code is 0, 2 for a user's mistake, 3 for weights that are not finite, or 130 for Ctrl-C.
    """
    silence_orbax()
    return entry.attempt(PROGRAM, lambda: _run(argv))


def _run(argv: Sequence[str]) -> None:
    name, flags = choose(PROGRAM, COMMANDS, argv)
    config, _ = COMMANDS[name].load(flags)
    if isinstance(config, List):
        print(list_families(shutil.get_terminal_size().columns))
    else:
        print(import_run(config) if isinstance(config, Import) else export_run(config))


def list_families(columns: int) -> str:
    """Returns the families by group, in lines of `columns`."""
    groups: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        attributes = chain(family.attributes, *family.by_type.values())
        fields = set(chain.from_iterable(attribute.fields for attribute in attributes))
        group = next((_GROUPS[field] for field in _GROUPS if field in fields), "dense")
        groups.setdefault(group, []).append(family.model_type)
    groups["text of multimodal models"] = [*WRAPPERS]
    lines = (f"{group}: {', '.join(names)}" for group, names in groups.items())
    return "\n".join(textwrap.fill(line, columns, subsequent_indent="  ") for line in lines)


@contextmanager
def _progress(verb: str) -> Iterator[Progress]:
    with Display(f"{{done}}% {verb}", stream=sys.stderr) as display:
        display.begin(0, 100)
        yield lambda finished, total: display.move(100 * finished // max(total, 1))


def import_run(command: Import) -> str:
    """Imports a model as a run, whose folder appears when complete; returns a message."""
    with sending(command.run) as target, atomic_folder(target) as partial:
        source = open_folder(local(command.source))
        precision = None if command.dtype is None else Precision(param=command.dtype)
        config = import_config(source, precision, {}, command.ignore_config)
        mesh = command.mesh.make()
        with jax.set_mesh(mesh), _progress("read") as progress:
            model = load_folder(source, config, mesh, progress)
        # A run trains in a folder, by default of this name.
        folder = Path("runs", command.run.name) if isinstance(command.run, Address) else target
        run = TrainConfig(
            run=RunConfig(dir=folder), mesh=MeshConfig(**asdict(command.mesh)), model=config
        )
        _save(partial, run, model, mesh, {"from": recorded(source.path), "dtype": dtype_of(source)})
        copy_hf_files(source.path, partial)
        (partial / CONFIG).write_text(to_yaml(run), encoding="utf-8")
    return (
        f"{command.source} ({source.attributes['model_type']}) is in {command.run}, parameters in "
        f"{config.precision.param}"
    )


def _save(
    folder: Path, config: TrainConfig, model: Decoder, mesh: Mesh, imported: dict[str, str]
) -> None:
    checkpoints = Checkpoints(folder / run_folder.CHECKPOINTS)
    settings = to_plain(config)
    info = run_folder.checkpoint_info(settings, {IMPORTED: imported["from"]}, 0, mesh_sizes(mesh))
    state: nnx.State = nnx.State({"model": nnx.state(model)})
    checkpoints.save(0, state, mesh, {**info, IMPORTED: imported})
    checkpoints.close()


def export_run(command: Export) -> str:
    """Writes a checkpoint, or a model with adapters, in Hugging Face format; returns a message."""
    with sending(command.out) as out:
        text = _export(command, out)
    return f"{text} in {command.out}"


def _export(command: Export, out: Path) -> str:
    mesh = command.mesh.make()  # before `open_stored`, which starts JAX's backend
    command = replace(
        command,
        run=local(command.run),
        tokenizer_from=local(command.tokenizer_from, is_small=True),
        base=local(command.base),
        like=local(command.like),
        out=out,
    )
    settings = SourceConfig(
        adapters=command.adapters, base=command.base, ignore_config=command.ignore_config
    )
    source = open_stored(command.run, settings)
    stored = source.config
    _check_export(command, source)
    tokenizer: Path | None = command.run
    if source.is_run:
        attributes, tokenizer = _run_files(source)
    else:
        attributes = copied_attributes(command.run)
    if tokenizer is not None and not has_tokenizer(tokenizer):
        tokenizer = None
    options: dict[str, Any] = {
        "family": command.family or (None if command.text_only else source.family),
        "tokenizer_from": command.tokenizer_from or tokenizer,
        "dtype": command.dtype,
        "allow_non_finite": command.allow_non_finite,
    }
    if command.experts is not None:
        options["experts"] = command.experts
    if stored.lora.rank and not command.merged:
        return _export_adapters(command, source, mesh, options)
    like = _origin(command, source)
    dtype: DType = command.dtype or source.info.get(IMPORTED, {}).get("dtype") or source.dtype
    # In the exported dtype, so that merging rounds only once.
    config = replace(stored, lora=LoraConfig(), precision=replace(stored.precision, param=dtype))
    with nullcontext() if source.is_run else _progress("read") as progress:
        model = source.load(config, mesh, progress)
    if command.ema:
        parameters = nnx.state(model, nnx.Param)
        prefix = weight_average(source.folder, parameters, mesh)
        nnx.update(model, load_weights(source.folder, parameters, mesh, prefix)[0])
    options["dtype"] = dtype
    with _progress("written") as options["progress"]:
        saving.save(
            model,
            command.out,
            attributes=attributes,
            like=like,
            heads=command.heads,
            max_shard_size=command.max_shard_size,
            **options,
        )
    adapters = "" if source.adapters is None else f" with {source.adapters.path}"
    return f"{source.folder}{adapters} is"


def _check_export(command: Export, source: StoredModel) -> None:
    if source.adapters is None and not source.is_run:
        raise HFError(
            f"{source.folder} is in Hugging Face format already; --adapters DIR adds adapters to it"
        )
    if command.ema and (source.config.lora.rank or not source.is_run):
        raise HFError(
            f"--ema: {source.folder} is no checkpoint of a run that trained all weights; leave "
            "--ema out"
        )
    if source.config.lora.rank:
        return
    if command.base is not None:
        raise HFError(f"{source.folder} has no adapters; leave --base out")
    if command.merged and source.adapters is None:
        raise HFError(f"{source.folder} has no adapters; leave --merged out")


def _origin(command: Export, source: StoredModel) -> Path | None:
    """Returns the folder of a model that is more than a text model, if any.

    Raises `HFError` if the folder no longer exists.
    """
    multimodal = command.family in WRAPPERS
    if command.text_only or (command.family is not None and not multimodal):
        return command.like
    if source.opened is not None:
        family = family_of(source.opened.attributes, str(command.run))
        return command.run if is_part(family) else command.like
    like = command.like or origin_of(hf_files_of(source.folder))
    if like is not None and not like.is_dir():
        raise HFError(
            f"{like}: no such folder; {source.folder} has only the text model of the model there. "
            "Name the folder by --like DIR, or export the text model by --text-only"
        )
    if like is None and multimodal:
        raise HFError(
            f"--family {command.family} has more than a text model; name a folder with its other "
            "tensors by --like DIR"
        )
    return like


def _export_adapters(
    command: Export, source: StoredModel, mesh: Mesh, options: dict[str, Any]
) -> str:
    checkpoint = source.folder
    config = source.config
    base = command.base
    if base is None:
        model = load_adapters(checkpoint, config, mesh)
    else:
        model = load_adapted(checkpoint, source.info, mesh, base)
    from_hf = source.info["config"]["model"].get("from_hf")
    origin = source.info[BASE]["from"] if from_hf is not None else None
    with _progress("written") as options["progress"]:
        save_adapters(model, command.out, base=base or origin, **options)
    return f"the adapters of {checkpoint} are"


def _run_files(source: StoredModel) -> tuple[dict[str, Any], Path | None]:
    """Returns config.json attributes without effect on outputs, and the folder of the tokenizer."""
    hf_files = hf_files_of(source.folder)
    data = source.info["config"].get("data", {})
    tokenizer = hf_files
    if data.get("path") is not None and not (hf_files and has_tokenizer(hf_files)):
        tokenizer = local(data["path"], is_small=True)
    attributes = copied_attributes(hf_files)
    trained_length = data.get("sequence_length")
    length = attributes.get(MAX_POSITIONS)
    is_shorter = trained_length and type(length) is int and length < trained_length
    if hf_files is None or is_shorter:
        attributes[MAX_POSITIONS] = trained_length
    return attributes, tokenizer


if __name__ == "__main__":
    entry.run(PROGRAM, main)
