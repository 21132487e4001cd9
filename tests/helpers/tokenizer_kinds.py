"""Small tokenizers of the kinds that models have, and texts that are hard for them."""

import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["hello world this is a test of tokens, isn't it? 0123456789 {}", "中国我的说道 今天天气很好"] * 3
UNKNOWN = "<unk>"
SPECIAL = (UNKNOWN, "<s>", "</s>")
PIECES = [
    "hello world", "中国我的说道", "你好世界今天天气很好。", "สวัสดีครับผมชื่อสมชาย", "👩‍👩‍👧‍👦🏳️‍🌈👍🏽",
    "\x00\x01\x1b\t\n\r\x7f", "e\u0301a\u0308n\u0303", "   ", " leading", "</s>", "<s>", "▁", "\ufffd", "€€€€",
    "é", "مرحبا", "नमस्ते", " .", "n't",
]  # fmt: skip


def texts(count, seed=0):
    """Texts of one to six pieces of those above, each cut somewhere."""
    draw = random.Random(seed)
    for _ in range(count):
        pieces = (draw.choice(PIECES) for _ in range(draw.randint(1, 6)))
        yield "".join(piece[: draw.randint(1, len(piece))] for piece in pieces)


def _begin_token(tokenizer):
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    begin = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=begin
    )
    return tokenizer


def byte_level():
    """Of GPT-2 and Llama 3: tokens are bytes, whatever the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _begin_token(tokenizer)


def _bytes_first(words):
    return [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]


def byte_fallback():
    """Of Llama 2: words, and bytes for characters that no word has."""
    letters = list("▁helowrdtsianc中的")
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "w"), ("o", "r")]
    names = _bytes_first([*letters, *("".join(pair) for pair in merges)])
    vocabulary = {name: place for place, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _begin_token(tokenizer)


def unigram():
    """Of sentencepiece: words by their probabilities, spaces as `▁`, no bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=list(SPECIAL), unk_token=UNKNOWN, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _begin_token(tokenizer)


def unigram_bytes():
    """Of sentencepiece with bytes for characters that no word has."""
    names = _bytes_first(["▁", "▁hello", "hello", "a", "b", "国"])
    scored = [(name, -float(place)) for place, name in enumerate(names)]
    tokenizer = Tokenizer(models.Unigram(scored, 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _begin_token(tokenizer)


def word_pieces():
    """Of BERT: decoding puts spaces between words, and removes some of them."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _begin_token(tokenizer)


KINDS = {make.__name__: make for make in (byte_level, byte_fallback, unigram, unigram_bytes, word_pieces)}


def save(tokenizer, directory: Path):
    """Into `tokenizer.json` of a model directory."""
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
