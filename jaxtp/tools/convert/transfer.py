"""`jaxtp convert import` and `export`: models from Hugging Face's format to runs, and back."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.checkpoint.storage import newest_checkpoint, read_info
from jaxtp.config.console import Display
from jaxtp.config.schema import Keys, Switch, UserPath, expand, to_yaml
from jaxtp.data.tokenizer_files import LONGEST
from jaxtp.hf.config_json import dtype_of
from jaxtp.hf.families.family import Layout
from jaxtp.hf.load import Progress, import_config, load_folder
from jaxtp.hf.model_folder import CONFIG, HFError, open_folder
from jaxtp.hf.peft import open_peft, save_peft
from jaxtp.hf.runs import (
    BASE,
    copy_hf_files,
    family_of_run,
    hf_files_of,
    load_adapted,
    load_adapters,
    load_merged,
    merge_peft,
    run_model_config,
)
from jaxtp.hf.save import SaveOptions, atomic_folder, carried_attributes, has_tokenizer, save_hf
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import DType, Precision
from jaxtp.mesh import mesh_of, mesh_shape, mesh_sizes
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder
from jaxtp.train import run_folder as run_folder
from jaxtp.train.config import MeshConfig, RunConfig, TrainConfig

IMPORTED = "imported"
"""Key of a checkpoint's info: folder and dtype of the imported model."""
HFDir = Annotated[UserPath, tyro.conf.Positional, tyro.conf.arg(metavar="HF_DIR")]
RunDir = Annotated[UserPath, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
OptionalDir = Annotated[UserPath | None, tyro.conf.arg(metavar="DIR")]


@dataclass(frozen=True, kw_only=True)
class MeshFlags:
    """Devices that hold the model during the conversion; without GPUs they are virtual devices of this host."""

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
    """config.json and safetensors, in one file or several with an index."""
    run: RunDir
    """New folder. The tokenizer files are copied to its hf/, where export finds them."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the parameters in the run; by default the one of the safetensors (float16 becomes float32)."""
    ignore_config: Keys = ()
    """Unknown attributes of config.json to ignore, because they do not affect what the model computes. Repeatable."""
    mesh: MeshFlags = MeshFlags()


@dataclass(frozen=True, kw_only=True)
class Export:
    """Flags of `jaxtp convert export`."""

    run: RunDir
    """Folder of a run (its newest checkpoint), or of one checkpoint; with --adapters also a model in Hugging Face
    format."""
    out: HFDir
    """New folder; it appears when it is complete."""
    family: str | None = None
    """model_type, such as qwen3 or gemma2; by default the one of the model that the run started from, or the first that
    fits."""
    tokenizer_from: OptionalDir = None
    """Folder in Hugging Face format whose tokenizer files are copied; by default the hf/ of an imported run."""
    merged: Switch = False
    """Writes the whole model of a run that trained adapters, merged into the kernels."""
    adapters: OptionalDir = None
    """Folder of adapters in PEFT's format, to merge into the kernels in float32."""
    base: OptionalDir = None
    """Base model of a run that trained adapters, if it is no longer where the run found it."""
    dtype: Annotated[DType | None, tyro.conf.arg(metavar="{float32,bfloat16,float16}")] = None
    """Dtype of the tensors that are written: by default the one of an imported model's files, and for other runs the
    one of the parameters (model.precision.param)."""
    experts: Layout = "separate"
    """Tensors of a mixture of experts: one for each expert, as on the Hub, or one for all experts of a layer, as
    transformers 5 has in memory."""
    max_shard_size: str = "5GB"
    """Most bytes in a file; a tensor is never split."""
    allow_non_finite: Switch = False
    """Also writes weights that are not finite."""
    ignore_config: Keys = ()
    """Unknown attributes of config.json to ignore, as in an import. Repeatable."""
    mesh: MeshFlags = MeshFlags()


@contextmanager
def _progress(verb: str) -> Iterator[Progress]:
    with Display(f"{{done:,}} of {{total:,}} MB {verb}", stream=sys.stderr) as display:
        started = False

        def show(done: int, total: int) -> None:
            nonlocal started
            if not started:
                display.begin(0, total // 10**6)
                started = True
            display.move(done // 10**6, "")

        yield show


def import_run(command: Import) -> str:
    """Makes a run of an imported model, which appears when complete; returns a message."""
    target = command.run
    with atomic_folder(target) as partial:
        source = open_folder(command.source)
        precision = None if command.dtype is None else Precision(param=command.dtype)
        model_config = import_config(source, precision, {}, command.ignore_config)
        mesh = command.mesh.make()
        with jax.set_mesh(mesh), _progress("read") as progress:
            model = load_folder(source, model_config, mesh, progress)
        config = TrainConfig(run=RunConfig(dir=target), mesh=MeshConfig(**asdict(command.mesh)), model=model_config)
        _save(partial, config, model, mesh, {"from": str(source.path), "dtype": dtype_of(source)})
        copy_hf_files(source.path, partial)
        (partial / run_folder.CONFIG).write_text(to_yaml(config), encoding="utf-8")
    family = source.attributes["model_type"]
    return f"{source.path} ({family}) is in {target}, parameters in {model_config.precision.param}"


def _save(folder: Path, config: TrainConfig, model: Decoder, mesh: Mesh, imported: dict[str, str]) -> None:
    checkpoints = Checkpoints(folder / run_folder.CHECKPOINTS)
    info = run_folder.checkpoint_info(config, {IMPORTED: imported["from"]}, 0, mesh_sizes(mesh))
    state: nnx.State = nnx.State({"model": nnx.state(model)})
    checkpoints.save(0, state, mesh, {**info, IMPORTED: imported})
    checkpoints.close()


def export_run(command: Export) -> str:
    """Writes a checkpoint, or a model with adapters, as a folder in Hugging Face format; returns a message."""
    source = command.run
    if (source / CONFIG).is_file():
        return _export_folder(command, source)
    checkpoint = newest_checkpoint(source)
    info = read_info(checkpoint)
    config = run_model_config(checkpoint, info)
    adapted = config.lora.rank or command.adapters is not None
    if not adapted and (command.merged or command.base is not None):
        raise HFError(f"{checkpoint} has no adapters; leave {'--merged' if command.merged else '--base'} out")
    if config.lora.rank and command.adapters is not None:
        raise HFError(f"{checkpoint} has adapters of its own; export them with --merged, and add others to that")
    only_adapters = config.lora.rank > 0 and not command.merged
    if only_adapters and command.experts != "separate":
        raise HFError(f"--experts {command.experts} is of a whole model, and adapters are exported; add --merged")
    mesh, family, tokenizer, base = (
        command.mesh.make(),
        family_of_run(checkpoint),
        _tokenizer(checkpoint, info),
        command.base,
    )
    if only_adapters:
        model = load_adapters(checkpoint, config, mesh) if base is None else load_adapted(checkpoint, info, mesh, base)
        base = base or (info[BASE]["from"] if config.from_hf is not None else None)
        with _options(command, family, tokenizer) as options:
            save_peft(model, command.out, base=base, **options)
        return f"the adapters of {checkpoint} are in {command.out}"
    written = command.dtype or info.get(IMPORTED, {}).get("dtype") or config.precision.param
    merged = _in_dtype(replace(config, lora=LoraConfig()), written)
    if command.adapters is None:
        model = load_merged(checkpoint, info, merged, mesh, base)
    else:
        adapters = open_peft(command.adapters, config, family)
        model = merge_peft(load_merged(checkpoint, info, config, mesh), adapters, merged, mesh)
    with _options(command, family, tokenizer, written) as options:
        _save_model(command, model, _attributes(checkpoint, info), options)
    return f"{checkpoint} is in {command.out}"


def _export_folder(command: Export, source: Path) -> str:
    if command.adapters is None:
        raise HFError(f"{source} is in Hugging Face format already; --adapters DIR adds adapters to it")
    if command.base is not None:
        raise HFError(f"--base is of a run that trained adapters, and {source} is none")
    folder = open_folder(source)
    config = import_config(folder, None, {}, command.ignore_config)
    family = folder.attributes["model_type"]
    adapters = open_peft(command.adapters, config, family)
    written = command.dtype or dtype_of(folder)
    mesh = command.mesh.make()
    with jax.set_mesh(mesh), _progress("read") as progress:
        model = load_folder(folder, config, mesh, progress)
    merged = merge_peft(model, adapters, _in_dtype(config, written), mesh)
    with _options(command, family, source if has_tokenizer(source) else None, written) as options:
        _save_model(command, merged, carried_attributes(source), options)
    return f"{source} with {adapters.path} is in {command.out}"


@contextmanager
def _options(
    command: Export, family: str | None, tokenizer: Path | None, dtype: DType | None = None
) -> Iterator[SaveOptions]:
    with _progress("written") as progress:
        yield {
            "family": command.family or family,
            "tokenizer_from": command.tokenizer_from or tokenizer,
            "dtype": command.dtype or dtype,
            "allow_non_finite": command.allow_non_finite,
            "progress": progress,
        }


def _save_model(command: Export, model: Decoder, attributes: Mapping[str, Any], options: SaveOptions) -> None:
    layout, size = command.experts, command.max_shard_size
    save_hf(model, command.out, attributes=attributes, experts=layout, max_shard_size=size, **options)


def _in_dtype(config: ModelConfig, dtype: DType) -> ModelConfig:
    """Returns the configuration with the exported dtype, so that merging rounds only once."""
    return replace(config, precision=replace(config.precision, param=dtype))


def _attributes(checkpoint: Path, info: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json attributes that describe no computation; the trained length is the longest."""
    source, trained = hf_files_of(checkpoint), info["config"].get("data", {}).get("sequence_length")
    if source is None:
        return {LONGEST: trained}
    attributes = carried_attributes(source)
    longest = attributes.get(LONGEST)
    return attributes | {LONGEST: trained} if trained and type(longest) is int and longest < trained else attributes


def _tokenizer(checkpoint: Path, info: dict[str, Any]) -> Path | None:
    data = info["config"].get("data", {}).get("path")
    folders = (hf_files_of(checkpoint), None if data is None else expand(Path(data)))
    return next((folder for folder in folders if folder is not None and has_tokenizer(folder)), None)
