"""Chained block keys, and draws keyed by names."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest as xxh3

from mooncake_lab.core import block_keys, keyed_uniform

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=60).map(lambda ids: np.array(ids, dtype=np.int32))
SIZES = st.integers(1, 17)
NAMES = st.lists(st.one_of(st.integers(), st.text(max_size=5), st.binary(max_size=5)), max_size=4)


class TestLaws:
    @given(TOKENS, TOKENS, SIZES)
    def test_equal_keys_exactly_where_prefixes_are_equal(self, a, b, size):
        """Two prompts share key i if and only if their first i + 1 blocks hold the same tokens."""
        keys_a, keys_b = (block_keys(tokens, size) for tokens in (a, b))
        for i, (key_a, key_b) in enumerate(zip(keys_a, keys_b, strict=False)):
            same = a[: (i + 1) * size].tolist() == b[: (i + 1) * size].tolist()
            assert (key_a == key_b) == same

    @given(TOKENS, TOKENS, SIZES)
    def test_appending_tokens_keeps_the_keys_of_whole_blocks(self, a, b, size):
        """The keys of whole blocks do not depend on what follows."""
        whole = block_keys(a, size, partial=False)
        assert block_keys(np.concatenate([a, b]), size)[: len(whole)] == whole

    @given(TOKENS, SIZES)
    def test_one_key_a_block(self, tokens, size):
        """There is one key a block, the partial last one only when asked for."""
        assert len(block_keys(tokens, size)) == -(-len(tokens) // size)
        assert len(block_keys(tokens, size, partial=False)) == len(tokens) // size

    @given(TOKENS.filter(len), SIZES)
    def test_namespaces_share_nothing(self, tokens, size):
        """A block of one model is never found by another."""
        assert not set(block_keys(tokens, size, namespace=b"a")) & set(block_keys(tokens, size, namespace=b"b"))


class TestDefinition:
    def test_matches_the_chain_written_out(self):
        """key[0] = H(H(namespace) || block 0) and key[1] = H(key[0] || block 1), tokens as little-endian int32."""
        tokens = np.arange(1, 6, dtype=np.int32)
        first = xxh3(xxh3(b"m") + tokens[:4].astype("<i4").tobytes())
        second = xxh3(first + tokens[4:].astype("<i4").tobytes())
        assert block_keys(tokens, 4, namespace=b"m") == [first, second]


class TestKeyedUniform:
    @given(st.integers(), NAMES)
    def test_is_a_function_into_the_unit_interval(self, seed, names):
        """The same seed and names give the same number, from 0 up to but not 1."""
        draw = keyed_uniform(seed, *names)
        assert draw == keyed_uniform(seed, *names)
        assert 0 <= draw < 1

    def test_is_uniform(self):
        """Over many ids each tenth of the interval gets its tenth (chi-squared, 9 degrees, p = 0.001)."""
        draws = np.array([keyed_uniform(7, i) for i in range(20_000)])
        counts = np.histogram(draws, bins=10, range=(0, 1))[0]
        assert ((counts - 2000) ** 2 / 2000).sum() < 27.9
