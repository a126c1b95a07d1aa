"""Decides whether a command starts a dataset, goes on with one, finds it done, or must leave it alone."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxtp import config as configuration
from jaxtp.config import expand
from jaxtp.data.manifest import MANIFEST, TOKENIZER, DatasetError, TokenizerInfo, read_manifest
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import ByteTokenizer, Tokenizer, read_tokenizer, tokenizer_file
from jaxtp.files import sha256, write_atomically
from jaxtp.interrupt import Interrupt
from jaxtp.prepare import bpe, folder, journal
from jaxtp.prepare.config import PrepareConfig, arguments
from jaxtp.prepare.conversation import template_checksum
from jaxtp.prepare.errors import PrepareError
from jaxtp.prepare.formats import Source
from jaxtp.prepare.journal import State
from jaxtp.prepare.marks import with_marks
from jaxtp.prepare.report import Report
from jaxtp.prepare.sources import differences, listing, parse_listing

_SHOWN = 10
"""Number of differences in a message."""


def given_tokenizer(config: PrepareConfig) -> Tokenizer | None:
    """Returns the tokenizer that a command names; None where it is to be trained.

    Raises:
      TokenizerError: its file, or one beside it, cannot be used.
    """
    if config.train_bpe is not None:
        return None
    if config.tokenizer is None:
        return ByteTokenizer()
    file = tokenizer_file(config.tokenizer)
    return with_marks(read_tokenizer(file), str(file), config)


def begin(out: Path, config: PrepareConfig, sources: list[Source], given: Tokenizer | None) -> State | None:
    """Returns the state to go on from; None where the dataset is finished.

    Raises:
      PrepareError: the folder holds something else.
    """
    there = (out / MANIFEST).exists() or (out / folder.JOURNAL).exists()
    if there and config.overwrite:
        _require_elsewhere(out, config)
        State(asked(config)).save(out)
        folder.clear(out)
    if (out / MANIFEST).exists():
        _require_same_finished(out, config, sources, given)
        folder.clear_leftovers(out)
        return None
    state = journal.load(out, config.has_prompts)
    if state is None:
        folder.require_ours(out)
    elif changed := _changed_unfinished(out, config, sources, given, state):
        if not state.is_empty():
            _refuse(out, "an unfinished dataset", changed)
        state = None
    if state is None:
        state = State(asked(config))
        state.save(out)
    lines = [json.dumps(record) + "\n" for record in listing(sources)]
    write_atomically(out / folder.INPUTS, "".join(lines).encode())
    return state


def asked(config: PrepareConfig) -> dict[str, Any]:
    """Returns the settings that decide what the dataset holds, as plain values; a chat template by its checksum."""
    return arguments(config) | ({} if config.messages is None else {"template": template_checksum(config)})


def tokenizer_for(
    out: Path,
    config: PrepareConfig,
    sources: list[Source],
    given: Tokenizer | None,
    state: State,
    report: Report,
    interrupt: Interrupt,
) -> Tokenizer:
    """Returns the tokenizer of the dataset, and writes its file; trains it if it has to be.

    Raises:
      PrepareError: the one in the folder is damaged.
    """
    path = out / TOKENIZER
    if given is not None:
        if config.tokenizer is not None and state.tokenizer is None:
            write_atomically(path, read_tokenizer(tokenizer_file(config.tokenizer)))
        tokenizer = given
    elif config.train_bpe is not None and state.tokenizer is None:
        write_atomically(path, bpe.train(config.train_bpe, sources, config, report, interrupt))
        tokenizer = with_marks(path.read_bytes(), str(path), config)
    else:
        tokenizer = with_marks(read_tokenizer(path), str(path), config)
    if state.tokenizer is None:
        state.tokenizer = tokenizer.info
        state.save(out)
    elif state.tokenizer.sha256 is not None and not (path.exists() and sha256(path) == state.tokenizer.sha256):
        raise folder.damaged(path, "it is not the tokenizer that made the tokens so far")
    return tokenizer


def _require_elsewhere(out: Path, config: PrepareConfig) -> None:
    """Checks that nothing that the command reads is in the folder that it deletes."""
    read = [expand(Path(name)) for name in config.inputs] + [
        path for path in (config.tokenizer, config.template) if path
    ]
    for path in read:
        if path.resolve().is_relative_to(out.resolve()):
            raise PrepareError(f"--overwrite would delete {path} with {out}; copy it elsewhere, or name another --out")


def _require_same_finished(out: Path, config: PrepareConfig, sources: list[Source], given: Tokenizer | None) -> None:
    try:
        manifest = read_manifest(out)
        open_dataset(out)  # every file is there, and as long as it was
    except DatasetError as error:
        raise PrepareError(f"{error}; --overwrite starts afresh") from None
    changed = _other_settings(manifest.arguments, config)
    changed += _other_tokenizer(manifest.tokenizer, given)
    _refuse(out, "a dataset", changed or differences(_listed(out), listing(sources)))


def _changed_unfinished(
    out: Path, config: PrepareConfig, sources: list[Source], given: Tokenizer | None, state: State
) -> list[str]:
    """Returns what differs; inputs that have not been read yet may, unless the tokenizer has learnt from them."""
    changed = _other_settings(state.arguments, config)
    if state.tokenizer is not None:
        changed += _other_tokenizer(state.tokenizer, given)
    read = None  # all of them
    if config.train_bpe is None or state.tokenizer is None:
        read = state.position.source + (state.position.item > 0)
    return changed or differences(_listed(out)[:read], listing(sources)[:read])


def _refuse(out: Path, what: str, changed: list[str]) -> None:
    if changed:
        more = [f"and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
        lines = "\n".join(f"  {line}" for line in [*changed[:_SHOWN], *more])
        raise PrepareError(
            f"{out} holds {what} that was made otherwise (there -> asked for):\n{lines}\n"
            "--overwrite starts afresh; another --out DIR keeps it. Nothing was changed."
        )


def _other_settings(before: Mapping[str, Any], config: PrepareConfig) -> list[str]:
    """Returns the settings that differ; one that is newer than the dataset counts as having been at its default."""
    return configuration.differences({**arguments(PrepareConfig()), **before}, asked(config))


def _other_tokenizer(before: TokenizerInfo, given: Tokenizer | None) -> list[str]:
    if given is None or given.info == before:
        return []
    return configuration.differences({"tokenizer": asdict(before)}, {"tokenizer": asdict(given.info)})


def _listed(out: Path) -> list[dict[str, Any]]:
    """Returns the inputs that the dataset was made of; none where a command ended before it wrote them down."""
    path = out / folder.INPUTS
    try:
        return parse_listing(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError) as error:
        raise folder.damaged(path, str(error)) from None
