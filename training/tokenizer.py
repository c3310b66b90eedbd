"""The tokenizer: a word of the frame is one token, everything else is one token a byte.

Spelling, reversing and sorting need letters, so a BPE merge inside "lantern" would hurt; fixed sentences need
few tokens, so "multiplication" should not cost fourteen. Both at once: a byte-level BPE *without merges* and
with `ignore_merges`, where a pre-token that is in the vocabulary is one token and any other falls to its bytes.
The 256 bytes are all there, so that any UTF-8 text survives the round trip.

The whole pieces are the most frequent pre-tokens of a generated sample, content words left out.
"""

import json
from collections import Counter
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from training import dialogue, grammar, skills, words

VOCAB_SIZE = 512
CONTEXT = 2048

# digits one by one; " x " and ", " of the answers; words with their space; runs of punctuation; white space
SPLIT = r" x (?=[0-9])|[0-9]| ?\p{L}+| ?[^\s\p{L}\p{N}]+ ?|\s|\p{N}"
SPECIAL = (dialogue.END_OF_TEXT, dialogue.IM_START, dialogue.IM_END)
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = range(VOCAB_SIZE - 3, VOCAB_SIZE)


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def frame_pieces(limit: int, draws: int = 2000, seed: int = 0) -> list[str]:
    """The `limit` most frequent pre-tokens (in byte-level letters) that are no content word."""
    content = {
        word
        for source in (words.WORDS, words.NAMES, words.CITIES, grammar.CONTENT_WORDS)
        for text in source
        for word in (text, text.capitalize())
    }
    rng = Random(seed)
    counts: Counter[str] = Counter()
    pre = _pre_tokenizer()
    texts = Counter({" ".join(dialogue.SYSTEM_PROMPTS): 100})
    for name in skills.DRAWS:
        for _ in range(draws):
            example = skills.draw(name, rng, "train")
            text = f"{example.prompt}\n{example.answer}"
            texts[text] += 1
    for text, times in texts.items():
        for piece, _ in pre.pre_tokenize_str(text):
            counts[piece] += times
    whole = ["system", "user", "assistant"] + [
        piece
        for piece, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if len(piece) > 1 and piece.removeprefix("Ġ") not in {"", "system", "user", "assistant", *content}
    ]
    return whole[:limit]


def build() -> Tokenizer:
    """The tokenizer, the same on every run."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *frame_pieces(VOCAB_SIZE - len(letters) - len(SPECIAL))]
    if len(pieces) + len(SPECIAL) != VOCAB_SIZE:
        raise ValueError(f"vocabulary: {VOCAB_SIZE} tokens wanted, {len(pieces) + len(SPECIAL)} found")
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


def save(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    build().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": None,
        "eos_token": dialogue.IM_END,
        "pad_token": dialogue.END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [dialogue.IM_START, dialogue.IM_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": dialogue.CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
