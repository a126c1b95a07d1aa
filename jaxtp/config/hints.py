"""Suggests settings for unknown names, and values for sizes that do not fit; makes dotted paths.

A suggested value changes one setting, fixes all problems of this setting, and causes no new ones.
"""

import contextlib
import difflib
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

from jaxtp.config.entry import UserError

T = TypeVar("T")

MAX_SUGGESTED = 1024
_MAX_DIVISOR = 2**20  # at least the devices of a mesh, and the rows of a device
OTHER_NAMES = {
    "optimizer.learning_rate": "lr max_lr peak_lr base_lr",
    "optimizer.schedule": "scheduler lr_scheduler lr_scheduler_type",
    "optimizer.warmup_steps": "warmup warmup_iters num_warmup_steps",
    "optimizer.weight_decay": "wd",
    "optimizer.clip_norm": "max_grad_norm grad_clip clip_grad gradient_clip_val",
    "optimizer.name": "optim",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "train.epochs": "num_epochs num_train_epochs max_epochs",
    "train.steps": "max_steps num_steps total_steps max_iters",
    "train.accumulation": "gradient_accumulation_steps grad_accum accumulation_steps "
    "accumulate_grad_batches",
    "data.global_batch_size": "batch_size train_batch_size",
    "data.sequence_length": "seq_len seq_length max_seq_len max_seq_length max_length "
    "block_size context_length",
    "data.path": "dataset dataset_name dataset_path data_dir train_file",
    "data.packing": "sample_packing pack_sequences",
    "model.from_hf": "model_name_or_path model_name base_model pretrained",
    "model.lora.rank": "lora_r lora_rank r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.rslora": "use_rslora",
    "model.lora.targets": "target_modules lora_target_modules lora_target",
    "model.attention": "attn_implementation use_flash_attention_2 use_flash_attn flash_attn",
    "model.precision.compute": "precision dtype mixed_precision torch_dtype bf16 fp16",
    "model.remat": "gradient_checkpointing activation_checkpointing recompute",
    "model.d_model": "hidden_size n_embd",
    "model.num_layers": "n_layer n_layers num_hidden_layers",
    "mesh.tp": "tp_size tensor_parallel_size tensor_model_parallel_size",
    "run.dir": "output_dir save_dir resume resume_from_checkpoint",
    "checkpoint.every": "save_steps save_interval save_every",
    "checkpoint.keep": "save_total_limit",
    "eval.every": "eval_steps eval_interval eval_strategy evaluation_strategy",
    "train.log_every": "logging_steps log_interval logging_interval",
    "metrics.trackers": "report_to",
    "metrics.project": "wandb_project",
    "out": "output_dir save_dir",
    "model": "model_name_or_path hf_model",
    "sequence_length": "max_length max_seq_len",
    "max_tokens": "max_new_tokens max_gen_len",
    "processes": "nproc_per_node num_processes",
}
"""Names that other programs use for these settings; errors suggest jaxtp's names."""

