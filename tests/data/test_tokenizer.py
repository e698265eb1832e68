"""Tokenizers: the byte tokenizer agrees with its own exported files, and any tokenizer.json is read
rightly."""

import json
import random
from array import array
from pathlib import Path

import pytest

from meshtrain.data import ByteTokenizer, FileTokenizer, Tokenizer, check_vocab_size, load_tokenizer
from meshtrain.errors import ContractError, Refused

EDGES = [
    "",
    " ",
    "  two  spaces ",
    "\n\n\t",
    "a'b don't",
    "<|endoftext|>",
    "é漢😀\u0000",
    "\ufeffx",
    "x" * 300,
]


def random_texts(count: int) -> list[str]:
    chosen = random.Random(0)
    ranges = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    return [
        "".join(chr(chosen.randint(*chosen.choice(ranges))) for _ in range(chosen.randint(1, 60))) for _ in range(count)
    ]


@pytest.fixture
def bpe_file(tmp_path: Path) -> Path:
    """A small trained byte-level tokenizer.json with an <eos> token, alone in a folder."""
    tokenizers = pytest.importorskip("tokenizers")
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(["the cat sat on the mat, the hat and the bat"] * 20, trainer)
    engine.enable_truncation(4)
    engine.enable_padding(length=4)
    folder = tmp_path / "bpe"
    folder.mkdir()
    engine.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_byte_tokenizer_is_the_bytes() -> None:
    tokenizer = ByteTokenizer()
    for text in EDGES + random_texts(50):
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_id == 256 < tokenizer.vocab_size
    assert tokenizer.decode([72, 105, 256, 319, 33]) == "Hi!"
    assert tokenizer.decode([0xFF, 65]) == "\ufffdA"
    assert isinstance(tokenizer, Tokenizer)


@pytest.mark.parametrize("typecode", ["H", "I"])
def test_packed_ids_are_the_ids(typecode: str, bpe_file: Path) -> None:
    for tokenizer in (ByteTokenizer(), load_tokenizer(bpe_file)):
        texts = EDGES + random_texts(20)
        packed = tokenizer.encode_packed(texts, typecode)
        assert [list(array(typecode, raw)) for raw in packed] == [tokenizer.encode(text) for text in texts]


def test_saved_byte_tokenizer_gives_the_same_ids_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = ByteTokenizer()
    ours.save(tmp_path)
    for config in (None, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}):
        if config:  # AutoTokenizer looks at the model's config too, and an export has one
            (tmp_path / "config.json").write_text(json.dumps(config))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert theirs.eos_token_id == ours.eos_id
        assert len(theirs) == ours.vocab_size
        for text in EDGES + random_texts(200):
            ids = theirs(text)["input_ids"]
            assert ids == ours.encode(text)
            assert theirs.decode(ids) == text == ours.decode(ids)
        chosen = random.Random(2)
        for _ in range(200):
            ids = [chosen.randrange(ours.vocab_size) for _ in range(30)]
            assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)


def test_saved_byte_tokenizer_gives_the_same_ids_in_tokenizers(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    ours = ByteTokenizer()
    ours.save(tmp_path)
    engine = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert engine.get_vocab_size() == ours.vocab_size
    for text in [text for text in EDGES if "<|" not in text] + random_texts(100):
        assert engine.encode(text).ids == ours.encode(text)
        assert engine.decode(ours.encode(text)) == text


def test_a_saved_byte_tokenizer_is_recognised_without_extra_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ByteTokenizer().save(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    assert isinstance(load_tokenizer(tmp_path / "tokenizer.json"), ByteTokenizer)
    assert isinstance(load_tokenizer(None), ByteTokenizer)
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)


def test_file_tokenizer_reads_whole_texts_whatever_truncation_was_saved(bpe_file: Path) -> None:
    """A file saved with truncation to 4 tokens must not cut the corpus to 4 tokens a document."""
    tokenizer = FileTokenizer(bpe_file)
    text = "the cat sat on the mat and the mat was flat, said the cat"
    assert len(tokenizer.encode(text)) > 8
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("t")) == 1
    assert len(tokenizer.encode("the the")) < 7, "merges are used"
    assert tokenizer.vocab_size == 270


@pytest.mark.parametrize(
    ("name", "content", "eos"),
    [
        ("tokenizer_config.json", {"eos_token": "<eos>"}, 1),
        ("tokenizer_config.json", {"eos_token": {"content": "<eos>", "lstrip": False}}, 1),
        ("tokenizer_config.json", {"eos_token": None}, None),
        ("special_tokens_map.json", {"eos_token": "<pad>"}, 0),
        ("generation_config.json", {"eos_token_id": [1, 0]}, 1),
        ("config.json", {"eos_token_id": 7}, 7),
        ("config.json", {}, None),
    ],
)
def test_eos_is_read_from_the_files_beside(bpe_file: Path, name: str, content: dict, eos: int | None) -> None:
    bpe_file.with_name(name).write_text(json.dumps(content))
    assert load_tokenizer(bpe_file.parent).eos_id == eos


