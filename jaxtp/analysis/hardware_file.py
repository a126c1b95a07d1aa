"""Hardware from the command line: a name and a count, or a YAML file.

    like: h100                # supplies missing keys
    matmul_efficiency: 0.73
    network: 25.0e+9          # bytes/s

`hardware.RANGES` has units and ranges. A file without `like` needs all of `NEEDED`.
"""

import dataclasses
import difflib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtp.analysis.hardware import RANGES, TABLE, Hardware
from jaxtp.config.reading import truncate
from jaxtp.config.schema import ConfigError, read_yaml, validate

MAX_DEVICES = 2**20
PLATFORMS = ("cuda", "rocm", "tpu")

NEEDED = ("memory", "flops", "bandwidth", "link", "domain", "network")
"""Keys that a file without `like` has: no default of these is any device's."""

_ALIASES = {
    "a100-80": "a100",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
    "tpu-v5e": "v5e",
    "tpu-v5p": "v5p",
    "tpu-v6e": "v6e",
    "4090": "rtx4090",
}


def find(name: str) -> Hardware:
    """Returns the hardware of a name (in any case) or YAML file.

    Raises:
      ConfigError: unknown name; suggests the nearest.
    """
    if name.endswith((".yaml", ".yml")):
        return read(Path(name))
    return _of_table(name, ", or a YAML file of yours")


def _of_table(name: str, besides: str = "") -> Hardware:
    key = _key(name)
    if key not in TABLE:
        close = difflib.get_close_matches(key, TABLE, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        raise ConfigError(f"hardware {name!r} is not known{hint} There are {', '.join(TABLE)}{besides}")
    return TABLE[key]


def parse(text: str) -> tuple[Hardware, int]:
    """Returns hardware and device count of `h100x8`, `mine.yamlx8` or, on two hosts, `2xh100x8`; X means x.

    Raises:
      ConfigError: malformed, or unknown hardware.
    """
    found = re.fullmatch(r"(?P<name>(?:(?P<hosts>\d+)[xX])?(?P<kind>.+?))[xX](?P<count>\d+)", text)
    if found is None or _is_known(text):
        raise _uncounted(text)
    devices = _number(text, found["count"])
    if not found["hosts"] or Path(found["name"]).is_file():
        return find(found["name"]), devices
    hardware = find(found["kind"])
    count = _number(text, str(_number(text, found["hosts"]) * devices))
    if devices > hardware.domain:
        raise ConfigError(
            f"--hardware {text}: fast links join at most {hardware.domain} of {hardware.name}; {found['kind']}x{count} "
            "has as many devices on more hosts"
        )
    return replace(hardware, domain=devices), count


def _number(text: str, digits: str) -> int:
    digits = digits.lstrip("0")
    if not digits or len(digits) > len(str(MAX_DEVICES)) or int(digits) > MAX_DEVICES:
        raise ConfigError(f"--hardware {truncate(text, 25)}: from 1 to {MAX_DEVICES:,} devices")
    return int(digits)


def _uncounted(text: str) -> ConfigError:
    # For `h100`, `h100x`, `h100x-3` or `h1000`.
    at = text.lower().rfind("x")
    name, count = text[: max(at, 0)], text[at + 1 :]
    if _is_known(text):
        name, count = text, ""
    elif not _is_known(name):
        find(text)
    wrong = f"{count!r} is no number of devices; such as" if count else "how many devices? Such as"
    return ConfigError(f"--hardware {text}: {wrong} {name}x8")


def _is_known(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or _key(name) in TABLE


def _key(name: str) -> str:
    key = name.lower().replace("_", "-")
    return _ALIASES.get(key, key)


def read(path: Path) -> Hardware:
    """Reads a `Hardware` from YAML; the table row `like` supplies missing fields.

    Raises:
      ConfigError: unreadable, invalid or missing keys.
    """
    values = read_yaml(path)
    if not isinstance(values, dict) or not values:
        found = truncate(repr(values)) if values else "nothing"
        raise ConfigError(f"{path}: expected keys such as 'like: h100' and {', '.join(RANGES)}; found {found}")
    problems = [
        f"  {key} = {truncate(repr(values[key]))}: {unit}, from {least:g} to {most:g}"
        for key, (least, most, unit) in RANGES.items()
        if key in values and not _is_between(values[key], least, most)
    ]
    if problems:
        raise ConfigError("\n".join([f"{path}:", *problems]))
    base: dict[str, Any] = {}
    if values.get("like") is not None:
        try:
            base = dataclasses.asdict(_of_table(truncate(values["like"])))
        except ConfigError as error:
            raise ConfigError(f"{path}: like: {error}") from None
    keys = [str(key) for key in values if key not in ("like", "name", "kinds")]
    others = f"as of {base['name']}" if base else "assumed"
    source = f"{path}: {', '.join(keys)}; others {others}" if keys or not base else f"{path}: all {others}"
    like = {"like": base["name"]} if base else {}
    hardware = validate(Hardware, {**base, "name": path.stem, "source": source, **values, **like}, source=str(path))
    if hardware.platform not in PLATFORMS:
        raise ConfigError(f"{path}: platform = {hardware.platform!r}: should be {', '.join(PLATFORMS)}")
    if not base and (missing := [key for key in NEEDED if key not in values]):
        raise ConfigError(
            f"{path}: {', '.join(missing)} missing; give {'it' if len(missing) == 1 else 'them'}, or the name of a "
            "device that all that is left out is taken from, as in 'like: h100'"
        )
    if hardware.reserved >= hardware.memory:
        raise ConfigError(
            f"{path}: reserved = {hardware.reserved:g} is not less than memory = {hardware.memory:g} bytes: nothing is "
            "left for JAX"
        )
    return hardware


def _is_between(value: Any, least: float, most: float) -> bool:
    try:
        return least <= float(value) <= most
    except (OverflowError, TypeError, ValueError):
        return False