_BRANCHES = "{} drops out of the result of each branch"
_LOSS = (
    "a loss has settings of its own, such as --train.loss jaxtp.losses:DPO (or SimPO) "
    "--train.loss-arguments.beta 0.1"
)
INSTEAD: tuple[tuple[str, str, str], ...] = (
    ("lora.from", "model.lora.from_peft", "since jaxtp 0.3 it is {}"),
    (
        "matmul_layers",
        "model.precision.matmul_least",
        "since jaxtp 0.3 products apply to all layers from {} features on",
    ),
    ("lora_dropout lora.dropout", "model.dropout", f"adapters have no dropout; {_BRANCHES}"),
    (
        "attention_dropout attn_pdrop attn_dropout",
        "model.dropout",
        f"attention weights have no dropout; {_BRANCHES}",
    ),
    ("resid_pdrop hidden_dropout hidden_dropout_prob", "model.dropout", _BRANCHES),
    (
        "load_in_4bit load_in_8bit quantization_config bnb_4bit_quant_type use_4bit",
        "model.lora.base",
        "{} float8 keeps the frozen kernels of adapters in 8 bits, and mxfp4 in 4",
    ),
    (
        "use_dora lora.bias lora_bias",
        "model.lora.targets",
        "adapters are plain LoRA; {} chooses the layers",
    ),
    (
        "modules_to_save",
        "model.lora.tables",
        "{} trains the embedding and the head beside adapters",
    ),
    (
        "train_on_inputs train_on_prompt assistant_only_loss completion_only_loss",
        "data.path",
        "only answers are learned; jaxtp prepare makes {}, and its --show prints what is learned",
    ),
    (
        "warmup_ratio warmup_fraction",
        "optimizer.warmup_steps",
        "{} is a number of updates, not a share",
    ),
    (
        "min_lr min_lr_ratio end_lr",
        "optimizer.final_fraction",
        "{} is the last learning rate as a share of the highest",
    ),
    (
        "per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size "
        "micro_batch_size train_micro_batch_size_per_gpu",
        "data.global_batch_size",
        "{} is the number of sequences in a step, on all devices and in all micro-batches",
    ),
    (
        "per_device_eval_batch_size eval_batch_size",
        "data.global_batch_size",
        "evaluations read as many sequences at a time as a step, {}",
    ),
    (
        "fsdp_size deepspeed zero_stage fsdp_config sharding_strategy data_parallel_size",
        "mesh.fsdp",
        "{} divides weights, gradients and optimizer over devices, as ZeRO 3 does",
    ),
    (
        "dataset_text_field text_field text_column dataset_config_name dataset_split",
        "data.path",
        "jaxtp prepare reads the texts, with --field, and {} names the dataset that it makes",
    ),
    (
        "push_to_hub hub_model_id",
        "run.dir",
        "jaxtp convert export writes a folder for the hub from the run in {}",
    ),
    ("dpo_beta simpo_gamma loss_type", "train.loss", _LOSS),
    (
        "preflight_bandwidth",
        "mesh.dp",
        "python scripts/bench.py measures each axis of a mesh; {} is the axis between hosts",
    ),
    # Of two rows for one name, that whose setting the command has is shown.
    ("plot", "tier", "python scripts/plot_estimate.py FILE draws what --json FILE has"),
    ("plot", "run.dir", "jaxtp report RUN draws the curves of the run in {}"),
    (
        "cache",
        "tasks",
        "answers are not stored; name one task by {} in each command, and an interruption loses "
        "only that",
    ),
    (
        "by",
        "stride",
        "there are no groups: give one command for each source, or for each file of texts of one "
        "length, and compare their --json files (jaxtp/guides/evaluate_and_generate.md)",
    ),
    (
        "train_bpe bpe_sample",
        "tokenizer",
        "python scripts/train_bpe.py INPUT --size 8192 --out FOLDER trains one on the same inputs; "
        "give that folder by {}",
    ),
    (
        "input propose",
        "tier",
        "a model of your own has the settings of a run: --model.build, --train.loss and "
        "--data.batches; without --model.plan, a plan is proposed",
    ),
    (
        "plan input propose",
        "compile",
        "a model has the settings of a run: --model.build, --model.plan, --train.loss and "
        "--data.batches; without a plan, one is proposed",
    ),
    (
        "max_window_bytes",
        "max_document_bytes",
        "files of every window are unpacked, in up to 2 GiB; {} limits what is read of them",
    ),
    (
        "generate",
        "tier",
        "weights take 2 x parameters / tp bytes of each device, and a token in the cache of "
        "attention takes 4 x layers x kv heads x head_dim / tp (jaxtp/generate/README.md)",
    ),
    (
        "repetition_penalty presence_penalty frequency_penalty",
        "temperature",
        "tokens that are in the text are not made less likely; {} avoids repetitions",
    ),
)
"""Names of other programs, and of settings that jaxtp had, for which it has another concept: its
setting, and a sentence in which {} is the name of this setting."""


REMOVED_COMMANDS = {
    "jaxtp bench": "python scripts/bench.py, in jaxtp's repository",
    "jaxtp completion": "python scripts/completion.py, in jaxtp's repository",
    "jaxtp convert plan": "jaxtp explain --model.from-hf HF_DIR --mesh tp=8, for jaxtp's plan",
}
"""Replacements of removed commands."""


def hint_for(name: str, names: Sequence[str], spell: Callable[[str], str]) -> str | None:
    """Returns a hint for an unknown setting: the similar setting, or a sentence of `INSTEAD`.

    Args:
      names: dotted names of settings.
      spell: writes a name as the source of the settings does.
    """
    words = name.lower().split(".")
    endings = {words[-1], dotted(words[-2:])}
    for foreign_names, setting, sentence in INSTEAD:
        if setting in names and endings.intersection(foreign_names.split()):
            return sentence.format(spell(setting))
    close = nearest_name(name, names)
    if close is None:
        return None
    return f"did you mean {spell(close)}?"


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """Returns the setting that a name probably means.

    Either another program has this name for the setting, or the keys are equal or similar.
    """
    key = _short(name).lower()
    for setting, foreign_names in OTHER_NAMES.items():
        if setting in names and key in foreign_names.split():
            return setting
    same = [other for other in names if _short(other) == key]
    # Compares only the keys, because a long section that is right would make any key look similar.
    similar = same or [other for other in names if _is_misspelt(key, _short(other))]
    return closest(name, similar, cutoff=0 if same else 0.6)


def closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the most similar of `names`, or None if none is similar."""
    return next(iter(difflib.get_close_matches(name, names, 1, cutoff)), None)


def _is_misspelt(word: str, correct: str) -> bool:
    cutoff = 0.5 if len(correct) <= _FEW_LETTERS else 0.7
    return difflib.SequenceMatcher(None, word, correct).ratio() >= cutoff


_FEW_LETTERS = 3  # with one wrong letter, a word of two or three letters is still half similar


@dataclass(frozen=True)
class Problem:
    """Sizes that do not fit each other."""

    text: str  # the message, with names and values
    # Settings that must divide a number: `{"mesh.tp": 9}`
    among: Mapping[str, int] = field(default_factory=dict)
    multiples: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Settings that must be a multiple, and the nearest multiples: `{"model.d_ff": (96, 104)}`."""


