"""Tokenizers: text to token ids and back, and the files that other tools need to do the same.

Two kinds: the byte tokenizer, which needs nothing, and any `tokenizer.json`. Not here: training a tokenizer,
chat templates, and reading tokens from disk (`tokens.py`). No beginning-of-sequence token is ever added."""

import hashlib
import json
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from meshtrain.data.file_tokenizer import FileTokenizer
from meshtrain.data.paths import named_path
from meshtrain.errors import ContractError, Refused


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of meshtrain asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: every id is in 0..vocab_size-1."""

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document, or None when the tokenizer has none."""

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of all that decides the ids of a text; equal fingerprints give equal ids."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without any begin or end token."""

    def encode_packed(self, texts: Sequence[str], typecode: str) -> list[bytes]:
        """The ids of each text as raw native unsigned integers: `typecode` "H" is 2 bytes an id, "I" is 4."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens are left out, bytes that are not UTF-8 become U+FFFD."""

    def save(self, directory: str | Path) -> None:
        """Write the files with which `transformers.AutoTokenizer` opens `directory` as this tokenizer."""


class ByteTokenizer:
    """One token a byte of the UTF-8 text: ids 0..255 are the bytes, 256 ends a document (`<|endoftext|>`).

    Ids 257..319 are reserved special tokens that no text yields. They round the vocabulary up to 320 = 64 x
    5, so that it divides evenly over every power-of-two mesh of up to 64 ranks."""

    EOS_TOKEN = "<|endoftext|>"
    vocab_size: int = 320
    eos_id: int | None = 256

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the tokenizer's definition."""
        return hashlib.sha256(json.dumps(_byte_tokenizer_json(), sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The bytes of `text` as ids. `<|endoftext|>` in a text is 13 bytes like any other, never the special
        token."""
        return list(text.encode("utf-8"))

    def encode_packed(self, texts: Sequence[str], typecode: str) -> list[bytes]:
        """See `Tokenizer.encode_packed`; one slice assignment a text, with no loop over its bytes."""
        width = array(typecode).itemsize
        offset = 0 if array(typecode, [1]).tobytes()[0] == 1 else width - 1
        packed = []
        for text in texts:
            raw = text.encode("utf-8")
            buffer = bytearray(width * len(raw))
            buffer[offset::width] = raw
            packed.append(bytes(buffer))
        return packed

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, as in `Tokenizer.decode`. Raises ContractError for an id outside of the
        vocabulary."""
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ContractError(
                    f"token id {token} is not in the byte tokenizer's vocabulary 0..{self.vocab_size - 1}; "
                    "decode ids that come from this tokenizer or from a model of its vocab_size"
                )
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json; `tokenizers` and `transformers` then give the same
        ids."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.EOS_TOKEN,
            "clean_up_tokenization_spaces": False,
            # Without it a text that spells out a special token would become that token.
            "split_special_tokens": True,
            "model_max_length": 1_000_000_000,
        }
        for name, content in (("tokenizer.json", _byte_tokenizer_json()), ("tokenizer_config.json", config)):
            (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (as introduced by GPT-2): printable
    Latin-1 stands for itself, the other 68 bytes take the code points from 256 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in own}
    others = (byte for byte in range(256) if byte not in alphabet)
    alphabet.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [alphabet[byte] for byte in range(256)]


@cache
def _byte_tokenizer_json() -> dict[str, Any]:
    """The content of tokenizer.json: a byte-level vocabulary whose ids are the bytes, and no merges."""
    specials = [ByteTokenizer.EOS_TOKEN] + [f"<|reserved_{i}|>" for i in range(257, ByteTokenizer.vocab_size)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256 + i, "content": token, **flags} for i, token in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_alphabet())},
            "merges": [],
        },
    }


def load_tokenizer(spec: str | Path | None) -> Tokenizer:
    """The tokenizer that `spec` names.

    None or "bytes": the byte tokenizer. A path: a tokenizer.json, or a folder that holds one (such as a model
    directory). A file that is the byte tokenizer's own is recognised and needs no extra package.
    Raises Refused when there is no such tokenizer, or it cannot be read.
    """
    if spec is None or str(spec) == "bytes":
        return ByteTokenizer()
    ways_out = 'Give "bytes", the path of a tokenizer.json, or a folder that holds one'
    path = named_path(spec, "tokenizer", ways_out)
    if path.is_dir():
        folder, path = path, path / "tokenizer.json"
        if not path.is_file():
            found = sorted(
                p.name for p in folder.iterdir() if p.name.startswith(("token", "vocab", "merges", "spiece"))
            )
            hint = ""
            if found:
                hint = (
                    f" (it has {', '.join(found)}: an older format, which transformers.AutoTokenizer"
                    f".from_pretrained({str(folder)!r}).save_pretrained(...) turns into a tokenizer.json)"
                )
            raise Refused(f"tokenizer {str(spec)!r}: the folder holds no tokenizer.json{hint}. {ways_out}.")
    elif not path.exists():
        raise Refused(
            f"tokenizer {str(spec)!r}: no such file or folder (names of models on a hub are not "
            f"downloaded). {ways_out}."
        )
    elif path.suffix != ".json":
        raise Refused(f"tokenizer {str(spec)!r}: not a .json file. {ways_out}.")
    try:
        raw = path.read_bytes()
        content = json.loads(raw)
    except (OSError, ValueError) as error:
        raise Refused(f"tokenizer {str(path)!r}: cannot be read as JSON: {error}. {ways_out}.") from error
    if content == _byte_tokenizer_json():
        return ByteTokenizer()
    return FileTokenizer(path)


def check_vocab_size(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise Refused if the tokenizer makes ids that a model of `vocab_size` rows has no embedding for."""
    if tokenizer.vocab_size > vocab_size:
        raise Refused(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model's vocab_size is {vocab_size}, so "
            f"ids from {vocab_size} on have no embedding. Use the tokenizer that belongs to the model "
            f"(--tokenizer), or a model with vocab_size >= {tokenizer.vocab_size}"
        )
