"""Makes a dataset from inputs."""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from jaxtp.config.console import Display
from jaxtp.config.files import write_atomically
from jaxtp.config.interrupt import Interrupt, InterruptError
from jaxtp.data.documents import Tokens
from jaxtp.data.manifest import MANIFEST, SPLITS, TRAIN, VALIDATION, Manifest, totals
from jaxtp.data.prepare.batches import Batch, Entry, ahead, batches, split_of, threshold
from jaxtp.data.prepare.conversations import Conversations, fields_of, open_conversations, with_layout
from jaxtp.data.prepare.dataset_tokenizer import describe, named_tokenizer, open_tokenizer
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.prepare.readers import DUPLICATE, EMPTY_DOCUMENT, TEXT, PrepareError, Problem, Turn
from jaxtp.data.prepare.session import SEEN, Job, State, begin, clear_leftovers, drop_unknown, locked
from jaxtp.data.prepare.sources import find_sources
from jaxtp.data.prepare.writer import Seen, SplitWriter
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import Tokenizer

_MAX_PROBLEMS = 5
"""Problems that are shown."""
_LINE_SECONDS = 5.0
"""Seconds between lines of progress without a terminal."""


def prepare(out: Path, config: PrepareConfig) -> None:
    """Makes or resumes a dataset; raises `UserError` or `InterruptError`."""
    named = named_tokenizer(config)
    sources = find_sources(config)
    config, layout = with_layout(config, sources)
    if layout:
        print(f"{'layout':<12}{layout}", flush=True)
    conversations = open_conversations(config, named)
    try:
        with (
            locked(out),
            Interrupt(signal.SIGINT) as interrupt,
            PrepareDisplay(sum(source.size for source in sources)) as display,
        ):
            job = Job(out, config, sources, named)
            state = begin(job)
            if state is None:
                display.line(f"{out} is finished; there is nothing to do")
                return
            if state.tokenizer is None:  # nothing depends on the threshold yet
                state.threshold = threshold(sources, fields_of(config, conversations), config, interrupt)
            if state.threshold is not None:
                job = replace(job, config=replace(config, held_out=state.threshold))
            tokenizer = open_tokenizer(job, state, display, interrupt)
            with ExitStack() as stack:
                _Work(job, tokenizer, conversations, state, display, stack).finish(interrupt)
    except OSError as error:  # from writing; readers handle read errors
        raise PrepareError(
            f"{error.filename or out}: {error.strerror}; when that is mended the same command goes on"
        ) from None


class PrepareDisplay(Display):
    """A progress bar, or lines without a terminal; `total` is the input bytes."""

    def __init__(self, total: int) -> None:
        super().__init__("{task.percentage:3.0f}%")
        self._total = max(total, 1)
        self._num_shown = 0
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self.begin(0, self._total)
        return super().__enter__()

    def move(self, done: int, text: str) -> None:
        """Moves the bar, or prints a line every few seconds."""
        super().move(done, text)
        if not self.has_bar and time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._last_line = time.monotonic()
            self.line(f"{100 * done // self._total}%  {text}")

    def show(self, problem: Problem) -> None:
        """Shows only the first few problems."""
        if problem.is_harmless:
            return
        self._num_shown += 1
        if self._num_shown <= _MAX_PROBLEMS:
            self.line(f"skipped: {problem.message}")
        if self._num_shown == _MAX_PROBLEMS:
            self.line("further ones are only counted")