Problems = Callable[[Mapping[str, int]], Iterable[Problem]]
"""Returns the problems after changes of settings: `problems({"mesh.tp": 3})`."""


def explained(problems: Problems, *, fixed: bool) -> Iterator[str]:
    """Yields the message of each problem, with values that would work.

    Args:
      problems: returns the problems after changes of settings.
      fixed: the model cannot be changed.
    """
    current = list(problems({}))

    def working(setting: str, values: Iterable[int]) -> list[str]:
        if fixed and setting.startswith("model."):
            return []
        # Problems that a change of this setting need not solve
        unrelated = _texts(p for p in current if setting not in {*p.among, *p.multiples})
        suitable = []
        for value in values:
            # A value outside of the setting's range raises an error.
            with contextlib.suppress(UserError):
                if _texts(problems({setting: value})) <= unrelated:
                    suitable.append(str(value))
        return suitable

    for problem in current:
        hints = []
        for setting, number in problem.among.items():
            if values := working(setting, divisors(number, MAX_SUGGESTED)):
                hints.append(f"{_short(setting)} can be {', '.join(values)}")
        for setting, multiples in problem.multiples.items():
            if values := working(setting, multiples):
                hints.append(f"{_short(setting)} {' or '.join(values)}")
        yield f"{problem.text}; {', or '.join(hints)}" if hints else problem.text


def _texts(problems: Iterable[Problem]) -> set[str]:
    return {problem.text for problem in problems}


def not_divisible(name: str, value: int, factors: Mapping[str, int]) -> Iterator[Problem]:
    """Yields a problem if the product of `factors`, settings by name, does not divide a setting."""
    divisor = math.prod(factors.values())
    if value % divisor:
        sizes = tuple(
            multiple for multiple in nearest_multiples(value, divisor) if multiple < 2**31
        )
        text = f"{name}={value} is not divisible by {product_text(factors)}"
        yield Problem(text, dict.fromkeys(factors, value), {name: sizes})


def product_text(factors: Mapping[str, int]) -> str:
    """Returns a product of settings as messages name it: `8 (mesh.cp=2 * mesh.tp=4)`.

    Factors of 1 are left out, and a single factor has no product.
    """
    above_one = [f"{name}={size}" for name, size in factors.items() if size > 1]
    text = " * ".join(above_one)
    return f"{math.prod(factors.values())} ({text})" if len(above_one) > 1 else text


Switch = tuple[str, object, Iterable[str]]
"""A setting, whether it is on, and the settings that have an effect only then."""


def without_effect(config: object, switches: Iterable[Switch], section: str = "") -> Iterator[str]:
    """Yields an error for each setting that is not at its default although its switch is off.

    Args:
      section: prefix of the names of `config`'s settings.
    """
    for switch, is_on, settings in switches:
        for name in () if is_on else settings:
            setting = attrgetter(name)
            value = setting(config)
            # The attributes of a class of settings are their defaults.
            if value != setting(type(config)):
                shown = str(value).lower() if isinstance(value, bool) else value
                yield (
                    f"{section}{name}={shown} has no effect without {switch}: set that, or leave "
                    f"{section}{name} out"
                )


def matches(pattern: str, path: str) -> bool:
    """Returns whether one of the pattern's alternatives, separated by `|`, matches as in a
    shell."""
    return any(fnmatch.fnmatchcase(path, alternative) for alternative in pattern.split("|"))


def dotted(path: Iterable[object]) -> str:
    """Returns the keys of a path, joined by dots."""
    return ".".join(map(str, path))


def by_dotted_path(items: Iterable[tuple[Sequence[object], T]]) -> dict[str, T]:
    """Returns things by dotted path.

    All dicts of parameters, variables or modules by dotted path are made here. A key may contain a
    dot, and of two things with the same path, a plain dict would keep only the last.

    Raises:
      UserError: two things have the same dotted path.
    """
    values: dict[str, T] = {}
    paths: dict[str, Sequence[object]] = {}
    for path, value in items:
        name = dotted(path)
        if name in values:
            raise UserError(
                f"the model has two things at {name!r}, by the keys {list(paths[name])} and "
                f"{list(path)}: jaxtp joins keys by dots, and could not tell them apart; rename "
                "the one that has a dot in a key"
            )
        values[name] = value
        paths[name] = path
    return values


def nearest_multiples(value: int, by: int) -> list[int]:
    """Returns the nearest multiples of `by` below (if positive) and above `value`."""
    return sorted({max(value // by, 1) * by, -(-value // by) * by})


def divisors(number: int, limit: int = _MAX_DIVISOR) -> list[int]:
    """Returns the divisors up to a limit, in ascending order."""
    return [divisor for divisor in range(1, min(number, limit) + 1) if number % divisor == 0]


def mesh_settings(axes: Iterable[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the settings of axes with their sizes: `mesh.fsdp` for fsdp."""
    return {f"mesh.{axis}": sizes[axis] for axis in axes}


def _short(setting: str) -> str:
    return setting.rpartition(".")[-1]
