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
from jaxtp.config.entry import Interrupt, InterruptError
from jaxtp.config.files import write_atomically
from jaxtp.data.documents import Tokens
from jaxtp.data.manifest import MANIFEST, SPLITS, VALIDATION, Manifest, totals
from jaxtp.data.prepare.batches import Batch, Entry, ahead, batches, split_of, threshold
from jaxtp.data.prepare.conversations import Conversations
from jaxtp.data.prepare.dataset_tokenizer import describe, named_tokenizer, open_tokenizer
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.prepare.readers import DUPLICATE, EMPTY_DOCUMENT, PrepareError, Problem, Turn
from jaxtp.data.prepare.session import SEEN, Job, State, begin, clear_leftovers, drop_unknown, locked
from jaxtp.data.prepare.sources import find_sources, with_layout
from jaxtp.data.prepare.writer import Seen, SplitWriter
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import Tokenizer

_MAX_PROBLEMS = 5
"""Problems that are shown."""
_LINE_SECONDS = 5.0
"""Seconds between lines of progress without a terminal."""


def prepare(out: Path, config: PrepareConfig) -> None:
    """Makes or resumes a dataset; raises `UserError` or `InterruptError`."""
    named, sources = named_tokenizer(config), find_sources(config)
    config = with_layout(config, sources)
    conversations = None if config.messages is None or named is None else Conversations(config, named)
    job = Job(out, config, sources, named, conversations)
    size = sum(source.size for source in sources)
    try:
        with locked(out), Interrupt(signal.SIGINT) as interrupt, PrepareDisplay(size) as display, ExitStack() as stack:
            state = begin(job)
            if state is None:
                display.line(f"{out} is finished; there is nothing to do")
                return
            if state.tokenizer is None:  # nothing depends on the threshold yet
                state.threshold = threshold(job, interrupt)
            if state.threshold is not None:
                job = replace(job, config=replace(config, held_out=state.threshold))
            tokenizer = open_tokenizer(job, state, display, interrupt)
            _Work(job, tokenizer, state, display, stack).finish(interrupt)
    except OSError as error:  # from writing; readers handle read errors
        raise PrepareError(
            f"{error.filename or out}: {error.strerror}; when that is mended the same command goes on"
        ) from None


class PrepareDisplay(Display):
    """A progress bar, or lines without a terminal; `total` is the input bytes."""

    def __init__(self, total: int) -> None:
        super().__init__("{done:,} of {total:,} bytes")
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
            more = "\nfurther ones are only counted" if self._num_shown == _MAX_PROBLEMS else ""
            self.line(f"skipped: {problem.message}{more}")


