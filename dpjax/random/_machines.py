"""State machines that draw exactly by rejection, one in every lane, and the loop that runs them.

A lane asks for a uniform integer below a bound of its own, and the answer decides what it asks
next; a sample is a walk down a decision tree whose every branch has rational probability. Why the
samples are exact:

*Uniform integers* (Lemire 2019, Lemma 4.1). Among the words w for which w n mod 2^32 is at least
2^32 mod n, floor(w n / 2^32) takes each value below n equally often, floor(2^32 / n) times. Other
words are thrown away, and the lane asks again.

*Bernoulli(exp(-gamma))*, 0 <= gamma <= 1 (Canonne, Kamath and Steinke 2020, Algorithm 1; von
Neumann's method). Ask for independent Bernoulli(gamma / K), K = 1, 2, ..., until one is 0: the
chance to pass K is gamma^K / K!, so K is odd at the end with probability 1 - gamma + gamma^2 / 2 -
... = exp(-gamma). Where gamma is a product of rationals, so is gamma / K: it takes one question for
each factor, and no product is ever formed. Larger gammas are sums: all of floor(gamma) trials of
exp(-1) and one of the rest must succeed.

*Geometric and discrete Laplace* of scale t / s (the same, Algorithm 2). U below t, kept with
probability exp(-U / t), and the number V of successes of exp(-1) before a failure give X = U + t V
with P(X) ~ exp(-X / t); so floor(X / s) has P(n) ~ exp(-n s / t). With a fair sign, and minus zero
thrown away, it is the discrete Laplace.

*Discrete Gaussian* of variance v (after Karney 2016, Algorithm D). Let t = floor(sqrt(2 v)), at
least 1, and b = t^2 / (2 v). The number V of successes of exp(-b) before a failure, kept if
V (V - 1) more trials of it succeed, has P(V) ~ exp(-b V^2). With U uniform below t and x = U / t,
the pair is kept if 2 V trials of exp(-b x) and one of exp(-b x x) succeed. In all that is
exp(-b (V + x)^2) = exp(-n^2 / (2 v)) for n = U + t V, and every n >= 0 is one pair. Again with a
sign, and minus zero thrown away. No number here exceeds 2^32; Algorithm 3 of Canonne, Kamath and
Steinke, which has the same output, asks for products of four parameters.

Lanes draw one sample after another, so that the slowest walk does not hold up all others. Every
lane draws as many, so how long a walk takes does not bias what is kept. But it takes longer for
some values than for others: where a clock can be read, use the tables.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax import _limbs
from dpjax._limbs import Limbs

# What a cache holds; on an accelerator there is room for more, but bits must not depend on it.
_LANES = 2**14
# Of an int32.
_LARGEST = 2**31 - 1


class Machine(Protocol):
    """Draws one sample in every lane.

    `start(lanes)` is the state before the first question; `bound(state)` says what each lane asks
    for, a uniform integer below it; `advance(state, u)` takes the answers and returns the next
    state, which lanes have their sample, and the words that the sample is made of.
    """

    records: int

    def start(self, lanes: int) -> Any: ...

    def bound(self, state: Any) -> jax.Array: ...

    def advance(self, state: Any, u: jax.Array) -> tuple[Any, jax.Array, tuple[jax.Array, ...]]: ...


class _Trial(NamedTuple):
    """A trial of exp(-gamma) on its way: the next question is about one factor of gamma / K.

    Attributes:
        whole: trials of exp(-1) that come first.
        k: K.
        factor: which factor is asked for: 0 for 1 / K, then from the last of gamma's down to 1.
    """

    whole: jax.Array
    k: jax.Array
    factor: jax.Array


# (numerators, denominators) of the factors of gamma, factor 1 first.
_Factors = tuple[tuple[jax.Array, jax.Array], ...]


def _begin(whole: jax.Array, count: jax.Array) -> _Trial:
    """A trial of exp(-whole - gamma) with `count` factors of gamma; without any, gamma is 1.

    The factor 1 / K is left out at K = 1; so is all of K = 1 where gamma is 1.
    """
    # What would be asked there is certain, and a word of randomness is what a round costs.
    factor = jnp.where(whole > 0, np.uint32(0), count)
    return _Trial(whole, jnp.where(factor == 0, np.uint32(2), np.uint32(1)), factor)


def _ask(trial: _Trial, factors: _Factors) -> jax.Array:
    bound = trial.k
    for index, (_, denominator) in enumerate(factors, 1):
        bound = jnp.where(trial.factor == index, denominator, bound)
    return bound


def _answer(
    trial: _Trial, factors: _Factors, count: jax.Array, u: jax.Array
) -> tuple[_Trial, jax.Array, jax.Array]:
    """The trial after an answer, whether it has ended, and whether with success."""
    passing = jnp.ones_like(u)
    for index, (numerator, _) in enumerate(factors, 1):
        passing = jnp.where(trial.factor == index, numerator, passing)
    passed = u < passing
    # A factor that fails ends the trial, at this K: success is an odd one. A success of exp(-1) is
    # followed by the next trial of the sum, a failure by none.
    success = ~passed & (trial.k % np.uint32(2) == 1)
    again = success & (trial.whole > 0)

    # A factor that passes leads to the next one below, and from the last one to K + 1.
    count_now = jnp.where(trial.whole > 0, np.uint32(0), count)
    last = (trial.factor == 1) | (count_now == 0)
    k = trial.k + _bit(last)
    factor = jnp.where(trial.factor == 0, count_now, trial.factor - np.uint32(1))
    factor = jnp.where(last, np.uint32(0), factor)
    following = _choose(
        again, _begin(trial.whole - np.uint32(1), count), _Trial(trial.whole, k, factor)
    )
    return following, ~passed & ~again, success & ~again


class Coin:
    """Bernoulli(a / b)."""

    records = 1

    def __init__(self, a: jax.Array, b: jax.Array) -> None:
        self.a, self.b = a, b

    def start(self, lanes: int) -> tuple[()]:
        return ()

    def bound(self, state: tuple[()]) -> jax.Array:
        return self.b

    def advance(self, state: tuple[()], u: jax.Array) -> Any:
        return (), jnp.ones(u.shape, bool), ((u < self.a).astype(jnp.uint32),)


class ExponentialCoin:
    """Bernoulli(exp(-a / b)); the state is its one trial."""

    records = 1

    def __init__(self, a: jax.Array, b: jax.Array) -> None:
        self.whole, self.factors = a // b, ((a % b, b),)

    def start(self, lanes: int) -> _Trial:
        return _begin(jnp.full((lanes,), self.whole), jnp.ones((lanes,), jnp.uint32))

    def bound(self, state: _Trial) -> jax.Array:
        return _ask(state, self.factors)

    def advance(self, state: _Trial, u: jax.Array) -> Any:
        trial, ended, success = _answer(state, self.factors, jnp.ones_like(u), u)
        return trial, ended, (success.astype(jnp.uint32),)


class _LaplaceState(NamedTuple):
    """The phase, 2 U + sign, V as far as it is counted, and the trial on its way."""

    phase: jax.Array
    twice: jax.Array
    v: jax.Array
    trial: _Trial


class Laplace:
    """X = U + t V and a sign, as 2 U + sign and V; minus X < s is thrown away if it is signed."""

    records = 2
    draw, keep, count = (np.uint32(phase) for phase in range(3))

    def __init__(self, t: jax.Array, s: jax.Array, signed: jax.Array) -> None:
        self.t, self.s, self.signed = t, s, signed

    def start(self, lanes: int) -> _LaplaceState:
        zeros = jnp.zeros((lanes,), jnp.uint32)
        return _LaplaceState(zeros, zeros, zeros, _begin(zeros, zeros))

    def bound(self, state: _LaplaceState) -> jax.Array:
        asked = _ask(state.trial, self._factors(state))
        return jnp.where(state.phase == self.draw, np.uint32(2) * self.t, asked)

    def advance(self, state: _LaplaceState, u: jax.Array) -> Any:
        drawing, counting = state.phase == self.draw, state.phase == self.count
        count = (~counting).astype(jnp.uint32)
        trial, ended, success = _answer(state.trial, self._factors(state), count, u)
        over, success = drawing | ended, drawing | success
        failure = over & ~success

        phase = jnp.where(success & ~counting, state.phase + np.uint32(1), state.phase)
        twice = jnp.where(drawing, u, state.twice)
        v = state.v + (success & counting).astype(jnp.uint32)
        # To keep U takes exp(-U / t), one factor; to count takes exp(-1), none.
        fresh = _begin(jnp.zeros_like(v), (phase != self.count).astype(jnp.uint32))
        following = _LaplaceState(phase, twice, v, _choose(over, fresh, trial))

        done = failure & counting & ~self._minus_zero(twice, v)
        return _choose(failure, self.start(len(u)), following), done, (twice, v)

    def _factors(self, state: _LaplaceState) -> _Factors:
        return ((state.twice >> np.uint32(1), self.t),)

    def _minus_zero(self, twice: jax.Array, v: jax.Array) -> jax.Array:
        zero = _limbs.less(magnitude(twice, v, self.t), Limbs(jnp.uint32(0), self.s))
        return zero & (twice % np.uint32(2) == 1) & self.signed


class _GaussianState(NamedTuple):
    """What a lane knows.

    Attributes:
        phase: draws U, counts V, or checks the pair.
        twice: 2 U + sign.
        v: V, as far as it is counted.
        square: checks left of exp(-b).
        cross: checks left of exp(-b x); then comes one of exp(-b x x).
        trial: the trial on its way.
    """

    phase: jax.Array
    twice: jax.Array
    v: jax.Array
    square: jax.Array
    cross: jax.Array
    trial: _Trial


class Gaussian:
    """U + t V and a sign, as 2 U + sign and V."""

    records = 2
    draw, count, check = (np.uint32(phase) for phase in range(3))

    def __init__(self, numerator: jax.Array, denominator: jax.Array) -> None:
        self.twice = np.uint32(2) * numerator
        self.t = jnp.maximum(_square_root(self.twice // denominator), np.uint32(1))
        # b / twice <= 1 for a variance of at least 1 / 2. Below, t = 1, and what is asked of
        # U / t = 0 is answered before a question about b comes up.
        self.b = self.t * self.t * denominator
        self.whole, self.rest = self.b // self.twice, self.b % self.twice

    def start(self, lanes: int) -> _GaussianState:
        zeros = jnp.zeros((lanes,), jnp.uint32)
        return _GaussianState(zeros, zeros, zeros, zeros, zeros, _begin(zeros, zeros))

    def bound(self, state: _GaussianState) -> jax.Array:
        asked = _ask(state.trial, self._factors(state))
        return jnp.where(state.phase == self.draw, np.uint32(2) * self.t, asked)

    def advance(self, state: _GaussianState, u: jax.Array) -> Any:
        _, count = self._size(state)
        trial, ended, success = _answer(state.trial, self._factors(state), count, u)
        drawing = state.phase == self.draw
        over, success = drawing | ended, drawing | success
        following = self._move(state, u, over, success)
        fresh = _begin(*self._size(following))
        following = following._replace(trial=_choose(over, fresh, trial))

        failure = over & ~success
        checking = state.phase == self.check
        minus_zero = ~checking & failure & (state.twice == 1) & (state.v == 0)
        done = checking & success & (state.square == 0) & (state.cross == 0)
        restart = (checking & failure) | minus_zero
        record = (state.twice, state.v)
        return _choose(restart, self.start(len(u)), following), done, record

    def _move(
        self, state: _GaussianState, u: jax.Array, over: jax.Array, success: jax.Array
    ) -> _GaussianState:
        """The state but for its trial, where a draw or a trial is over."""
        drawing, counting = state.phase == self.draw, state.phase == self.count
        # The failure that ends the counting is no rejection: V is known, and the checks begin.
        counted = counting & over & ~success
        passed = (state.phase == self.check) & success
        squares = state.square > 0
        crosses = ~squares & (state.cross > 0)
        v, one = state.v, np.uint32(1)
        return state._replace(
            phase=state.phase + (drawing | counted).astype(jnp.uint32),
            twice=jnp.where(drawing, u, state.twice),
            v=v + (counting & success).astype(jnp.uint32),
            square=jnp.where(counted, v * (v - one), state.square - _bit(passed & squares)),
            cross=jnp.where(counted, v + v, state.cross - _bit(passed & crosses)),
        )

    def _size(self, state: _GaussianState) -> tuple[jax.Array, jax.Array]:
        """The trials of exp(-1) that come first, and the number of factors."""
        of_b = self._of_b(state)
        count = np.uint32(3) - _bit(state.cross > 0)
        return (
            jnp.where(of_b, self.whole, np.uint32(0)),
            jnp.where(of_b, np.uint32(1), count),
        )

    def _of_b(self, state: _GaussianState) -> jax.Array:
        """Whether the trial is one of exp(-b)."""
        return (state.phase == self.count) | (state.square > 0)

    def _factors(self, state: _GaussianState) -> _Factors:
        of_x = (state.twice >> np.uint32(1), self.t)
        numerator = jnp.where(self._of_b(state), self.rest, self.b)
        return ((numerator, self.twice), of_x, of_x)


def draw(key: jax.Array, machine: Machine, count: int) -> tuple[jax.Array, ...]:
    """Runs a machine until it has drawn `count` samples, and returns their words."""
    turns = max(1, -(-count // _LANES))
    # All lanes take as many turns: one that stopped at a time instead of a number would favor short
    # walks. Whole blocks of 16 words where there are many; odd sizes are several times slower.
    lanes = count if count < 64 else -(-count // (turns * 16)) * 16
    start = machine.start(lanes)
    words = jnp.zeros((machine.records, turns, lanes), jnp.uint32)
    first = (jnp.uint32(0), jnp.zeros((lanes,), jnp.int32), start, words)

    def play(carry: Any) -> Any:
        round_number, turn, state, words = carry
        bits = jax.random.bits(jax.random.fold_in(key, round_number), (lanes,), jnp.uint32)
        accepted, u = _uniform(bits, machine.bound(state))
        # All lanes advance on every word; where the word did not count, that is undone below.
        following, done, record = machine.advance(state, u)
        # Written in every round: what stays is the last. Out of bounds once a lane has all.
        at = words.at[:, turn, np.arange(lanes)]
        words = at.set(jnp.stack(record), mode="drop", unique_indices=True)
        state = _choose(accepted, _choose(done, start, following), state)
        turn = turn + (accepted & done).astype(jnp.int32)
        return round_number + np.uint32(1), turn, state, words

    *_, words = lax.while_loop(lambda carry: jnp.any(carry[1] < turns), play, first)
    return tuple(words.reshape(machine.records, -1)[:, :count])


def _uniform(word: jax.Array, bound: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether a word counts, and the uniform integer below the bound that it stands for."""
    product = _limbs.full_product(word, bound)
    return product.low >= (np.uint32(0) - bound) % bound, product.high


