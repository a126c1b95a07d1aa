"""Converts config.json to a `ModelConfig` and back.

A round trip decides whether a family can represent a model.
"""

import shlex
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from jaxtp.config.hints import closest
from jaxtp.config.reading import truncate
from jaxtp.config.schema import differences, to_plain, validate
from jaxtp.data.tokenizer_files import MAX_POSITIONS
from jaxtp.hf.config_blocks import (
    Settings,
    name_in_file,
    read_attribute,
    read_layers,
    with_layer_types,
    write_fields,
    write_layers,
)
from jaxtp.hf.families import ALIASES, FAMILIES, REFUSED, WRAPPERS
from jaxtp.hf.families.family import Family, is_ignorable
from jaxtp.hf.model_folder import (
    CONFIG,
    Attributes,
    Folder,
    HFError,
    MutableAttributes,
    join_problems,
    open_folder,
    prefix_errors,
    quote,
    read_attributes,
    whole,
)
from jaxtp.hf.safetensors import FORMATS
from jaxtp.hf.tensor_map import dtypes
from jaxtp.hf.wrapper import TEXT, Whole, full_names, text_attributes
from jaxtp.layers.attention import AttentionConfig
from jaxtp.layers.experts import ExpertsConfig
from jaxtp.layers.gated_delta import GatedDeltaConfig
from jaxtp.layers.mlp import MLPConfig
from jaxtp.layers.parameter import DType
from jaxtp.models.config import ModelConfig, architecture

_ALWAYS_WRITTEN = ("hidden_act", "attention_dropout")
"""Attributes that an export writes although they have only one supported value."""
# Families whose reasons are listed
_NEAREST = 4
_TO_BFLOAT16 = {
    "mxfp4": "transformers writes it in bfloat16: from_pretrained(FOLDER, dtype='bfloat16', "
    "quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(NEW)",
    "bitsandbytes": "use the model that it was made from, or what transformers writes: "
    "from_pretrained(FOLDER).dequantize().save_pretrained(NEW)",
}
"""Ways from quantised weights to bfloat16."""
_MLP_DEFAULTS = to_plain(MLPConfig())
_ATTENTION_DEFAULTS = to_plain(AttentionConfig())
_STATE_DEFAULTS = to_plain(GatedDeltaConfig())
_EXPERT_DEFAULTS = {
    name: value for name, value in to_plain(ExpertsConfig()).items() if name not in _MLP_DEFAULTS
}
"""Defaults of the settings that only experts have."""


def read_config(path: str | Path, ignore_config: Collection[str] = ()) -> ModelConfig:
    """Returns the model configuration of a Hugging Face folder.

    Args:
      ignore_config: unknown attributes without effect on the model's output.

    Raises:
      HFError: an unsupported family or unknown attribute.
    """
    folder = Path(path)
    return model_config(read_attributes(folder), str(folder / CONFIG), ignore_config)


def stored_dtype(path: str | Path) -> str | None:
    """Returns the dtype in config.json, e.g. bfloat16, else of the weights, else None."""
    attributes = read_attributes(Path(path))
    dtype = attributes.get("dtype") or attributes.get("torch_dtype")
    if isinstance(dtype, str):
        return dtype
    try:
        return dtype_of(open_folder(Path(path)))
    except HFError:
        return None


def dtype_of(folder: Folder) -> DType:
    """Returns the tensors' dtype, or float32 if they differ."""
    stored = dtypes(folder.tensors, family_of(folder.attributes, str(folder.path / CONFIG)))
    return next((dtype for dtype, name in FORMATS.items() if stored == {name}), "float32")


