"""A configuration small enough for virtual CPU devices that keeps what can go wrong on a mesh.

Kept: the kinds of layers, biases and norms, the numbers of heads, what divides what (vocabulary, sequence, chunks of
the loss), remat, precision, dropout, accumulation, the optimizer. Shrunk: widths, layers, sequence, batch.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtp.mesh import AXES, DP, FSDP, TP
from jaxtp.models.config import ModelConfig, violations
from jaxtp.train.config import TrainConfig

MAX_DEVICES = 16
COMMON_TP = 8
MIN_D_MODEL, MIN_D_FF, MIN_VOCAB, MIN_SEQUENCE, MIN_ROWS, MAX_LAYERS = 64, 48, 96, 24, 4, 2
ROPE_THETA = 2.0
"""All dims turn: in one that hardly does, a key bias has no gradient but rounding noise."""

UPDATES = 3


@dataclass(frozen=True)
class Case:
    """A mesh, and whether activations between the blocks are split over tp along the sequence."""

    mesh: tuple[int, int, int]
    sequence_parallel: bool

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis."""
        return dict(zip(AXES, self.mesh, strict=True))

    def __str__(self) -> str:
        """Such as `fsdp 2 x tp 4, sequence-parallel`."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one device"
        return f"{mesh}, sequence-parallel" if self.sequence_parallel else mesh


ONE_DEVICE = Case((1, 1, 1), False)


def default_cases(config: TrainConfig, mesh: Mapping[str, int]) -> list[Case]:
    """The configuration's own mesh, scaled down to 16 devices, and others that use each axis alone and together."""
    own = _own_mesh(mesh)
    tps = [tp for tp in range(2, MAX_DEVICES + 1) if cases_of(config, (1, 1, tp))] or [1]
    few = [tp for tp in tps if tp <= COMMON_TP] or tps[:1]
    least, most = few[0], few[-1]
    tp = own[2] if own[2] > 1 else most
    half = tp // 2 if tp // 2 in tps else tp
    middle = max(tp for tp in few if tp <= max(COMMON_TP // 2, least))
    meshes = [own, (1, 1, tp), (1, 1, half), (1, 2, half), (2, 2, least), (2, 1, middle), (1, 1, most)]
    meshes = [sizes for sizes in (*meshes, (1, 8, 1), (8, 1, 1)) if math.prod(sizes) <= MAX_DEVICES]
    cases = [case for sizes in meshes for case in cases_of(config, sizes)[:1]]
    cases[1:1] = cases_of(config, own)[1:] or cases_of(config, (1, 1, tp))[1:]
    return [case for case in dict.fromkeys(cases) if case != ONE_DEVICE]


def cases_of(config: TrainConfig, mesh: tuple[int, int, int]) -> list[Case]:
    """The cases on one mesh, the configuration's own kind first; none if the model cannot run on it."""
    sizes = dict(zip(AXES, mesh, strict=True))
    if list(violations(config.model, sizes)):
        return []
    can_split = mesh[2] > 1 and config.data.sequence_length % mesh[2] == 0
    preferred = can_split and config.model.sequence_parallel is not False
    return [Case(mesh, preferred)] + ([Case(mesh, not preferred)] if can_split else [])


def shrink(config: TrainConfig, cases: list[Case]) -> TrainConfig:
    """The same architecture and parallel structure, small, for all the cases.

    Args:
      config: the run, which fits each case's mesh.
      cases: what it will be run on.
    """
    tps = math.lcm(*(case.mesh[2] for case in cases))
    accumulation = min(config.train.accumulation, 2)
    rows = _like(0, math.lcm(*(case.mesh[0] * case.mesh[1] for case in cases)) * accumulation, MIN_ROWS)
    sequence = _like(config.data.sequence_length, tps, MIN_SEQUENCE)
    chunk = max(1, config.model.loss_chunk * sequence // config.data.sequence_length)
    model = dataclasses.replace(
        config.model,
        vocab_size=_like(config.model.vocab_size, tps, MIN_VOCAB),
        d_model=_like(0, math.lcm(*(case.mesh[1] for case in cases)), MIN_D_MODEL),
        num_layers=min(config.model.num_layers, MAX_LAYERS),
        head_dim=_head_dim(config.model, cases),
        d_ff=_like(0, tps, MIN_D_FF),
        rope_theta=ROPE_THETA,
        attention="xla",  # cudnn needs a GPU
        loss_chunk=chunk,
        **_reach(config.model, sequence, config.data.sequence_length),
    )
    return dataclasses.replace(
        config,
        model=model,
        data=dataclasses.replace(config.data, sequence_length=sequence, global_batch_size=rows),
        # A rate at which three updates move the weights enough to be compared.
        optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-2, warmup_steps=1),
        train=dataclasses.replace(config.train, accumulation=accumulation, steps=10),
    )


def describe(config: TrainConfig, small: TrainConfig) -> Iterator[str]:
    """What was shrunk: `model.d_model 4096 -> 64`."""
    for section in ("model", "data", "train"):
        before, after = getattr(config, section), getattr(small, section)
        for field in dataclasses.fields(before):
            old, new = getattr(before, field.name), getattr(after, field.name)
            if old != new and field.name != "steps":
                yield f"{section}.{field.name} {old} -> {new}"


def _reach(model: ModelConfig, sequence: int, before: int) -> dict[str, Any]:
    """What counts in positions, by as much as the sequence was shrunk."""
    scaling, window = model.rope_scaling, model.sliding_window
    shorter = max(1, scaling.original_length * sequence // before)
    return {
        "rope_scaling": scaling if scaling.kind == "none" else dataclasses.replace(scaling, original_length=shorter),
        "sliding_window": window and max(1, window * sequence // before),
    }


def _own_mesh(mesh: Mapping[str, int]) -> tuple[int, int, int]:
    """tp as it is, up to 16; fsdp and dp at most 2 each, as many as 16 devices allow."""
    tp = mesh[TP]
    while tp > MAX_DEVICES:
        tp = next((tp // prime for prime in (2, 3, 5, 7) if tp % prime == 0), 1)
    fsdp = 2 if mesh[FSDP] > 1 and 2 * tp <= MAX_DEVICES else 1
    dp = 2 if mesh[DP] > 1 and 2 * fsdp * tp <= MAX_DEVICES else 1
    return dp, fsdp, tp


def _like(value: int, modulus: int, least: int) -> int:
    """The smallest number from `least` on with the same remainder as `value`."""
    return least + (value - least) % modulus


def _head_dim(model: ModelConfig, cases: list[Case]) -> int:
    """The smallest power of two from 8 on, up to the model's own head dim, that every case can split."""
    for head_dim in (8, 16, 32, 64):
        smaller = dataclasses.replace(model, head_dim=head_dim)
        if head_dim < model.head_dim and not any(list(violations(smaller, case.sizes)) for case in cases):
            return head_dim
    return model.head_dim
