"""A tokenizer read from a `tokenizer.json` (the format of the `tokenizers` package, which is needed to run
it).

Not here: which tokenizer a flag means (`tokenizer.py`).
"""

import hashlib
import json
import logging
import shutil
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshtrain.errors import ContractError, Refused

_logger = logging.getLogger(__name__)

# What a model directory may hold beside tokenizer.json that belongs to the tokenizer.
_COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


class FileTokenizer:
    """Any `tokenizer.json`. The end-of-document token is the one that the files beside it name, in this
    order: `eos_token` of tokenizer_config.json, then of special_tokens_map.json, `eos_token_id` of
    generation_config.json, then of config.json (the first, where it is a list). If none does, `eos_id` is
    None and a warning is logged.

    Special tokens that a text spells out become those tokens, as `transformers` does by default.
    """

    def __init__(self, path: str | Path) -> None:
        """`path` is the tokenizer.json itself. Raises Refused if it, or a file beside it, is unusable."""
        try:
            from tokenizers import Tokenizer as Engine
        except ImportError as error:
            raise Refused(
                f"the tokenizer {str(path)!r} needs the package `tokenizers`, which is not installed: "
                "pip install 'meshtrain[data]', or use the byte tokenizer (--tokenizer bytes)"
            ) from error
        self.path = Path(path)
        try:
            raw = self.path.read_bytes()
            self._engine = Engine.from_str(raw.decode("utf-8"))
        except Exception as error:  # the package raises bare Exception for a broken file
            raise Refused(
                f"tokenizer {str(path)!r}: `tokenizers` cannot load it: {error}. Give the tokenizer.json of "
                "a fast tokenizer, as transformers' save_pretrained writes it"
            ) from error
        # A file saved with truncation or padding would cut or pad the corpus in silence.
        self._engine.no_truncation()
        self._engine.no_padding()
        ids = self._engine.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise Refused(f"tokenizer {str(path)!r}: its vocabulary is empty. Give a trained tokenizer.json")
        self.vocab_size: int = max(ids) + 1  # not the number of tokens: ids may have gaps
        self.eos_id: int | None = self._find_eos()
        self.fingerprint: str = hashlib.sha256(raw + f"\neos {self.eos_id}".encode()).hexdigest()

    def _find_eos(self) -> int | None:
        for name, content in self._json_beside("tokenizer_config.json", "special_tokens_map.json"):
            token = content.get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token is None:
                continue
            found = self._engine.token_to_id(token) if isinstance(token, str) else None
            if found is None:
                raise Refused(
                    f"{self.path.with_name(name)}: eos_token {token!r} is not in the vocabulary of "
                    f"{self.path}. Name a token of that vocabulary, or take the entry out"
                )
            return found
        for name, content in self._json_beside("generation_config.json", "config.json"):
            value = content.get("eos_token_id")
            value = value[0] if isinstance(value, list) and value else value
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self.vocab_size:
                raise Refused(
                    f"{self.path.with_name(name)}: eos_token_id {value!r} is not an id of {self.path} "
                    f"(0..{self.vocab_size - 1}). Put the right id there, or take the entry out"
                )
            return value
        _logger.warning(
            "%s: no file beside it names an end-of-document token, so documents will follow one another "
            "without a "
            'separator; put {"eos_token": "..."} in a tokenizer_config.json beside it',
            self.path,
        )
        return None

    def _json_beside(self, *names: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in names:
            path = self.path.with_name(name)
            if not path.is_file():
                continue
            try:
                content = json.loads(path.read_bytes())
            except (OSError, ValueError) as error:
                raise Refused(f"{path}: cannot be read as JSON: {error}. Repair or remove it") from error
            if not isinstance(content, dict):
                raise Refused(f"{path}: holds a {type(content).__name__}, not an object. Repair or remove it")
            yield name, content

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without any begin or end token."""
        return self._engine.encode(text, add_special_tokens=False).ids

    def encode_packed(self, texts: Sequence[str], typecode: str) -> list[bytes]:
        """See `Tokenizer.encode_packed`; the texts are encoded in parallel."""
        # Encodings are large (offsets, type ids, ...), so each is reduced to its ids at once.
        return [
            array(typecode, encoding.ids).tobytes()
            for encoding in self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens. Raises ContractError for an id outside of the
        vocabulary."""
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ContractError(
                    f"token id {token} is not in the vocabulary 0..{self.vocab_size - 1} of {self.path}; "
                    "decode ids that come from this tokenizer"
                )
        return self._engine.decode(list(ids), skip_special_tokens=True)

    def save(self, directory: str | Path) -> None:
        """Copy tokenizer.json and the tokenizer's files beside it; write tokenizer_config.json where there is
        none."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", *_COMPANIONS):
            source = self.path if name == "tokenizer.json" else self.path.with_name(name)
            target = folder / name
            if source.is_file() and not (target.exists() and target.samefile(source)):
                shutil.copyfile(source, target)
        if not self.path.with_name("tokenizer_config.json").is_file():
            content: dict[str, Any] = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
            }
            if self.eos_id is not None:
                content["eos_token"] = self._engine.id_to_token(self.eos_id)
            text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
            (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
