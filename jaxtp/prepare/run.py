"""Makes a dataset from inputs, from the first document to the manifest."""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtp.data.manifest import MANIFEST, SPLITS, TRAIN, VALIDATION, Manifest, totals
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import Tokenizer
from jaxtp.files import write_atomically
from jaxtp.interrupt import Interrupt, InterruptError
from jaxtp.prepare import errors, folder
from jaxtp.prepare.batches import Batch, Entry, ahead, batches, split_of
from jaxtp.prepare.config import PrepareConfig
from jaxtp.prepare.conversation import Conversations, open_conversations
from jaxtp.prepare.errors import PrepareError, Turn
from jaxtp.prepare.formats import TEXT, Source
from jaxtp.prepare.journal import Seen, State
from jaxtp.prepare.marks import described
from jaxtp.prepare.report import Report
from jaxtp.prepare.session import begin, given_tokenizer, tokenizer_for
from jaxtp.prepare.sources import find_sources
from jaxtp.prepare.writer import SplitWriter


def prepare(out: Path, config: PrepareConfig) -> None:
    """Makes a dataset, or goes on with it, or finds that it is done.

    Raises:
      PrepareError: a bad input, a folder that cannot be written or holds something else.
      TokenizerError: a tokenizer that cannot be used, or a file beside it that is damaged.
      ChatError: a chat template that is missing or fails.
      KeyboardInterrupt: Ctrl-C.
    """
    given = given_tokenizer(config)
    conversations = open_conversations(config, given)
    sources = find_sources(config)
    try:
        with (
            folder.locked(out),
            Interrupt(signal.SIGINT) as interrupt,
            Report(sum(source.size for source in sources)) as report,
        ):
            state = begin(out, config, sources, given)
            if state is None:
                report.line(f"{out} is finished; there is nothing to do")
                return
            tokenizer = tokenizer_for(out, config, sources, given, state, report, interrupt)
            with ExitStack() as stack:
                _Work(out, config, sources, tokenizer, conversations, state, report, stack).finish(interrupt)
    except OSError as error:  # from an output: what reads inputs reports theirs
        raise PrepareError(
            f"{error.filename or out}: {error.strerror}; when that is mended the same command goes on"
        ) from None


