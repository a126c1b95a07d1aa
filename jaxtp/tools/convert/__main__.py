"""`jaxtp convert`: imports, exports, and compares the tp plans of models in Hugging Face format."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from jaxtp.checkpoint import silence_orbax
from jaxtp.checkpoint.logical import named_variables
from jaxtp.config import entry
from jaxtp.config.command_line import Command, choose
from jaxtp.config.schema import Keys
from jaxtp.hf.config_json import family_of, model_config
from jaxtp.hf.families.family import LAYER, Family, Tensor
from jaxtp.hf.model_folder import CONFIG, HFError, read_attributes
from jaxtp.hf.tensor_map import HEAD, TABLE, split_path
from jaxtp.layers.parameter import spec_of
from jaxtp.mesh import TP, axes_of
from jaxtp.models.decoder import abstract_decoder
from jaxtp.tools.convert.transfer import Export, HFDir, Import, export_run, import_run

PROGRAM = "jaxtp convert"
IMPORT_HELP = """Reads a folder in Hugging Face format into a new run: config.yaml and a checkpoint at step 0.

jaxtp convert import models/Llama-3.2-1B runs/llama

Train from it by
jaxtp train --config runs/llama/config.yaml --run.init-from runs/llama --run.dir runs/tuned
"""
EXPORT_HELP = """Writes a run's checkpoint as a folder in Hugging Face format, or its adapters in PEFT's format.

jaxtp convert export runs/tuned models/tuned --tokenizer-from models/Llama-3.2-1B

With --adapters, merges adapters into a model:

jaxtp convert export models/Llama-3.2-1B models/merged --adapters models/adapters
"""
PLAN_HELP = """Compares how transformers splits each module of a model over tp (base_model_tp_plan) with how jaxtp does.

jaxtp convert plan models/Llama-3.2-1B
"""
PLAN = "base_model_tp_plan"
_SAME = {
    "colwise": {"colwise", "colwise_rep", "colwise_gather_output", "local_colwise", "packed_colwise"},
    "rowwise": {"rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise", "packed_rowwise"},
    "embedding_rowwise": {"embedding_rowwise", "rowwise", "rowwise_rep"},
    "grouped_gemm": {"grouped_gemm"},
    "replicated": {"replicated", "replicated_with_grad_allreduce", "sequence_parallel", "local"},
}
"""Styles of transformers equivalent to ours up to gathering the output."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Flags of `jaxtp convert plan`."""

    source: HFDir
    """Folder with a config.json; weights are not read. A plan in it takes precedence over the one of transformers."""

    ignore_config: Keys = ()
    """Unknown attributes of config.json to ignore, because they do not affect what the model computes. Repeatable."""


COMMANDS: dict[str, Command[Any]] = {
    "import": Command(program=f"{PROGRAM} import", schema=Import, description=IMPORT_HELP),
    "export": Command(program=f"{PROGRAM} export", schema=Export, description=EXPORT_HELP),
    "plan": Command(program=f"{PROGRAM} plan", schema=Plan, description=PLAN_HELP),
}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, 2 for a user's mistake, 3 for weights that are not finite, 130 for Ctrl-C."""
    silence_orbax()
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"orbax|flax")
    return entry.attempt(PROGRAM, lambda: _run(argv))


def _run(argv: Sequence[str]) -> None:
    chosen, flags = choose(PROGRAM, COMMANDS, argv)
    command, _ = chosen.load(flags)
    if isinstance(command, Import):
        print(import_run(command))
    elif isinstance(command, Export):
        print(export_run(command))
    else:
        print("\n".join(plan_lines(command.source, command.ignore_config)))


def plan_lines(path: Path, ignore_config: Collection[str] = ()) -> Iterator[str]:
    """Yields a table with a line per module; raises `HFError` as `read_config`, or for an invalid plan."""
    attributes = read_attributes(path)
    source = str(path / CONFIG)
    config, family = model_config(attributes, source, ignore_config), family_of(attributes, source)
    theirs, origin = attributes.get(PLAN), f"{PLAN} of {source}"
    if theirs is None:
        theirs, origin = family.tp_plan, "the plan that transformers has for it"
    if not isinstance(theirs, Mapping) or not all(isinstance(style, str) for style in theirs.values()):
        raise HFError(f"{source}: {PLAN} should give a style for each module")
    ours = _our_plan(abstract_decoder(config)[1], family)
    yield f"{family.model_type}, {origin}"
    yield ""
    yield f"{'module':<36}{'transformers':<32}{'ours':<20}"
    for module in dict.fromkeys((*ours, *theirs)):
        yield f"{module:<36}{theirs.get(module, '-'):<32}{ours.get(module, '-'):<20}{_verdict(module, theirs, ours)}"


def _our_plan(parameters: nnx.State, family: Family) -> dict[str, str]:
    """Returns jaxtp's style of each module, in PyTorch's names, from its parameters' specs."""
    tensors = {tensor.ours: tensor for tensor in family.tensors if tensor.layout != "separate"}
    plan: dict[str, str] = {}
    for path, variable in named_variables(parameters).items():
        tensor = tensors[split_path(path)[1]]
        if not tensor.theirs.endswith(".bias"):
            module = tensor.theirs.removeprefix(family.prefix).removesuffix(".weight")
            plan[module.replace(LAYER, "*")] = _style(tensor, spec_of(variable))
    return plan


def _style(tensor: Tensor, declared: PartitionSpec) -> str:
    dims = list(declared)[1:] if LAYER in tensor.theirs else list(declared)
    split = [dim for dim, axes in enumerate(dims) if TP in axes_of(axes)]
    if not split:
        return "replicated"
    if tensor.ours == TABLE:
        return "embedding_rowwise"
    if tensor.layout is not None and split == [0]:
        return "grouped_gemm"
    outputs = 0 if tensor.ours == HEAD else len(dims) - 1
    return "colwise" if split == [outputs] else "rowwise"


def _verdict(module: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    if module not in theirs:  # transformers replicates modules that its plan lacks
        return "" if ours[module] == "replicated" else "split by us alone"
    if module not in ours:
        return "no such module in this model"
    return "same" if theirs[module] in _SAME[ours[module]] else "differs"


if __name__ == "__main__":
    entry.run(PROGRAM, main)