def magnitude(twice: jax.Array, v: jax.Array, t: jax.Array) -> Limbs:
    """U + t V."""
    product = _limbs.full_product(v, t)
    return _limbs.add(product, Limbs(jnp.zeros_like(twice), twice >> np.uint32(1)))


def quotient(x: Limbs, divisor: jax.Array) -> jax.Array:
    """floor(x / divisor) as int32, saturated, bit by bit; both are below 2^63 and 2^31."""
    rest, digits = x.high, jnp.zeros_like(x.low)
    for bit in range(31, -1, -1):
        rest = (rest << np.uint32(1)) | ((x.low >> np.uint32(bit)) & np.uint32(1))
        enough = rest >= divisor
        rest = jnp.where(enough, rest - divisor, rest)
        digits = (digits << np.uint32(1)) | _bit(enough)
    in_range = (x.high < divisor) & (digits <= _LARGEST)
    return jnp.where(in_range, digits, np.uint32(_LARGEST)).astype(jnp.int32)


def _square_root(n: jax.Array) -> jax.Array:
    """floor(sqrt(n)), bit by bit."""
    root = jnp.zeros_like(n)
    for bit in range(15, -1, -1):
        candidate = root | np.uint32(1 << bit)
        root = jnp.where(candidate * candidate <= n, candidate, root)
    return root


def _bit(condition: jax.Array) -> jax.Array:
    return condition.astype(jnp.uint32)


def _choose(condition: jax.Array, x: Any, y: Any) -> Any:
    """A tree of x where the condition holds, else of y."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)