class _Work:
    """A dataset being made: its open files, and the state that the journal gets."""

    def __init__(
        self,
        out: Path,
        config: PrepareConfig,
        sources: list[Source],
        tokenizer: Tokenizer,
        conversations: Conversations | None,
        state: State,
        report: Report,
        stack: ExitStack,
    ):
        self._out, self._config, self._sources = out, config, sources
        self._tokenizer, self._conversations = tokenizer, conversations
        self._state, self._report = state, report
        info, own = tokenizer.info, conversations is None  # else a template writes what comes first and last
        self._begin = np.array(info.prefix if own else [], info.dtype)
        self._end = np.array([info.eos_id] if own and info.eos_id is not None else [], info.dtype)
        settings = info.dtype, config.has_prompts, config.shard_tokens
        writers = {name: SplitWriter(out, name, *settings, state.splits[name]) for name in SPLITS}
        self._writers = {name: stack.enter_context(closing(writer)) for name, writer in writers.items()}
        folder.drop_unknown(out, {name for writer in self._writers.values() for name in writer.files()})
        self._seen = stack.enter_context(closing(Seen(out / folder.SEEN, state.seen))) if config.dedup else None
        self._documents, self._tokens, self._started = 0, 0, time.monotonic()

    def finish(self, interrupt: Interrupt) -> None:
        """Reads what is left of the inputs, and writes the manifest."""
        if self._state.position != (0, 0):
            self._report.line(f"going on after {self._describe_position()}")
        saved, fields = time.monotonic(), self._config.fields
        if self._conversations is not None:
            self._conversations.save(self._out)
            fields = replace(fields, turns=self._conversations.turns)
        try:
            read = batches(self._sources, self._state.position, fields, self._config.on_error)
            for batch in ahead(read, interrupt):
                self._take(batch)
                if time.monotonic() - saved >= self._config.save_seconds:
                    self._save()
                    saved = time.monotonic()
        except InterruptError:
            self._save()
            raise
        except PrepareError as error:  # what comes before the bad input is kept
            self._save()
            raise PrepareError(f"{error}\n{self._remedy()}") from None
        self._write_manifest()

    def _take(self, batch: Batch) -> None:
        entries = batch.entries
        if self._seen is not None:
            entries = [entry for entry in entries if self._seen.is_new(entry.digest)]
        encoded = self._encode([turn for entry in entries for turn in entry.turns])
        for entry in entries:
            for size, ids in zip(entry.sizes, encoded, strict=False):  # as many as it has turns
                self._append(entry, size, ids)
        for problem in batch.problems:
            self._state.skip(problem.kind)
            self._report.left_out(problem)
        if len(entries) < len(batch.entries):
            self._state.skip(errors.DUPLICATE, len(batch.entries) - len(entries))
        self._state.position = batch.position
        self._report.moved(batch.done, self._describe_speed())

    def _encode(self, turns: list[Turn]) -> Iterator[list[NDArray[Any]]]:
        """Yields the ids of each document, and where it has a prompt those of the prompt and of the rest."""
        if self._conversations is not None:
            return iter(self._conversations.encode(turns))
        if not self._config.has_prompts:
            return ([ids] for ids in self._tokenizer.encode_batch([turn.text for turn in turns]))
        ids = self._tokenizer.encode_batch([text for turn in turns for text in (turn.prompt or "", turn.text)])
        return ([ids[i], ids[i + 1]] for i in range(0, len(ids), 2))

    def _append(self, entry: Entry, size: int, ids: list[NDArray[Any]]) -> None:
        if not any(len(part) for part in (*ids, self._end)):  # a tokenizer may have nothing for white space
            self._state.skip(errors.EMPTY_DOCUMENT)
            return
        begin = self._begin[: 0 if self._spells_beginning(ids) else None]
        writer = self._writers[split_of(entry.digest, self._config.held_out)]
        prompt = len(begin) + len(ids[0]) if self._config.has_prompts else 0
        self._tokens += writer.append([begin, *ids, self._end], prompt, size)
        self._documents += 1

    def _spells_beginning(self, ids: list[NDArray[Any]]) -> bool:
        """Returns whether a text already has what it should begin with, as it can with --special-tokens only."""
        if not self._config.special_tokens:
            return False
        return np.array_equal(np.concatenate(ids)[: len(self._begin)], self._begin)

    def _save(self) -> None:
        for name, writer in self._writers.items():
            writer.save()
            self._state.splits[name] = writer.progress
        if self._seen is not None:
            self._seen.save()
            self._state.seen = len(self._seen)
        self._state.save(self._out)

    def _write_manifest(self) -> None:
        for writer in self._writers.values():
            writer.end_shard()
        self._save()
        shards = {name: tuple(writer.progress.shards) for name, writer in self._writers.items()}
        if not any(shards.values()):
            left_out = f"; left out: {_listed(self._state.skipped)}" if self._state.skipped else ""
            raise PrepareError(f"no document in {len(self._sources)} files{left_out}")
        manifest = Manifest(
            self._tokenizer.info,
            shards,
            self._config.has_prompts,
            dict(sorted(self._state.skipped.items())),
            self._state.arguments,
            {"files": len(self._sources), "bytes": sum(source.size for source in self._sources)},
        )
        write_atomically(self._out / MANIFEST, manifest.to_json().encode())
        folder.clear_leftovers(self._out)
        for line in self._summary(manifest):
            self._report.line(line)

    def _summary(self, manifest: Manifest) -> Iterator[str]:
        info = manifest.tokenizer
        wanted = self._config.train_bpe or 0
        fewer = f" (the text gives no more than that; asked for {wanted:,})" if wanted > info.vocab_size else ""
        yield f"{'dataset':<12}{self._out}, tokenizer {info.kind}, vocabulary {info.vocab_size:,}{fewer}"
        if marks := list(described(self._tokenizer, self._config)):
            yield f"{'documents':<12}{'; '.join(marks)}"
        written = open_dataset(self._out)
        for name in (TRAIN, VALIDATION):
            of, shards = totals(manifest.splits[name]), len(manifest.splits[name])
            loss = f", {written.splits[name].num_loss_tokens:,} of them with loss," if manifest.prompts else ""
            yield (
                f"{name:<12}{of['documents']:,} documents, {of['tokens']:,} tokens{loss} in "
                f"{shards} shard{'' if shards == 1 else 's'}, the longest document {of['longest']:,}"
            )
        if not manifest.splits[VALIDATION] and self._config.held_out:
            yield f"{'':<12}nothing is held out: of so few documents, take a larger --held-out"
        if manifest.skipped:
            yield f"{'left out':<12}{_listed(manifest.skipped)}"

    def _remedy(self) -> str:
        done = sum(sum(s.documents for s in p.shards) + p.documents for p in self._state.splits.values())
        skip = "the same command with --on-error skip leaves out what cannot be read"
        source, item = self._state.position
        if item and self._sources[source].format != TEXT:  # its beginning is done, and must stay as it is
            return f"{done:,} documents before it are done; {skip}, and goes on; a mended file needs --overwrite"
        return f"{done:,} documents before it are done. When it is mended the same command goes on; {skip}"

    def _describe_position(self) -> str:
        source, item = self._state.position
        if item and source < len(self._sources) and self._sources[source].format == TEXT:
            source, item = source + 1, 0
        if source >= len(self._sources):
            return "the last input"
        return f"{source:,} of {len(self._sources):,} inputs" + (f", item {item:,} of the next" if item else "")

    def _describe_speed(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"{self._documents:,} documents  {self._tokens:,} tokens  {self._tokens / seconds:,.0f} tokens/s"


def _listed(skipped: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} x {kind}" for kind, count in sorted(skipped.items()))
