"""Signatures of Flax's stock modules: a letter for each dim, as in an einsum.

`nnx.Linear` is `...i, io -> ...o`. Column layers split a letter of the result, without a reduction.
Row layers split another letter, and sum over it. Modules without a signature run on global arrays
(`run_styles.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flax import nnx

from jaxtp.mesh import STORAGE, TP, axes_of
from jaxtp.plans.layouts import declared_spec, declared_specs
from jaxtp.plans.module_wrappers import original_class


@dataclass(frozen=True)
class Signature:
    """Letters of the dims of a module's parameters, input and result."""

    params: Mapping[str, str]  # letters of each parameter's dims, without stacked dims
    inputs: Mapping[str, int]  # dim of each letter in the first argument
    outputs: Mapping[str, int]  # dim of each letter in the result
    column: str | None = None  # the letter that `Colwise` splits; None if the style does not fit
    row: str | None = None  # the letter that `Rowwise` splits; None if the style does not fit
    # Letters of the sizes in each attribute
    attributes: Mapping[str, str] = field(default_factory=dict)

    more_dims: int = 0  # dims of the result minus dims of the input
    # Dim 0 of an input of at least this many dims is a batch; None: the module mixes rows
    batch_ndim: int | None = 2
    mixes_positions: bool = False  # a result depends on several positions along dim 1 of the input

    def keeps_positions(self, ndim: int) -> bool:
        """Returns whether dim 1 stays dim 1 in the result, with independent positions."""
        input_dims = (dim % ndim for dim in self.inputs.values())
        output_dims = (dim % (ndim + self.more_dims) for dim in self.outputs.values())
        return not self.mixes_positions and 1 not in (*input_dims, *output_dims)

    def sizes(self, module: nnx.Module) -> dict[str, int]:
        """Returns the global size of each letter that has an attribute."""
        sizes: dict[str, int] = {}
        for name, letters in self.attributes.items():
            value = getattr(module, name)
            values = (value,) if isinstance(value, int) else value
            sizes |= dict(zip(letters, values, strict=True))
        return sizes


def signature(module: nnx.Module) -> Signature | None:
    """Returns the signature of a stock module, or of a subclass with its `__call__`; else None.

    If the module declares specs, a style fits only if it splits the same letter over tp.
    """
    cls = original_class(module)
    for kind, read in _READERS.items():
        if issubclass(cls, kind) and cls.__call__ is kind.__call__:
            dims = read(module)
            return dims and _as_declared(module, dims)
    return None


def _as_declared(module: nnx.Module, dims: Signature) -> Signature:
    # A letter fits if the model splits only this letter over tp, and other letters only over the
    # axes of the storage.
    fitting = {dims.column, dims.row}
    for name, parameter in parameters_of(module, dims).items():
        letters = dims.params[name]
        for letter, entry in zip(letters, declared_spec(parameter, len(letters)), strict=True):
            axes = axes_of(entry)
            if axes and axes != (TP,):
                fitting.discard(letter)
            if not set(axes) <= set(STORAGE):
                fitting &= {letter}
    column = dims.column if dims.column in fitting else None
    row = dims.row if dims.row in fitting else None
    return replace(dims, column=column, row=row)


def parameters_of(module: nnx.Module, dims: Signature) -> dict[str, nnx.Param[Any]]:
    """Returns the parameters that a stock module has."""
    parameters = {}
    for name in dims.params:
        if getattr(module, name) is not None:
            parameters[name] = getattr(module, name)
    return parameters


def supported_modules(style: str) -> str:
    """Returns the modules that a style fits, for messages."""
    if style == "SequenceParallel":
        return "nnx.LayerNorm, nnx.RMSNorm and modules without parameters"
    return "nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.Embed"


def why_not_split(module: nnx.Module) -> str:
    """Returns why tp cannot split a usually supported module; empty for other types."""
    cls = original_class(module)
    kind = next((kind for kind in _READERS if issubclass(cls, kind)), None)
    if issubclass(cls, nnx.bridge.ToNNX):
        return (
            "it wraps a linen module, whose layers have no paths here; tp splits the layers of "
            "Flax NNX"
        )
    if kind is None:
        return ""
    if cls.__call__ is not kind.__call__:
        return f"it is an nnx.{kind.__name__} with its own __call__, which jaxtp cannot split"
    if isinstance(module, nnx.Conv) and module.feature_group_count != 1:
        return (
            f"it is grouped (feature_group_count={module.feature_group_count}), and tp would "
            "split its groups"
        )
    if isinstance(module, nnx.Conv) and module.mask is not None:
        return "its kernel is masked, and tp would not split the mask"
    if isinstance(module, nnx.LinearGeneral) and module.batch_axis:
        return (
            f"it has a kernel for each index of a batch dim (batch_axis={dict(module.batch_axis)})"
        )
    declared = ", ".join(f"{name} as {spec}" for name, spec in declared_specs(module).items())
    if declared:
        return f"it declares {declared}, and this style splits another dim"
    if isinstance(module, nnx.Einsum):
        return f"its equation, {module.einsum_str!r}, has no kernel dim that this style could split"
    return ""