def family_of(attributes: Attributes, source: str) -> Family:
    """Returns the family of a `model_type`, or of the text model in a multimodal one."""
    model_type = attributes.get("model_type")
    with prefix_errors(source):
        text = text_attributes(attributes)
    text_type = text.get("model_type")
    wrapper = WRAPPERS.get(str(model_type))
    if wrapper is not None and text_type not in wrapper.text_types:
        raise HFError(
            f"{source}: a {model_type} with text of {quote(text_type)} is not supported, "
            f"only {' and '.join(wrapper.text_types)}"
        )
    family = None
    if isinstance(text_type, str):
        family = FAMILIES.get(ALIASES.get(text_type, text_type))
    if family is None:
        problem = "model_type is missing"
        if model_type:
            problem = f"model_type = {quote(model_type)} is not supported"
        if str(model_type) in REFUSED:
            problem += f", because of {REFUSED[str(model_type)]}"
        lines = [f"{source}: {problem}"]
        if str(model_type) not in REFUSED and len(attributes) > 1:
            lines.append(_nearest(attributes))
        lines.append("jaxtp convert list prints the supported ones")
        raise HFError("\n".join(lines))
    if text.get("rope_interleave") is False:
        family = replace(family, rotated="halves")
    if wrapper is None:
        return family
    return replace(
        family,
        architecture=wrapper.architecture,
        wrapper=wrapper,
        **wrapper.text,
    )


def check_adaptable(attributes: Attributes) -> None:
    """Raises `HFError` for a layout of heads that differs from the layout in PEFT's adapters.

    Adapters of a `model_type` have its usual layout.
    """
    if text_attributes(attributes).get("rope_interleave") is False:
        raise HFError(
            "rope_interleave = False: adapters need the usual layout; write the model in it by "
            "`jaxtp convert import FOLDER RUN` and `jaxtp convert export RUN NEW --text-only`"
        )


def _nearest(attributes: Attributes) -> str:
    """Returns the family that lacks the fewest attributes of a model, and these attributes."""
    text = attributes.get(TEXT)
    if not isinstance(text, dict):
        text = attributes
    text = {name: value for name, value in text.items() if value is not None}
    text["architectures"] = None
    misfits = {name: list(_misfits(text, family, ())) for name, family in FAMILIES.items()}
    nearest = min(misfits, key=lambda name: len(misfits[name]))
    message = f"the nearest family by its attributes is {nearest}"
    if not misfits[nearest]:
        return message
    lacks = [f"{truncate(name)} = {quote(text[name])}" for name, _ in misfits[nearest]]
    return f"{message}, which lacks {', '.join(lacks[:_NEAREST])}"


def model_config(
    attributes: Attributes, source: str, ignore_config: Collection[str] = ()
) -> ModelConfig:
    """Returns the configuration in the attributes; `source` names their file in messages.

    Raises as `read_config`.
    """
    family = family_of(attributes, source)
    text = text_attributes(attributes)
    with prefix_errors(source):
        problems = list(_problems(text, family, ignore_config))
        if problems:
            raise HFError(join_problems(problems))
        return validate(
            ModelConfig, _fields(text, family), source=f"{source} describes an invalid model"
        )


def vocabulary_size(attributes: Attributes) -> int:
    """Returns the number of token ids in config.json."""
    family = family_of(attributes, CONFIG)
    return int(_fields(text_attributes(attributes), family)["vocab_size"])


def open_whole(path: Path, config: ModelConfig) -> Whole:
    """Opens the folder that a model came from; raises `HFError` if it has another model."""
    folder = open_folder(path)
    source = str(path / CONFIG)
    family = family_of(folder.attributes, source)
    text = text_attributes(folder.attributes)
    with prefix_errors(path):
        stored = validate(ModelConfig, _fields(text, family), source=source)
        # Training may have added tokens.
        stored = replace(stored, vocab_size=max(stored.vocab_size, config.vocab_size))
        if lost := differences(_comparable(stored), _comparable(config), "model."):
            raise HFError(
                f"another model (it has -> yours has): {join_problems(list(map(truncate, lost)))}"
            )
        return Whole(folder, family, full_names(folder.tensors, family, config.num_layers))