def test_the_tokenizers_own_files_win_over_the_models(bpe_file: Path) -> None:
    bpe_file.with_name("config.json").write_text('{"eos_token_id": 7}')
    bpe_file.with_name("tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    assert load_tokenizer(bpe_file).eos_id == 1


def test_no_eos_is_said(bpe_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_tokenizer(bpe_file).eos_id is None
    assert "without a separator" in caplog.text


def test_file_tokenizer_saves_what_transformers_opens(bpe_file: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    bpe_file.with_name("config.json").write_text('{"eos_token_id": 1}')
    ours = load_tokenizer(bpe_file)
    ours.save(tmp_path / "export")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert theirs.eos_token_id == 1
    for text in EDGES[:-1] + random_texts(50):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    again = load_tokenizer(tmp_path / "export")
    assert again.fingerprint == ours.fingerprint
    assert not (tmp_path / "export" / "config.json").exists(), "the model's config is not the tokenizer's to write"


def test_file_tokenizer_copies_its_companions(bpe_file: Path, tmp_path: Path) -> None:
    bpe_file.with_name("tokenizer_config.json").write_text('{"eos_token": "<eos>", "x": 1}')
    bpe_file.with_name("chat_template.jinja").write_text("{{ messages }}")
    load_tokenizer(bpe_file).save(tmp_path / "out")
    load_tokenizer(tmp_path / "out").save(tmp_path / "out")  # onto itself: nothing is lost
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["x"] == 1
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == bpe_file.read_bytes()


def test_fingerprint_tells_tokenizers_apart(bpe_file: Path) -> None:
    without = load_tokenizer(bpe_file).fingerprint
    bpe_file.with_name("config.json").write_text('{"eos_token_id": 1}')
    assert len({without, load_tokenizer(bpe_file).fingerprint, ByteTokenizer().fingerprint}) == 3
    assert ByteTokenizer().fingerprint == ByteTokenizer().fingerprint


def test_ids_outside_of_the_vocabulary_are_a_contract_error(bpe_file: Path) -> None:
    for tokenizer in (ByteTokenizer(), load_tokenizer(bpe_file)):
        for bad in (-1, tokenizer.vocab_size):
            with pytest.raises(ContractError, match=rf"token id {bad} is not in"):
                tokenizer.decode([65, bad])


@pytest.mark.parametrize(
    ("files", "spec", "parts"),
    [
        ({}, "gpt2", ["'gpt2'", "no such file", "not downloaded", '"bytes"']),
        ({"d/model.safetensors": ""}, "d", ["holds no tokenizer.json", "Give"]),
        ({"d/vocab.json": "{}", "d/merges.txt": ""}, "d", ["merges.txt, vocab.json", "save_pretrained"]),
        ({"t.model": "x"}, "t.model", ["not a .json file"]),
        ({"t.json": "{"}, "t.json", ["cannot be read as JSON"]),
        ({"t.json": "{}"}, "t.json", ["`tokenizers` cannot load it", "save_pretrained"]),
        ({"t.json": b"\xff"}, "t.json", ["cannot be read as JSON"]),
    ],
)
def test_bad_tokenizers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict, spec: str, parts: list[str]
) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(Refused) as caught:
        load_tokenizer(spec)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("tokenizer_config.json", '{"eos_token": "</s>"}', ["eos_token '</s>' is not in the vocabulary"]),
        ("config.json", '{"eos_token_id": 300}', ["eos_token_id 300 is not an id", "0..269"]),
        ("config.json", '{"eos_token_id": true}', ["eos_token_id True"]),
        ("generation_config.json", "[]", ["holds a list, not an object"]),
        ("special_tokens_map.json", "{", ["cannot be read as JSON", "Repair or remove it"]),
    ],
)
def test_bad_files_beside_a_tokenizer_are_refused(bpe_file: Path, name: str, content: str, parts: list[str]) -> None:
    bpe_file.with_name(name).write_text(content)
    with pytest.raises(Refused) as caught:
        load_tokenizer(bpe_file)
    for part in [name, *parts]:
        assert part in str(caught.value)


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.json").write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(Refused, match=r"pip install 'meshtrain\[data\]'.*--tokenizer bytes"):
        load_tokenizer(tmp_path / "t.json")


def test_a_vocabulary_larger_than_the_models_is_refused() -> None:
    check_vocab_size(ByteTokenizer(), 320)
    with pytest.raises(Refused, match=r"320 ids.*vocab_size is 256.*>= 320"):
        check_vocab_size(ByteTokenizer(), 256)