class _Work:
    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        conversations: Conversations | None,
        state: State,
        display: PrepareDisplay,
        stack: ExitStack,
    ):
        self._out, self._config, self._sources = job.out, job.config, job.sources
        self._tokenizer, self._conversations = tokenizer, conversations
        self._state, self._display = state, display
        info = tokenizer.info
        adds_tokens = conversations is None  # else the template writes prefix and end
        self._prefix = np.array(info.prefix if adds_tokens else [], info.dtype)
        self._end = np.array([info.eos_id] if adds_tokens and info.eos_id is not None else [], info.dtype)
        settings = info, self._config.has_prompts, self._config.shard_tokens
        writers = {name: SplitWriter(self._out, name, *settings, state.splits[name]) for name in SPLITS}
        self._writers = {name: stack.enter_context(closing(writer)) for name, writer in writers.items()}
        drop_unknown(self._out, {name for writer in self._writers.values() for name in writer.files()})
        self._seen = None
        if self._config.dedup:
            self._seen = stack.enter_context(closing(Seen(self._out / SEEN, state.seen)))
        self._num_documents, self._num_tokens, self._started = 0, 0, time.monotonic()

    def finish(self, interrupt: Interrupt) -> None:
        if self._state.position != (0, 0):
            self._display.line(f"going on after {self._describe_position()}")
        saved = time.monotonic()
        if self._conversations is not None:
            self._conversations.save(self._out)
        try:
            fields = fields_of(self._config, self._conversations)
            read = batches(self._sources, self._state.position, fields, self._config.on_error)
            for batch in ahead(read, interrupt):
                self._take(batch)
                if time.monotonic() - saved >= self._config.save_seconds:
                    self._save()
                    saved = time.monotonic()
        except InterruptError:
            self._save()
            raise
        except PrepareError as error:  # keeps everything before the bad input
            self._save()
            raise PrepareError(f"{error}\n{self._remedy()}") from None
        self._write_manifest()

    def _take(self, batch: Batch) -> None:
        entries = batch.entries
        if self._seen is not None:
            entries = [entry for entry in entries if self._seen.add(entry.digest)]
        encoded = self._encode([turn for entry in entries for turn in entry.turns])
        for entry in entries:
            for size, ids in zip(entry.sizes, encoded, strict=False):  # `zip` takes one encoding per turn
                self._append(entry, size, ids)
        for problem in batch.problems:
            self._state.skip(problem.kind)
            self._display.show(problem)
        if len(entries) < len(batch.entries):
            self._state.skip(DUPLICATE, len(batch.entries) - len(entries))
        self._state.position = batch.position
        self._display.move(batch.done, self._describe_speed())

    def _encode(self, turns: list[Turn]) -> Iterator[list[Tokens]]:
        if self._conversations is not None:
            return iter(self._conversations.encode(turns))
        if not self._config.has_prompts:
            return ([ids] for ids in self._tokenizer.encode_batch([turn.text for turn in turns]))
        ids = self._tokenizer.encode_batch([text for turn in turns for text in (turn.prompt or "", turn.text)])
        return ([ids[i], ids[i + 1]] for i in range(0, len(ids), 2))

    def _append(self, entry: Entry, size: int, ids: list[Tokens]) -> None:
        if not any(len(part) for part in (*ids, self._end)):  # a tokenizer may drop white space
            self._state.skip(EMPTY_DOCUMENT)
            return
        prefix = self._prefix[: 0 if self._starts_with_prefix(ids) else None]
        writer = self._writers[split_of(entry.digest, self._config.held_out)]
        prompt = len(prefix) + len(ids[0]) if self._config.has_prompts else 0
        self._num_tokens += writer.append([prefix, *ids, self._end], prompt, size)
        self._num_documents += 1

    def _starts_with_prefix(self, ids: list[Tokens]) -> bool:
        """Returns whether a text spells the prefix itself, which needs --special-tokens."""
        if not self._config.special_tokens:
            return False
        return np.array_equal(np.concatenate(ids)[: len(self._prefix)], self._prefix)

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
        clear_leftovers(self._out)
        for line in self._summary(manifest):
            self._display.line(line)

    def _summary(self, manifest: Manifest) -> Iterator[str]:
        info = manifest.tokenizer
        requested = self._config.train_bpe or 0
        fewer = f" (the text gives no more; asked for {requested:,})" if requested > info.vocab_size else ""
        yield f"{'dataset':<12}{self._out}, tokenizer {info.kind}, vocabulary {info.vocab_size:,}{fewer}"
        if ends := list(describe(self._tokenizer, self._config)):
            yield f"{'documents':<12}{'; '.join(ends)}"
        written = open_dataset(self._out)
        for name in (TRAIN, VALIDATION):
            of, shards = totals(manifest.splits[name]), len(manifest.splits[name])
            loss = f", {written.splits[name].num_loss_tokens:,} of them with loss," if manifest.prompts else ""
            yield (
                f"{name:<12}{of['documents']:,} documents, {of['tokens']:,} tokens{loss} in "
                f"{shards} shard{'' if shards == 1 else 's'}, the longest document {of['longest']:,}"
            )
        if not manifest.splits[VALIDATION] and manifest.arguments["held_out"]:
            yield f"{'':<12}nothing is held out: of so few documents, take a larger --held-out"
        if manifest.skipped:
            yield f"{'left out':<12}{_listed(manifest.skipped)}"

    def _remedy(self) -> str:
        done = sum(sum(s.documents for s in p.shards) + p.documents for p in self._state.splits.values())
        skip = "the same command with --on-error skip leaves out what cannot be read"
        source, item = self._state.position
        if item and self._sources[source].format != TEXT:  # its first rows are written and must not change
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
        documents, tokens = self._num_documents, self._num_tokens
        return f"{documents:,} documents  {tokens:,} tokens  {tokens / seconds:,.0f} tokens/s"


def _listed(skipped: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} x {kind}" for kind, count in sorted(skipped.items()))
