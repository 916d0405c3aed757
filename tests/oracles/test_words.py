"""Words by frequency: what is drawn, how likely it is, and what is refused.

Statistical tests: a fixed key, a false alarm once in 10^6 keys each.
"""

import jax
import numpy as np
import pytest
from scipy import stats

from dpjax import targets
from dpjax.oracles import words

FALSE_ALARM = 1e-6
TABLE = {"Smith": 40.0, "Ng": 30.0, "O'Hara": 20.0, "ng": 10.0}


def test_records_are_codes_of_words(key):
    drawn = jax.jit(words(TABLE), static_argnums=1)(key, 200)
    codes = targets.encode_text(TABLE, width=5)
    assert drawn.dtype == np.uint8
    assert set(map(tuple, drawn.tolist())) == set(map(tuple, codes.tolist()))
    counts = targets.letter_counts(width=5)(drawn)
    assert int(counts.sum()) == int((drawn > 0).sum())


def test_words_come_as_often_as_the_table_says(key):
    oracle = words(TABLE, width=2)  # sm, ng, oh, ng
    drawn = np.asarray(jax.jit(oracle, static_argnums=1)(key, 20_000))
    counts = [int((drawn[:, 0] == ord(first) - 96).sum()) for first in "sno"]
    assert stats.chisquare(counts, 20_000 * np.array([0.4, 0.4, 0.2])).pvalue > FALSE_ALARM
    assert stats.chisquare(counts, 20_000 * np.array([0.42, 0.38, 0.2])).pvalue < FALSE_ALARM


def test_probabilities_are_of_codes_and_add_up_to_one():
    oracle = words(TABLE, width=2)
    codes = targets.encode_text(["sm", "ng", "oh", "xy"], width=2)
    found = np.exp(jax.jit(jax.vmap(oracle.log_prob))(codes))
    np.testing.assert_allclose(found, [0.4, 0.4, 0.2, 0], atol=1e-6)


def test_no_word_of_a_long_table_is_forgotten():
    table = {f"{i}": 1 + i for i in range(90_000)} | {"a": 1}
    ends = np.asarray(words(table).choice.ends).astype(np.int64)
    shares = np.diff(ends, prepend=0, append=2**32)
    exact = np.array(list(table.values())) / sum(table.values())
    assert shares.min() > 0
    np.testing.assert_allclose(shares / 2**32, exact, atol=2**-32)


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (["Smith", "Ng"], TypeError, "frequencies must be a table"),
        ({"Smith": 1}, ValueError, "at least 2 words"),
        ({"1": 1, "2": 1}, ValueError, "a word with a letter"),
        ({"a": 1, "b": 0}, ValueError, "weights must be finite and above 0"),
    ],
)
def test_bad_tables_are_refused(table, error, message):
    with pytest.raises(error, match=message):
        words(table)
    with pytest.raises(ValueError, match="width must be"):
        words(TABLE, width=0)
