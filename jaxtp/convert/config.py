"""The command line of `jaxtp convert`."""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import tyro
from jax.sharding import Mesh

from jaxtp.config import Keys, Switch, UserPath
from jaxtp.layers.parameter import DType
from jaxtp.mesh import mesh_of, sized
from jaxtp.models.families.family import Layout

Source = Annotated[UserPath, tyro.conf.Positional, tyro.conf.arg(metavar="HF_DIR")]
Run = Annotated[UserPath, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]


@dataclass(frozen=True, kw_only=True)
class MeshFlags:
    """Devices that hold the model meanwhile; without GPUs they are virtual, and all in this machine's memory."""

    fsdp: int = 1
    """Shards of each parameter."""

    tp: int = 1
    """Shards of each matrix product."""

    def make(self) -> Mesh:
        """Returns the mesh.

        Raises:
          MeshError: there are not so many devices.
        """
        return mesh_of(sized(**asdict(self)))


IMPORT = """Reads a folder in Hugging Face format into a new run of ours: config.yaml and a checkpoint at step 0.

jaxtp convert import models/Llama-3.2-1B runs/llama

Train from it by
jaxtp train --config runs/llama/config.yaml --run.init-from runs/llama --run.dir runs/tuned
"""
EXPORT = """Writes a run's checkpoint as a folder in Hugging Face format, or its adapters as PEFT has them.

jaxtp convert export runs/tuned models/tuned --tokenizer-from models/Llama-3.2-1B

With --adapters, writes a model and such adapters as one model, without adapters:

jaxtp convert export models/Llama-3.2-1B models/merged --adapters models/adapters
"""
PLAN = """Shows how transformers splits each module of a model over tp (base_model_tp_plan), beside how we do.

jaxtp convert plan models/Llama-3.2-1B
"""


@dataclass(frozen=True, kw_only=True)
class Import:
    """Command line of `jaxtp convert import`."""

    source: Source
    """config.json and safetensors, in one file or several with an index."""

    run: Run
    """Folder to make. The tokenizer's files go to its hf/, where export finds them."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the parameters in the run; by default the one that the safetensors have (float16 becomes float32)."""

    ignore_config: Keys = ()
    """Attributes of config.json to pass over: such as are not understood, and that you know to say nothing of what the
    model computes. Can be given several times."""

    mesh: MeshFlags = MeshFlags()


@dataclass(frozen=True, kw_only=True)
class Export:
    """Command line of `jaxtp convert export`."""

    run: Run
    """Folder of a run (its newest checkpoint), or of one checkpoint; with --adapters also a model in Hugging Face
    format."""

    out: Source
    """Folder to make; it appears when it is complete."""

    family: str | None = None
    """model_type, such as qwen3 or gemma2; by default that of the model it began with, or the first that fits."""

    tokenizer_from: Annotated[UserPath | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder in Hugging Face format whose tokenizer files are copied; by default the hf/ of an imported run."""

    merged: Switch = False
    """Writes the whole model of a run that trained adapters, which are added to the kernels that they are beside."""

    adapters: Annotated[UserPath | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of adapters in PEFT's format, to add to the kernels that they are beside, in float32."""

    base: Annotated[UserPath | None, tyro.conf.arg(metavar="DIR")] = None
    """Model beside the adapters of a run that trained some, where it is not where the run found it."""

    dtype: Annotated[DType | None, tyro.conf.arg(metavar="{float32,bfloat16,float16}")] = None
    """Dtype of the tensors in the files that are written: by default the one that an imported model came in, and of any
    other run that of its parameters (model.precision.param)."""

    experts: Layout = "separate"
    """Tensors of a mixture of experts: one for each expert, as checkpoints on the Hub have, or one in which those of a
    layer are stacked, as transformers 5 has in memory."""

    max_shard_size: str = "5GB"
    """Bytes in a file at most; a tensor is never split."""

    ignore_config: Keys = ()
    """Attributes of a config.json to pass over, as in an import. Can be given several times."""

    mesh: MeshFlags = MeshFlags()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Command line of `jaxtp convert plan`."""

    source: Source
    """A folder with a config.json; the weights are not read. A plan in it is taken before transformers' own."""

    ignore_config: Keys = ()
    """Attributes of config.json to pass over: such as are not understood, and that you know to say nothing of what the
    model computes. Can be given several times."""