def changed_config(
    whole: Whole, num_ids: int, dtype: DType, max_positions: object
) -> dict[str, Any]:
    """Returns the config.json of `whole` with other token ids, dtype or length of texts."""
    text = text_attributes(whole.folder.attributes)
    changes = MutableAttributes()
    if num_ids != vocabulary_size(whole.folder.attributes):
        changes["vocab_size"] = num_ids
    if dtype != dtype_of(whole.folder):
        changes["torch_dtype" if "torch_dtype" in text else "dtype"] = dtype
    if max_positions is not None and max_positions != text.get(MAX_POSITIONS):
        changes[MAX_POSITIONS] = max_positions
    if whole.family.wrapper is None and text["model_type"] in ALIASES:
        changes["model_type"] = whole.family.model_type
    return whole.attributes(changes)


def write_attributes(config: ModelConfig, family: Family, dtype: str) -> MutableAttributes:
    """Returns config.json attributes that every transformers version reads.

    Raises if the family lacks such models.
    """
    fixed = family.fixed_attributes()
    written = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **write_fields(family.attributes, _common_settings(config)),
        **{name: value for name, value in fixed.items() if name in _ALWAYS_WRITTEN},
        **family.written,
        **write_layers(config, family),
        "torch_dtype": dtype,
    }
    try:
        read = _comparable(model_config(written, "config.json"))
    except HFError as error:
        raise HFError(f"a {family.model_type} cannot represent this model: {error}") from None
    if lost := differences(_comparable(config), read, "model."):
        raise HFError(
            f"a {family.model_type} cannot represent this model (it has -> it would become): "
            f"{join_problems(list(map(truncate, lost)))}"
        )
    return written


def _common_settings(config: ModelConfig) -> Settings:
    """Returns the configuration with the fields that all blocks share, and fields of experts."""
    blocks = config.block_kinds()
    sparse = next((block for block in blocks if block.num_experts), blocks[0])
    values = vars(config) | {name: getattr(sparse, name) for name in _EXPERT_DEFAULTS}
    for name, value in vars(sparse).items():
        if all(repr(getattr(block, name)) == repr(value) for block in blocks):
            values[name] = value
    return values


def _comparable(config: ModelConfig) -> dict[str, Any]:
    """Returns the architecture's settings.

    Settings that differ by layer are lists. Settings of experts, states, attention, or an MLP have
    their defaults in blocks that have none.
    """
    fields = dict(architecture(config))
    fields.pop("first_blocks")
    fields.pop("pattern")
    plain = {block: to_plain(block) for block in config.block_kinds()}
    for block in plain:
        if not block.num_experts:
            plain[block] |= _EXPERT_DEFAULTS
        if not block.has_states:
            plain[block] |= _STATE_DEFAULTS
        if not block.has_attention:
            plain[block] |= _ATTENTION_DEFAULTS
        if block.parts == "mixer":
            plain[block] |= _MLP_DEFAULTS
    for name in fields.keys() & next(iter(plain.values())).keys():
        values = [plain[block][name] for block in config.layers()]
        fields[name] = values
        if values.count(values[0]) == len(values):
            fields[name] = values[0]
    return fields


def choose_family(config: ModelConfig, name: str | None) -> Family:
    """Returns the family `name`, or the first that can represent the model."""
    if name is None:
        return _first_that_fits(config, FAMILIES.values())
    if name in WRAPPERS:
        types = WRAPPERS[name].text_types
        families = [FAMILIES[ALIASES.get(text_type, text_type)] for text_type in types]
        return replace(_first_that_fits(config, families), wrapper=WRAPPERS[name])
    return family_of({"model_type": name}, "--family")


def _first_that_fits(config: ModelConfig, families: Iterable[Family]) -> Family:
    reasons = []
    for family in families:
        fields = chain.from_iterable(attribute.fields for attribute in family.attributes)
        if config.most_experts and "num_experts" not in fields:
            continue
        try:
            write_attributes(config, family, "float32")
            return family
        except HFError as error:
            reasons.append(f"  {error}")
    # Reasons that name settings come first. A family that needs experts refuses a model
    # without them before it compares any settings.
    reasons.sort(key=lambda reason: (" -> " not in reason, reason.count("; ")))
    raise HFError("\n".join(("no family can represent this model:", *reasons[:_NEAREST])))


