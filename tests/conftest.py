"""Settings of the whole test session, and the `ranks` fixture: ranks(n).run(fn, *args) calls fn on n ranks.

Test helpers are imported as `from tests.ranks import mesh`, in the tests and inside the ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch is imported anywhere: ranks are forked from this process, and a fork keeps no OpenMP threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "src", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import pytest  # noqa: E402

from meshtrain.launch import preload  # noqa: E402
from tests.ranks import RankPool, close_pools, pool  # noqa: E402

preload()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """ranks(n): n processes that share a default gloo group, started once for the session."""
    yield pool
    close_pools()