def _linear(module: nnx.Linear) -> Signature:
    attributes = {"in_features": "i", "out_features": "o"}
    return Signature({"kernel": "io", "bias": "o"}, {"i": -1}, {"o": -1}, "o", "i", attributes)


def _linear_general(module: nnx.LinearGeneral) -> Signature | None:
    if module.batch_axis:
        return None
    ins = "abcdefgh"[: len(module.in_features)]
    outs = "ijklmnop"[: len(module.out_features)]
    return Signature(
        {"kernel": ins + outs, "bias": outs},
        dict(zip(ins, module.axis, strict=True)),
        {letter: i - len(outs) for i, letter in enumerate(outs)},
        outs[0],
        ins[0],
        {"in_features": ins, "out_features": outs},
        len(outs) - len(ins),
        batch_ndim=len(ins) + 1 if 0 not in module.axis else None,
    )


def _einsum(module: nnx.Einsum) -> Signature | None:
    operands, result = module.einsum_str.replace(" ", "").split("->")
    data, kernel = operands.split(",")
    if "." in kernel or len(set(kernel)) != len(kernel):
        return None
    ins = [letter for letter in kernel if letter in data and letter not in result]
    outs = [letter for letter in kernel if letter in result and letter not in data]
    bias = ""
    if module.bias is not None:
        bias = "".join(letter for letter in result if letter in kernel)
        if len(module.bias_shape or bias) != len(bias):
            return None
    keeps_rows = data[0] == result[0] and data[0] not in kernel
    return Signature(
        {"kernel": kernel, "bias": bias},
        _positions(data, kernel),
        _positions(result, kernel),
        next(iter(outs), None),
        next(iter(ins), None),
        {"kernel_shape": kernel},
        len(result.replace("...", "")) - len(data.replace("...", "")),
        batch_ndim=2 if keeps_rows else None,
        mixes_positions=data[1:2] != result[1:2],
    )


def _positions(operand: str, letters: str) -> dict[str, int]:
    positions = {}
    for dim, letter in enumerate(operand):
        if letter in letters:
            # Dims before an ellipsis count from the front, others from the end.
            positions[letter] = dim if "..." in operand[dim:] else dim - len(operand)
    return positions


def _conv(module: nnx.Conv) -> Signature:
    space = "stuvwxyz"[: len(module.kernel_size)]
    dims = Signature(
        {"kernel": f"{space}io", "bias": "o"},
        {"i": -1},
        {"o": -1},
        batch_ndim=len(space) + 2,
        mixes_positions=True,
    )
    if module.feature_group_count != 1:
        return dims
    attributes = {"in_features": "i", "out_features": "o", "kernel_shape": f"{space}io"}
    dims = replace(dims, attributes=attributes)
    if module.mask is not None:
        return dims
    return replace(dims, column="o", row="i")


_EMBED_SIZES = {"num_embeddings": "v", "features": "d"}
ATTEND = Signature({"embedding": "vd"}, {"d": -1}, {"v": -1}, attributes=_EMBED_SIZES)
"""The signature of `nnx.Embed.attend`, `...d, vd -> ...v`."""


def _norm(module: nnx.LayerNorm | nnx.RMSNorm) -> Signature | None:
    last = -1, (-1,)
    if module.reduction_axes not in last or module.feature_axes not in last or module.axis_name:
        return None
    # The class nnx.RMSNorm has no bias.
    params = {name: "d" for name in ("scale", "bias") if hasattr(module, name)}
    return Signature(params, {"d": -1}, {"d": -1}, attributes={"num_features": "d"})


_READERS: dict[type[nnx.Module], Callable[..., Signature | None]] = {
    nnx.Linear: _linear,
    nnx.LinearGeneral: _linear_general,
    nnx.Einsum: _einsum,
    nnx.Conv: _conv,
    nnx.Embed: lambda _: Signature({"embedding": "vd"}, {}, {"d": -1}, "d", "v", _EMBED_SIZES, 1),
    nnx.LayerNorm: _norm,
    nnx.RMSNorm: _norm,
}