def _problems(attributes: Attributes, family: Family, ignored: Collection[str]) -> Iterator[str]:
    fixed = family.fixed_attributes()
    for name in ignored:
        if name in family.known_attributes() | fixed.keys() | {"architectures"}:
            yield (
                f"--ignore-config {truncate(name)}: it is known to change the model, so it "
                "cannot be ignored"
            )
        elif name not in attributes:
            close = closest(name, attributes)
            hint = f"; did you mean {truncate(close)}?" if close else ""
            yield f"--ignore-config {truncate(name)}: there is no such attribute{hint}"
    yield from (problem for _, problem in _misfits(attributes, family, ignored))
    # A published file may name its own class in place of transformers' one.
    own = [[code.rpartition(".")[2]] for code in family.remote_code]
    if attributes.get("architectures") not in (None, [family.architecture], *own):
        yield (
            f"architectures = {quote(attributes['architectures'])} is not supported, only "
            f"{family.architecture}"
        )


def _misfits(
    attributes: Attributes, family: Family, ignored: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yields attributes that the family does not have, each with a message."""
    allowed = family.known_attributes() | set(ignored)
    fixed = family.fixed_attributes()
    for name, value in attributes.items():
        # Empty if the weights are not quantised
        if name == "quantization_config" and value == {}:
            continue
        if name == "quantization_config" and isinstance(value, dict) and "quant_method" in value:
            method = str(value["quant_method"])
            if method not in family.quantization:
                yield name, _quantization_problem(method, family)
        elif name in fixed:
            only = fixed[name]
            supported = only if isinstance(only, tuple) else (only,)
            if value not in supported and not (value is None and only is False):
                yield (
                    name,
                    f"{name} = {quote(value)} is not supported, only {supported[0]!r}: it is known "
                    "to change the model",
                )
        elif name not in allowed and not is_ignorable(name, value, family):
            yield (
                name,
                f"the attribute {truncate(name)} = {quote(value, 'null')} of a {family.model_type} "
                "is unknown and may change the model; if you know that it does not, ignore it by "
                f"--ignore-config {shlex.quote(truncate(name))}",
            )


def _quantization_problem(method: str, family: Family) -> str:
    remedy = _TO_BFLOAT16.get(
        method, "use the model that it was made from: the base model on its page of the Hub"
    )
    return (
        f"quant_method = {quote(method)} is not supported, only "
        f"{' and '.join(sorted(family.quantization))} in blocks, or weights of 16 or 32 bits; "
        f"{remedy}"
    )


def _fields(attributes: Attributes, family: Family) -> Settings:
    attributes = with_layer_types(attributes, family)
    fields = dict(family.always)
    names = dict[str, str]()
    for attribute in sorted(family.attributes, key=lambda attribute: attribute.unit is not None):
        if attribute.unit is not None and "head_dim" not in fields:
            fields["head_dim"] = _head_dim(attributes, family, fields)
        names |= dict.fromkeys(attribute.fields, name_in_file(attribute, attributes))
        fields |= dict.fromkeys(attribute.fields, read_attribute(attribute, attributes, fields))
    fields["head_dim"] = _head_dim(attributes, family, fields)
    num_experts = fields.get("num_experts")
    per_token = fields.get("experts_per_token", 0)
    if num_experts and per_token > num_experts:
        raise HFError(
            f"{names['experts_per_token']} = {per_token}: should be at most "
            f"{names['num_experts']} = {num_experts}"
        )
    return {**fields, **read_layers(attributes, family, fields)}


def _head_dim(attributes: Attributes, family: Family, fields: Settings) -> int:
    if "head_dim" in fields:
        return int(fields["head_dim"])
    head_dim = attributes.get("head_dim") if "head_dim" in family.layer_attributes else None
    if head_dim is None:
        head_dim = family.default_head_dim
    if head_dim is not None:
        return whole("head_dim", head_dim)
    if fields["d_model"] % fields["num_heads"]:
        raise HFError(
            f"hidden_size = {fields['d_model']} is not divisible by num_attention_heads = "
            f"{fields['num_heads']}, and there is no head_dim"
        )
    return int(fields["d_model"] // fields["num_heads"])