class _Work:
    def __init__(self, job: Job, tokenizer: Tokenizer, state: State, display: PrepareDisplay, stack: ExitStack):
        self._job, self._config = job, job.config
        self._tokenizer, self._state, self._display = tokenizer, state, display
        info = tokenizer.info
        adds_tokens = job.conversations is None  # else the template writes prefix and end
        self._prefix = np.array(info.prefix if adds_tokens else [], info.dtype)
        self._end = np.array([info.eos_id] if adds_tokens and info.eos_id is not None else [], info.dtype)
        settings = info, self._config.has_prompts, self._config.shard_tokens
        self._writers = {
            name: stack.enter_context(closing(SplitWriter(job.out, name, *settings, state.splits[name])))
            for name in SPLITS
        }
        drop_unknown(job.out, {name for writer in self._writers.values() for name in writer.files()})
        self._seen = None
        if self._config.dedup:
            self._seen = stack.enter_context(closing(Seen(job.out / SEEN, state.seen)))
        self._num_documents, self._num_tokens, self._started = 0, 0, time.monotonic()

    def finish(self, interrupt: Interrupt) -> None:
        source, item = self._state.position
        if (source, item) != (0, 0):
            part = f", item {item:,} of the next" if item else ""
            self._display.line(f"going on after {source:,} of {len(self._job.sources):,} inputs{part}")
        saved = time.monotonic()
        if self._job.conversations is not None:
            self._job.conversations.save(self._job.out)
        try:
            for batch in ahead(
                batches(self._job.sources, self._job.fields, self._state.position, self._config.on_error), interrupt
            ):
                self._take(batch)
                if time.monotonic() - saved >= self._config.save_seconds:
                    self._save()
                    saved = time.monotonic()
        except InterruptError:
            self._save()
            raise
        except PrepareError as error:  # keeps everything before the bad input
            self._save()
            done = sum(sum(s.documents for s in p.shards) + p.documents for p in self._state.splits.values())
            # the first rows of a file in progress are written and must not change
            mended = "a mended file needs --overwrite" if self._state.position.item else "or mend it and run it again"
            raise PrepareError(
                f"{error}\n{done:,} documents before it are done; the same command with --on-error skip leaves out "
                f"what cannot be read and does the rest; {mended}"
            ) from None
        self._write_manifest()

    def _take(self, batch: Batch) -> None:
        seen = self._seen
        entries = batch.entries if seen is None else [entry for entry in batch.entries if seen.add(entry.digest)]
        encoded = self._encode([turn for entry in entries for turn in entry.turns])
        for entry in entries:
            for size, ids in zip(entry.sizes, encoded, strict=False):  # `zip` takes one encoding per turn
                self._append(entry, size, ids)
        for problem in batch.problems:
            self._state.skip(problem.kind)
            self._display.show(problem)
        self._state.skip(DUPLICATE, len(batch.entries) - len(entries))
        self._state.position = batch.position
        speed = self._num_tokens / max(time.monotonic() - self._started, 1e-9)
        text = f"{self._num_documents:,} documents  {self._num_tokens:,} tokens  {speed:,.0f} tokens/s"
        self._display.move(batch.done, text)

    def _encode(self, turns: list[Turn]) -> Iterator[list[Tokens]]:
        if self._job.conversations is not None:
            return iter(self._job.conversations.encode(turns))
        if not self._config.has_prompts:
            return ([ids] for ids in self._tokenizer.encode_batch([turn.text for turn in turns]))
        ids = self._tokenizer.encode_batch([text for turn in turns for text in (turn.prompt or "", turn.text)])
        return ([ids[i], ids[i + 1]] for i in range(0, len(ids), 2))

    def _append(self, entry: Entry, size: int, ids: list[Tokens]) -> None:
        if not any(len(part) for part in (*ids, self._end)):  # a tokenizer may drop white space
            self._state.skip(EMPTY_DOCUMENT)
            return
        prefix = self._prefix
        if self._config.special_tokens and np.array_equal(np.concatenate(ids)[: len(prefix)], prefix):
            prefix = prefix[:0]  # the text spells it
        writer = self._writers[split_of(entry.digest, self._config.held_out)]
        prompt = len(prefix) + len(ids[0]) if self._config.has_prompts else 0
        self._num_tokens += writer.append([prefix, *ids, self._end], prompt, size)
        self._num_documents += 1

    def _save(self) -> None:
        for name, writer in self._writers.items():
            writer.save()
            self._state.splits[name] = writer.progress
        if self._seen is not None:
            self._seen.save()
            self._state.seen = len(self._seen)
        self._state.save(self._job.out)

    def _write_manifest(self) -> None:
        for writer in self._writers.values():
            writer.end_shard()
        self._save()
        shards, sources = {n: tuple(writer.progress.shards) for n, writer in self._writers.items()}, self._job.sources
        skipped = dict(sorted(self._state.skipped.items()))
        if not any(shards.values()):
            left_out = f"; left out: {_listed(skipped)}" if skipped else ""
            raise PrepareError(f"no document in {len(sources)} files{left_out}")
        inputs = {"files": len(sources), "bytes": sum(source.size for source in sources)}
        prompts, info = self._config.has_prompts, self._tokenizer.info
        manifest = Manifest(info, shards, prompts, skipped, self._state.arguments, inputs)
        write_atomically(self._job.out / MANIFEST, manifest.to_json().encode())
        clear_leftovers(self._job.out)
        for line in self._summary(manifest):
            self._display.line(line)

    def _summary(self, manifest: Manifest) -> Iterator[str]:
        info, requested = manifest.tokenizer, self._config.train_bpe or 0
        fewer = f" (the text gives no more; asked for {requested:,})" if requested > info.vocab_size else ""
        yield f"{'dataset':<12}{self._job.out}, tokenizer {info.kind}, vocabulary {info.vocab_size:,}{fewer}"
        if ends := list(describe(self._tokenizer, self._config)):
            yield f"{'documents':<12}{'; '.join(ends)}"
        written = open_dataset(self._job.out)
        for name in SPLITS:
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


def _listed(skipped: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} x {kind}" for kind, count in sorted(skipped.items()))
