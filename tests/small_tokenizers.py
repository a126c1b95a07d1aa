"""Minimal tokenizers of the common kinds."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = "Grüße, 世界! 🙂🙃 naïve café — two  spaces\n\tand a tab"


def byte_level(texts=(TEXT,), size=280, special=()):
    """Returns a tokenizer.json like GPT-2's: byte level."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=[*special]
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str().encode()


def byte_fallback():
    """Returns one like Llama 2's: pieces with a mark for spaces, byte fallback, and a BOS token."""
    pieces = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"Graetwospcdnbüß,!▁",
    ]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer.to_str().encode()


CHAT_TOKENS = ["<|begin|>", "<|end|>", "<|turn|>", "<|stop|>"]


def begins_texts():
    """Returns one like Llama 3's: byte level, with chat tokens, and a post-processor that adds
    BOS.
    """
    tokenizer = Tokenizer.from_str(byte_level().decode())
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CHAT_TOKENS]
    )
    first = CHAT_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
    )
    return tokenizer.to_str().encode()
