"""Data: text -> tokens -> batches.

tokenizer = load_tokenizer(None)
dataset = TokenDataset(prepare_tokens(None, tokenizer), seq_len=128, seed=0)
for batch in dataset.batch(step, global_batch=16, dp=4, dp_rank=rank): ...
"""

from meshtrain.data.batches import Batch, Batching, TokenDataset, check_batching
from meshtrain.data.file_tokenizer import FileTokenizer
from meshtrain.data.sources import find_files
from meshtrain.data.tokenizer import ByteTokenizer, Tokenizer, check_vocab_size, load_tokenizer
from meshtrain.data.tokens import TokenFile, open_tokens, prepare_tokens

__all__ = [
    "Batch",
    "Batching",
    "ByteTokenizer",
    "FileTokenizer",
    "TokenDataset",
    "TokenFile",
    "Tokenizer",
    "check_batching",
    "check_vocab_size",
    "find_files",
    "load_tokenizer",
    "open_tokens",
    "prepare_tokens",
]
