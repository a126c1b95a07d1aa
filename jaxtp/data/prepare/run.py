"""Makes a dataset from inputs."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from jaxtp.config.entry import STANDARD_OUTPUT
from jaxtp.config.files import locked, open_directly, sync_file, write_atomically
from jaxtp.data.copies import local
from jaxtp.data.documents import Tokens
from jaxtp.data.manifest import MANIFEST, SPLITS, VALIDATION, Manifest, SplitRecord, totals
from jaxtp.data.prepare.batches import Batch, Entry, batches, split_of, threshold
from jaxtp.data.prepare.conversations import Conversations
from jaxtp.data.prepare.dataset_tokenizer import (
    DocumentEncoder,
    describe,
    named_tokenizer,
    write_tokenizer,
)
from jaxtp.data.prepare.messages import read_tools
from jaxtp.data.prepare.preference import PairsOfConversations, pair_of_texts
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.prepare.readers import DUPLICATE, EMPTY_DOCUMENT, BadInputError, PrepareError
from jaxtp.data.prepare.session import (
    HASHES,
    Job,
    SplitWriter,
    State,
    begin,
    damaged_error,
    drop_leftovers,
    drop_unknown,
    truncate_file,
)
from jaxtp.data.prepare.sources import find_sources, with_layout
from jaxtp.data.store import open_dataset

# Bytes of a hash that --dedup stores: among 10^12 documents, two collide with a probability of
# 10^-14
_DIGEST = 16
_MAX_PROBLEMS = 5  # Maximum number of problems that are printed
_LINE_SECONDS = 5.0  # Seconds between lines of progress


def open_job(out: Path, config: PrepareConfig) -> Job:
    """Finds the inputs and their layout, and opens the tokenizer; raises `UserError`."""
    config = replace(config, tokenizer=local(config.tokenizer, is_small=True))
    tokenizer = named_tokenizer(config)
    sources = find_sources(config)
    config = with_layout(config, sources)
    if config.tools is not None:
        # A resumed command compares the tools, and not the name of their file.
        tools = read_tools(config.tools)
        config = replace(
            config, tools=None, template_arguments={**config.template_arguments, **tools}
        )
    fields = config.fields
    conversations = None
    if config.messages is not None:
        kind = PairsOfConversations if config.preference else Conversations
        conversations = kind(config, tokenizer)
        fields = replace(fields, turns=conversations.of_row)
    elif config.preference:
        fields = replace(fields, turns=partial(pair_of_texts, config.prompt_name))
    return Job(out, config, sources, tokenizer, conversations, fields)


def prepare(out: Path, config: PrepareConfig) -> None:
    """Makes or resumes a dataset; raises `UserError`."""
    job = open_job(out, config)
    conversations = job.conversations
    try:
        with locked(out), ExitStack() as stack:
            state = begin(job)
            if state is None:
                print(f"{out} is finished; there is nothing to do", flush=True)
                return
            if conversations is not None:
                # If the command resumes, templates still write the day when it first ran. The
                # journal of an older version has no day.
                state.day = state.day or conversations.first_day()
                conversations.template.day = state.day
            if state.tokenizer is None:  # nothing depends on the threshold yet
                state.threshold = threshold(job.sources, job.fields, job.config)
            write_tokenizer(job, state)
            _Preparation(job, state, stack).finish()
    except OSError as error:  # from writing; readers handle read errors
        if error.filename == STANDARD_OUTPUT:
            raise
        raise PrepareError(
            f"{error.filename or out}: {error.strerror}; fix this, and the same command resumes"
        ) from None


class _Preparation:
    def __init__(self, job: Job, state: State, stack: ExitStack):
        self._job = job
        self._config = job.config
        self._tokenizer = job.tokenizer
        self._state = state
        self._threshold = job.config.held_out if state.threshold is None else state.threshold
        self._encoder = DocumentEncoder(job)
        self._writers: dict[str, SplitWriter] = {}
        for name in SPLITS:
            writer = SplitWriter(job, name, state)
            self._writers[name] = stack.enter_context(closing(writer))
        files_by_split = map(SplitWriter.files, self._writers.values())
        drop_unknown(job.out, set().union(*files_by_split))
        self._digests: set[bytes] = set()
        if self._config.dedup:
            truncate_file(job.out / HASHES, state.seen * _DIGEST)
            self._hashes = stack.enter_context(open_directly(job.out / HASHES, "a+b"))
            self._hashes.seek(0)
            self._digests = self._read_digests(state.seen)
        self._num_documents = 0
        self._num_tokens = 0
        self._num_shown = 0
        self._started = self._reported = time.monotonic()

    def _read_digests(self, count: int) -> set[bytes]:
        digests = set[bytes]()
        for _ in range(count):
            digest = self._hashes.read(_DIGEST)
            if digest in digests:  # a file of zeros can have any size, so this loop might not end
                raise damaged_error(self._job.out / HASHES, "a document is in it twice")
            digests.add(digest)
        return digests

    def finish(self) -> None:
        source, item = self._state.position
        if source or item:
            part = f", item {item:,} of the next" if item else ""
            print(
                f"resuming after {source:,} of {len(self._job.sources):,} inputs{part}", flush=True
            )
        saved = time.monotonic()
        if self._job.conversations is not None:
            self._job.conversations.save(self._job.out)
        try:
            for batch in batches(
                self._job.sources, self._job.fields, self._state.position, self._config.on_error
            ):
                self._take(batch)
                if time.monotonic() - saved >= self._config.save_seconds:
                    self._save()
                    saved = time.monotonic()
        except PrepareError as error:  # keeps everything before the bad input
            self._save()
            written = 0
            for progress in self._state.splits.values():
                written += totals(progress.shards)["documents"] + progress.documents
            fix = "or correct the input and repeat it"
            # The first rows of its file are written and must not change.
            if self._state.position.item:
                fix = "a corrected file needs --overwrite"
            raise PrepareError(
                f"{error}\n{written:,} documents before it are done; the same command with "
                f"--on-error skip leaves out unreadable input and does the rest; {fix}"
            ) from None
        self._write_manifest()

    def _take(self, batch: Batch) -> None:
        entries = batch.entries
        if self._config.dedup:
            entries = [entry for entry in entries if self._is_new(entry.digest)]
        encoded = self._encoder.encode(list(chain.from_iterable(entry.turns for entry in entries)))
        for entry in entries:
            # `zip` takes one encoding per turn.
            documents = list(zip(entry.sizes, encoded, strict=False))
            if self._config.preference and not all(len(ids[-1]) for _, ids in documents):
                self._state.skip(EMPTY_DOCUMENT)
                continue
            for size, ids in documents:
                self._append(entry, size, ids)
        for problem in batch.problems:
            self._state.skip(problem.kind)
            self._show(problem)
        self._state.skip(DUPLICATE, len(batch.entries) - len(entries))
        for kind in batch.left_out:
            self._state.skip(kind)
        self._state.position = batch.position
        self._report(batch.bytes_read)

    def _report(self, bytes_read: int) -> None:
        now = time.monotonic()
        if now - self._reported >= _LINE_SECONDS:
            self._reported = now
            percent = 100 * bytes_read // max(sum(source.size for source in self._job.sources), 1)
            speed = self._num_tokens / (now - self._started)
            print(
                f"{percent}%  {self._num_documents:,} documents  {self._num_tokens:,} tokens  "
                f"{speed:,.0f} tokens/s",
                flush=True,
            )

    def _show(self, problem: BadInputError) -> None:
        if problem.is_harmless or self._num_shown == _MAX_PROBLEMS:
            return
        print(f"skipped: {problem}", flush=True)
        self._num_shown += 1
        if self._num_shown == _MAX_PROBLEMS:
            print("further problems are only counted", flush=True)

    def _is_new(self, digest: bytes) -> bool:
        short = digest[:_DIGEST]
        if short in self._digests:
            return False
        self._digests.add(short)
        self._hashes.write(short)
        return True

    def _append(self, entry: Entry, size: int, ids: Sequence[Tokens]) -> None:
        parts, num_prompt = self._encoder.document(ids)
        if not parts:
            self._state.skip(EMPTY_DOCUMENT)
            return
        writer = self._writers[split_of(entry.digest, self._threshold)]
        self._num_tokens += writer.append(parts, num_prompt, size, entry.origin)
        self._num_documents += 1

    def _save(self) -> None:
        for name, writer in self._writers.items():
            writer.save()
            self._state.splits[name] = writer.progress
        if self._config.dedup:
            sync_file(self._hashes)
            self._state.seen = len(self._digests)
        self._state.save(self._job.out)

    def _write_manifest(self) -> None:
        for writer in self._writers.values():
            writer.end_shard()
        self._save()
        sources = self._job.sources
        skipped = dict(sorted(self._state.skipped.items()))
        shards = {name: tuple(writer.progress.shards) for name, writer in self._writers.items()}
        if not any(shards.values()):
            left_out = f"; left out: {listed(skipped)}" if skipped else ""
            raise PrepareError(f"no document in {len(sources)} files{left_out}")
        splits = {name: SplitRecord(**totals(part), shards=part) for name, part in shards.items()}
        manifest = Manifest(
            self._tokenizer.info,
            self._config.has_prompts,
            splits,
            skipped,
            {"files": len(sources), "bytes": sum(source.size for source in sources)},
            dict(self._state.arguments),
            self._config.preference,
        )
        write_atomically(self._job.out / MANIFEST, manifest.to_json().encode())
        drop_leftovers(self._job.out)
        print("\n".join(self._summary(manifest)), flush=True)

    def _summary(self, manifest: Manifest) -> Iterator[str]:
        info = manifest.tokenizer
        yield (
            f"{'dataset':<12}{self._job.out}, tokenizer {info.kind}, vocabulary {info.vocab_size:,}"
        )
        conversations = self._job.conversations
        tokens = None if conversations is None else conversations.ends
        ends = "; ".join(describe(self._tokenizer, tokens))
        if ends:
            yield f"{'documents':<12}{ends}"
        if self._state.day is not None:
            yield (
                f"{'date':<12}the chat template writes the day {self._state.day}; --date "
                "names another"
            )
        yield from remarks(self._job)
        written = open_dataset(self._job.out)
        for name in SPLITS:
            split = manifest.splits[name]
            count = _counted(split.documents, "document")
            if manifest.pairs:
                count = _counted(split.documents // 2, "pair")
            loss = ""
            if manifest.prompts:
                loss = f", {written.splits[name].num_loss_tokens:,} of them with loss,"
            yield (
                f"{name:<12}{count}, {split.tokens:,} tokens{loss} in "
                f"{_counted(len(split.shards), 'shard')}, the longest document {split.longest:,}"
            )
        if not manifest.splits[VALIDATION].shards and manifest.arguments["held_out"]:
            yield f"{'':<12}nothing is held out: so few documents need a larger --held-out"
        if manifest.skipped:
            yield f"{'left out':<12}{listed(manifest.skipped)}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def remarks(job: Job) -> Iterator[str]:
    """Yields lines on how the inputs were read."""
    for note in sorted(job.conversations.notes if job.conversations else ()):
        yield f"{'note':<12}{note}"
    ignored = []
    if job.fields.ignored:
        ignored.append(f"the fields {', '.join(map(repr, sorted(job.fields.ignored)))}")
    for name, role in sorted(job.conversations.ignored if job.conversations else ()):
        ignored.append(f"{name!r} of the messages of {role!r}")
    if ignored:
        yield f"{'ignored':<12}{'; '.join(ignored)}"


def listed(skipped: Mapping[str, int]) -> str:
    """Returns the numbers of what was left out, by kind."""
    return ", ".join(f"{count:,} x {kind}" for kind, count in skipped.items())
